"""A video that is longer than its model makes at once: how the segments of one are joined.

Each segment after the first is given the last frames of the one before, and the video keeps those as they are. They are
decoded, and encoded again: the first latent frame of a causal autoencoder holds one frame, where the last latents of
a clip hold four each. Given as they are, those came back worse: on the demo at 23.9 dB PSNR against 25.8.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from opensora_cli.engine.components.hardware import peak_memory_gib
from opensora_cli.engine.estimate.offload import DECODE, DENOISE
from opensora_cli.engine.generate.decode import Figures, SampleFrames, SegmentFigures
from opensora_cli.engine.generate.events import RunRecord
from opensora_cli.engine.generate.plan import Chain
from opensora_cli.engine.generate.targets import SampleFiles

_LUMA = torch.tensor([0.299, 0.587, 0.114])


class Segment(NamedTuple):
    """A segment as it was decoded, given frames included."""

    latents: tuple[torch.Tensor, ...]
    frames_THWC: torch.Tensor
    """uint8 on the CPU."""
    figures: Figures

    @classmethod
    def of(cls, decoding: SampleFrames) -> "Segment":
        """Decode a segment into memory."""
        frames_THWC = torch.cat([*decoding.pieces()])
        return cls(decoding.latents, frames_THWC, decoding.figures())


@dataclass
class Joined:
    """A sample whose segments are joined one after the other."""

    chain: Chain
    sample: SampleFiles
    record: RunRecord
    latents: tuple[torch.Tensor, ...] = ()
    """The latents_CTHW of each segment."""
    _own_THWC: list[torch.Tensor] = field(default_factory=list)
    _segments: list[SegmentFigures] = field(default_factory=list)

    def add(self, clip: Segment, seed: int) -> None:
        """Append what a segment of this noise has of its own."""
        own_THWC, shift = clip.frames_THWC, 0.0
        if self._own_THWC:
            overlap = self.chain.settings.overlap
            own_THWC, shift = follow(self.last_frames(), clip.frames_THWC[:overlap], clip.frames_THWC[overlap:])
        timings = clip.figures.timings_s
        self._segments.append(
            SegmentFigures(
                prompt=self.chain.settings.segment_prompts[len(self._segments)],
                seed=seed,
                start_frame=sum(map(len, self._own_THWC)),
                num_frames=len(own_THWC),
                denoise_s=round(timings[DENOISE], 3),
                decode_s=round(timings[DECODE], 3),
                given_frames_psnr_db=_rounded(clip.figures.given_frames_psnr_db),
                brightness_shift=round(shift, 2),
            )
        )
        self._own_THWC.append(own_THWC)
        self.latents += clip.latents

    def last_frames(self) -> torch.Tensor:
        """Return the last frames (overlap, H, W, 3), which the next segment is given."""
        overlap, last_THWC = self.chain.settings.overlap, self._own_THWC[-1]
        for own_THWC in reversed(self._own_THWC[:-1]):
            if len(last_THWC) >= overlap:
                break
            last_THWC = torch.cat([own_THWC, last_THWC])
        return last_THWC[-overlap:]

    def pieces(self) -> Generator[torch.Tensor]:
        """Yield the frames (t, H, W, 3) of each segment, uint8 on the CPU."""
        yield from self._own_THWC

    def figures(self) -> Figures:
        """Return what all segments took; the PSNR is that of frames which are given to the first."""
        return Figures(
            {
                **self.record.timings_s,
                DENOISE: sum(segment.denoise_s for segment in self._segments),
                DECODE: sum(segment.decode_s for segment in self._segments),
            },
            peak_memory_gib(self.chain.video.hardware.device),
            self._segments[0].given_frames_psnr_db,
            self.record.linear_products,
            tuple(self._segments),
        )


def follow(kept_THWC: torch.Tensor, remade_THWC: torch.Tensor, new_THWC: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Return new frames whose brightness goes on from that of the kept ones, and by how much the first is shifted.

    What a model makes of given frames differs from them a little in brightness, and the new frames follow what it
    makes: joined as they are, the video would flash. So the first new frame is shifted, channel by channel, to differ
    in its mean from the last kept frame as it differs from the last remade one, but in luma by no more than two of the
    kept frames in a row do; the next ones less and less, so that the shifts of many segments do not add up.

    Args:
        kept_THWC: uint8, at least two, which stay in the video.
        remade_THWC: what the new segment has in their place.
        new_THWC: its frames after these.
    """
    luma = _LUMA.double()
    means_C, remade_C, first_C = (
        frame.double().mean((0, 1)) for frame in (kept_THWC[-1], remade_THWC[-1], new_THWC[0])
    )
    step_C = first_C - remade_C
    largest = max(float(abs(luma @ step)) for step in _mean_steps(kept_THWC))
    own = float(abs(luma @ step_C))
    shift_C = means_C + step_C * min(1.0, largest / own if own else 1.0) - first_C
    followed_THWC = torch.empty_like(new_THWC)
    for index, frame_HWC in enumerate(new_THWC):
        left = 1 - index / len(new_THWC)
        followed_THWC[index] = (frame_HWC + (left * shift_C).float()).round().clamp(0, 255)
    return followed_THWC, float(shift_C.mean())


def _mean_steps(frames_THWC: torch.Tensor) -> Sequence[torch.Tensor]:
    means_TC = torch.stack([frame_HWC.double().mean((0, 1)) for frame_HWC in frames_THWC])
    return list(means_TC.diff(dim=0))


def _rounded(db: float | None) -> float | None:
    return None if db is None else round(db, 2)
