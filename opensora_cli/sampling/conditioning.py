"""What a clip is conditioned on: the table of modes, and the mask and reference latents that a mode asks for.

A mode is one row: where the given frames come from, where they go, how many there are. A further mode is a further
row; to offer it, the settings, which know modes by name only, list that name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum

import torch

from opensora_cli.core.exceptions import RequestError


class Source(StrEnum):
    """Which frames of which reference file are given. A video counts as a picture: its first or last frame."""

    NONE = "none"
    FIRST_PICTURE = "first picture"
    """The first frame of the first file."""
    LAST_PICTURE = "last picture"
    """The last frame of the last file."""
    BOTH_PICTURES = "both pictures"
    """Both of these: the first for the head, the last for the tail."""
    VIDEO = "video"
    """Consecutive frames of the first file: its beginning for the head, its end for the tail."""


class Position(StrEnum):
    """Where in the clip the given frames are."""

    NONE = "none"
    HEAD = "head"
    TAIL = "tail"
    BOTH = "both"


class Length(StrEnum):
    """How many latent frames are given at each position; `ReferenceLengths` has the numbers."""

    NONE = "none"
    ONE = "one"
    VIDEO = "video"
    EASY = "easy"


@dataclass(frozen=True, slots=True)
class ConditionMode:
    """One row of the table."""

    name: str
    source: Source
    position: Position
    length: Length

    @property
    def needs_reference(self) -> bool:
        """Whether anything is given at all."""
        return self.source is not Source.NONE

    @property
    def gives_pictures(self) -> bool:
        """Whether single frames are given (the i2v modes).

        Only then does image guidance grow along the clip, and are the given latents put back after sampling.
        """
        return self.source in (Source.FIRST_PICTURE, Source.LAST_PICTURE, Source.BOTH_PICTURES)

    @property
    def at_head(self) -> bool:
        """Whether the first frames are given."""
        return self.position in (Position.HEAD, Position.BOTH)

    @property
    def at_tail(self) -> bool:
        """Whether the last frames are given."""
        return self.position in (Position.TAIL, Position.BOTH)


_TABLE = (
    ConditionMode("t2v", Source.NONE, Position.NONE, Length.NONE),
    ConditionMode("i2v_head", Source.FIRST_PICTURE, Position.HEAD, Length.ONE),
    ConditionMode("i2v_tail", Source.LAST_PICTURE, Position.TAIL, Length.ONE),
    ConditionMode("i2v_loop", Source.BOTH_PICTURES, Position.BOTH, Length.ONE),
    ConditionMode("v2v_head", Source.VIDEO, Position.HEAD, Length.VIDEO),
    ConditionMode("v2v_tail", Source.VIDEO, Position.TAIL, Length.VIDEO),
    ConditionMode("v2v_head_easy", Source.VIDEO, Position.HEAD, Length.EASY),
    ConditionMode("v2v_tail_easy", Source.VIDEO, Position.TAIL, Length.EASY),
)
CONDITION_MODES: Mapping[str, ConditionMode] = {mode.name: mode for mode in _TABLE}
T2V = CONDITION_MODES["t2v"]


@dataclass(frozen=True, slots=True)
class ReferenceLengths:
    """Latent frames given by the video modes, without the one more of a causal autoencoder.

    The defaults are those of the released model.
    """

    video: int = 8
    easy: int = 16

    def latent_frames(self, mode: ConditionMode, *, causal: bool) -> int:
        """Return how many latent frames `mode` gives at each of its positions."""
        # A causal autoencoder keeps the first frame on its own, in front of the groups of frames.
        match mode.length:
            case Length.NONE:
                return 0
            case Length.ONE:
                return 1
            case Length.VIDEO:
                return self.video + int(causal)
            case Length.EASY:
                return self.easy + int(causal)

    def pixel_frames(self, mode: ConditionMode, *, causal: bool, temporal_compression: int = 4) -> int:
        """Return how many frames of a reference become the latent frames of `latent_frames`."""
        latent_frames = self.latent_frames(mode, causal=causal)
        if mode.length in (Length.NONE, Length.ONE):
            return latent_frames
        return (latent_frames - int(causal)) * temporal_compression + int(causal)


RELEASED_LENGTHS = ReferenceLengths()


@dataclass(frozen=True, slots=True)
class ReferencePart:
    """A run of frames to read from one reference file, encode on its own, and hand to `prepare_inference_condition`."""

    file_index: int
    """Index into the files given: 0 the first, -1 the last."""
    from_end: bool
    """Whether the frames are the file's last and not its first."""
    num_frames: int
    """How many frames (pixels)."""


