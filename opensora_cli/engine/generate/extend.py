"""Join the segments of a video that is longer than one clip of its model.

Each segment after the first is given the last frames of the one before, encoded again: the first latent frame of a
causal autoencoder holds one frame, the last ones hold four each. Latents themselves came back worse, on the demo at
23.9 dB PSNR instead of 25.8.
"""

from collections.abc import Generator

import torch

from opensora_cli.core.device import peak_memory_gib
from opensora_cli.engine.estimate.offload import DECODE, DENOISE
from opensora_cli.engine.generate.chain import Chain
from opensora_cli.engine.generate.decode import Clip, Figures, HeldVideo
from opensora_cli.engine.generate.events import Events
from opensora_cli.engine.generate.outputs import SampleFiles
from opensora_cli.engine.generate.plan import Plan
from opensora_cli.media.read import read_video
from opensora_cli.media.resize import fit_frames, to_uint8

_LUMA = torch.tensor([0.299, 0.587, 0.114]).double()


class ExtendedVideo(Clip):
    """Video that is joined from its segments.

    Args:
        kept_THWC: frames of the clip that the video continues, from `continued_clip`.
    """

    def __init__(self, chain: Chain, files: SampleFiles, events: Events, kept_THWC: torch.Tensor | None = None) -> None:
        super().__init__(chain, files, events)
        self._own_THWC: list[torch.Tensor] = [] if kept_THWC is None else [kept_THWC]
        self._figures: list[Figures] = []
        self._segments: list[dict[str, object]] = []

    def add(self, segment: HeldVideo, *, seed: int) -> None:
        """Append a segment, without the frames that it was given; `seed` is that of its noise."""
        frames_THWC, figures, settings = segment.frames_THWC, segment.figures, self.chain.settings
        shift = 0.0
        if self._own_THWC:
            overlap = settings.overlap if self._segments else settings.given_frames
            frames_THWC, shift = follow(self.last_frames(overlap), frames_THWC[:overlap], frames_THWC[overlap:])
        self._figures.append(figures)
        self._segments.append(
            {
                "prompt": settings.segment_prompts[len(self._segments)],
                "seed": seed,
                "start_frame": sum(map(len, self._own_THWC)),
                "num_frames": len(frames_THWC),
                **{f"{stage}_s": round(figures.timings_s[stage], 3) for stage in (DENOISE, DECODE)},
                "given_frames_psnr_db": figures.to_json()["given_frames_psnr_db"],
                # Shift of the first frame, of 255; mean over channels.
                "brightness_shift": round(shift, 2),
            }
        )
        self._own_THWC.append(frames_THWC)
        self.latents += segment.latents

    def last_frames(self, overlap: int) -> torch.Tensor:
        """Return the last frames (overlap, H, W, 3), which the next segment is given."""
        last_THWC = self._own_THWC[-1]
        for own_THWC in reversed(self._own_THWC[:-1]):
            if len(last_THWC) >= overlap:
                break
            last_THWC = torch.cat([own_THWC, last_THWC])
        return last_THWC[-overlap:]

    def pieces(self) -> Generator[torch.Tensor]:
        yield from self._own_THWC

    def figures(self) -> Figures:
        """Return the figures. The PSNR is that of the frames that the first segment was given."""
        own = {stage: sum(each.timings_s[stage] for each in self._figures) for stage in (DENOISE, DECODE)}
        return Figures(
            {**self.events.timings_s, **own},
            peak_memory_gib(self.chain.video.hardware.device),
            self._figures[0].given_frames_psnr_db,
            self.events.linear_products,
            tuple(self._segments),
        )


def continued_clip(plan: Plan) -> torch.Tensor | None:
    """Return the clip that the first segment continues, uint8 in the size of the video; None without one."""
    condition = plan.settings.condition
    if condition.continued is None:
        return None
    frames_THWC = read_video(condition.references[0], num_frames=condition.continued).frames_THWC
    if frames_THWC.shape[1:3] == (plan.height, plan.width):
        return frames_THWC
    fitted = (
        fit_frames(frame_HWC[None], height=plan.height, width=plan.width, fit=condition.fit, picture=False)
        for frame_HWC in frames_THWC
    )
    return torch.cat([to_uint8(frame_C1HW) for frame_C1HW in fitted])


def follow(kept_THWC: torch.Tensor, remade_THWC: torch.Tensor, new_THWC: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Return new frames whose brightness continues the kept frames, and the shift of the first new frame.

    A model reproduces given frames with a slightly different brightness, which the new frames follow: without a
    correction the video would flash. The first new frame is shifted, channel by channel: its mean then differs from the
    last kept frame like it differed from the last remade one. In luma it differs no more than consecutive kept frames.
    The shift decreases to zero over the new frames, so that the shifts of many segments do not add up.

    Args:
        kept_THWC: at least two frames that stay in the video, uint8.
        remade_THWC: the same frames as the new segment reproduces them.
        new_THWC: frames of the segment after these.
    """
    means_C, remade_C, first_C = (
        frame.double().mean((0, 1)) for frame in (kept_THWC[-1], remade_THWC[-1], new_THWC[0])
    )
    step_C = first_C - remade_C
    kept_TC = torch.stack([frame_HWC.double().mean((0, 1)) for frame_HWC in kept_THWC])
    largest = max(float(abs(_LUMA @ step)) for step in kept_TC.diff(dim=0))
    own = float(abs(_LUMA @ step_C))
    shift_C = means_C + step_C * min(1.0, largest / own if own else 1.0) - first_C
    followed_THWC = torch.empty_like(new_THWC)
    for index, frame_HWC in enumerate(new_THWC):
        left = 1 - index / len(new_THWC)
        followed_THWC[index] = (frame_HWC + (left * shift_C).float()).round().clamp(0, 255)
    return followed_THWC, float(shift_C.mean())