def condition_mode(name: str, *, num_latent_frames: int | None = None) -> ConditionMode:
    """Return the row called `name`; `t2v` if the clip has a single latent frame, of which nothing can be given.

    Raises:
        RequestError: no such mode.
    """
    mode = CONDITION_MODES.get(name)
    if mode is None:
        nearest = get_close_matches(name, CONDITION_MODES, n=1, cutoff=0.0)[0]
        raise RequestError(
            f"condition.mode={name!r} is not one of {', '.join(CONDITION_MODES)}", hint=f"did you mean {nearest}?"
        )
    return T2V if num_latent_frames == 1 else mode


def reference_parts(
    mode: ConditionMode,
    *,
    causal: bool = True,
    temporal_compression: int = 4,
    lengths: ReferenceLengths = RELEASED_LENGTHS,
) -> tuple[ReferencePart, ...]:
    """Return what to read for `mode`, the head before the tail: one entry of `ref_list[i]` for each part.

    Args:
        mode: the row.
        causal: whether the autoencoder keeps the first frame on its own.
        temporal_compression: frames per latent frame.
        lengths: latent frames given by the video modes.
    """
    num_frames = lengths.pixel_frames(mode, causal=causal, temporal_compression=temporal_compression)
    parts = []
    for wanted, is_tail in ((mode.at_head, False), (mode.at_tail, True)):
        if not wanted:
            continue
        if mode.source is Source.VIDEO:
            file_index, from_end = 0, is_tail
        elif mode.source is Source.FIRST_PICTURE or (mode.source is Source.BOTH_PICTURES and not is_tail):
            file_index, from_end = 0, False
        else:
            file_index, from_end = -1, True
        parts.append(ReferencePart(file_index=file_index, from_end=from_end, num_frames=num_frames))
    return tuple(parts)


def check_reference_length(
    mode: ConditionMode,
    num_frames: int,
    *,
    causal: bool = True,
    temporal_compression: int = 4,
    lengths: ReferenceLengths = RELEASED_LENGTHS,
    file_name: str = "the reference",
) -> None:
    """Refuse a reference of `num_frames` frames if `mode` needs more of it.

    Raises:
        RequestError: says how many frames are needed and how many there are, and which modes would do with them.
    """

    def needed_by(row: ConditionMode) -> int:
        return lengths.pixel_frames(row, causal=causal, temporal_compression=temporal_compression)

    needed = needed_by(mode)
    if num_frames >= needed:
        return
    # What changes least first: the same positions with fewer frames.
    fitting = [
        row.name
        for row in CONDITION_MODES.values()
        if row.needs_reference and row.position is mode.position and needed_by(row) <= num_frames
    ]
    raise RequestError(
        f"condition.mode={mode.name} needs {needed} frames of {file_name}, which has {num_frames}",
        hint=f"give a longer one, or use {' or '.join(reversed(fitting))}" if fitting else "give a longer one",
    )


def check_mode_fits(
    mode: ConditionMode,
    num_latent_frames: int,
    *,
    causal: bool = True,
    temporal_compression: int = 4,
    lengths: ReferenceLengths = RELEASED_LENGTHS,
) -> None:
    """Refuse a clip so short that `mode` would leave nothing to generate.

    Raises:
        RequestError: says how many frames the clip must have.
    """
    positions = int(mode.at_head) + int(mode.at_tail)
    given = positions * lengths.latent_frames(mode, causal=causal)
    if num_latent_frames <= given:
        shortest = given * temporal_compression + 1 if causal else (given + 1) * temporal_compression
        raise RequestError(
            f"condition.mode={mode.name} gives {given} latent frames, and the clip has only {num_latent_frames}",
            hint=f"ask for at least {shortest} frames, or for a mode that gives fewer",
        )


def prepare_inference_condition(
    z: torch.Tensor,
    mask_cond: str | ConditionMode,
    ref_list: Sequence[Sequence[torch.Tensor] | None] | None = None,
    causal: bool = True,
    *,
    lengths: ReferenceLengths = RELEASED_LENGTHS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the conditioning mask and the reference latents of a batch.

    The name and the order of the first four parameters are those that the Open-Sora community knows.

    Args:
        z: latents_BCTHW, of which only shape, device and dtype count.
        mask_cond: the mode, by name or as a row. With one latent frame it is `t2v`.
        ref_list: for each sample the encoded references (C,T',H,W), one for each of `reference_parts(mode)`. The head
            takes the first frames of the first, the tail the last frames of the last; a single one serves both.
        causal: whether the autoencoder keeps the first frame on its own.
        lengths: latent frames given by the video modes.

    Returns:
        conditioning_mask (B,1,T,H,W), 1 = given, and reference_latents (B,C,T,H,W), zero where nothing is given.

    Raises:
        RequestError: no such mode, a sample without a reference, or too few frames in a reference or in the clip.
        ValueError: as many references as samples are needed, each of the latents' channels, height and width.
    """
    num_latent_frames = z.shape[2]
    name = mask_cond if isinstance(mask_cond, str) else mask_cond.name
    mode = condition_mode(mask_cond) if isinstance(mask_cond, str) else mask_cond
    mask_B1THW = z.new_zeros((z.shape[0], 1, *z.shape[2:]))
    reference_BCTHW = torch.zeros_like(z)
    if num_latent_frames == 1 or not mode.needs_reference:
        return mask_B1THW, reference_BCTHW
    if ref_list is None:
        raise RequestError(f"condition.mode={name} needs a reference", hint="give one, or use t2v")
    count = lengths.latent_frames(mode, causal=causal)
    if count > num_latent_frames:
        raise RequestError(f"condition.mode={name} gives {count} latent frames, and the clip has {num_latent_frames}")
    for index, references in enumerate(_of_batch(ref_list, z.shape[0])):
        if not references:
            # Falling back to t2v, as the reference implementation does, would ignore what was asked for.
            raise RequestError(
                f"condition.mode={name} needs a reference for sample {index}", hint="give one, or use t2v"
            )
        if mode.at_head:
            mask_B1THW[index, :, :count] = 1
            reference_BCTHW[index, :, :count] = _checked(references[0], z, count, name)[:, :count]
        if mode.at_tail:
            mask_B1THW[index, :, -count:] = 1
            reference_BCTHW[index, :, -count:] = _checked(references[-1], z, count, name)[:, -count:]
    return mask_B1THW, reference_BCTHW


def _of_batch(
    ref_list: Sequence[Sequence[torch.Tensor] | None], batch_size: int
) -> Sequence[Sequence[torch.Tensor] | None]:
    if len(ref_list) != batch_size:
        raise ValueError(f"references for {len(ref_list)} samples were given to a batch of {batch_size}")
    return ref_list


def _checked(reference_CTHW: torch.Tensor, z: torch.Tensor, count: int, name: str) -> torch.Tensor:
    channels, frames, height, width = reference_CTHW.shape
    if (channels, height, width) != (z.shape[1], *z.shape[3:]):
        # Assignment would broadcast a 1x1 picture over the frame without a word.
        raise ValueError(f"a reference of shape {tuple(reference_CTHW.shape)} does not fit latents {tuple(z.shape)}")
    if frames < count:
        raise RequestError(
            f"condition.mode={name} needs {count} latent frames of its reference, which has {frames}",
            hint="give a longer one",
        )
    return reference_CTHW.to(z.device, z.dtype)


def restore_references(
    latents_BCTHW: torch.Tensor, conditioning_mask_B1THW: torch.Tensor, reference_latents_BCTHW: torch.Tensor
) -> torch.Tensor:
    """Return the latents with the given frames put back where the mask is 1, in every sample of the batch.

    For modes with `gives_pictures`: sampling only approaches the given latents. (The reference implementation restores
    sample 0 alone.) The result has the dtype and device of `latents_BCTHW`.
    """
    return torch.where(
        conditioning_mask_B1THW.to(latents_BCTHW.device) > 0, reference_latents_BCTHW.to(latents_BCTHW), latents_BCTHW
    )
