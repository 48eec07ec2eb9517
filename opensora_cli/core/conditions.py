"""Table of condition modes: the frames of a clip that are given, and the grid of its latents. It does not need torch.

A mode is one row: the source, position and number of the given frames. Settings, sampling, training, encoding and
`--help` read this table. No code depends on the name of a mode, so that a new mode is a new row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from opensora_cli.core.exceptions import RequestError
from opensora_cli.core.formatting import nearest


class Source(StrEnum):
    """Reference that is given. A video can serve as a picture: its first frame at the head, its last at the tail."""

    NONE = "none"
    PICTURE = "picture"
    """One frame of the first file at the head, and one of the last file at the tail."""
    VIDEO = "video"
    """Consecutive frames of the first file: its beginning for the head, its end for the tail."""


@dataclass(frozen=True, slots=True)
class ConditionMode:
    """One row of the table of modes."""

    name: str
    source: Source
    description: str
    """Short text for help and the descriptions of settings."""
    at_head: bool = False
    """Whether the first frames of the clip are given."""
    at_tail: bool = False
    """Whether the last frames of the clip are given."""
    is_easy: bool = False
    """Whether a video gives more frames: `ReferenceLengths.easy`, not `ReferenceLengths.video`."""

    @property
    def needs_reference(self) -> bool:
        return self.source is not Source.NONE

    @property
    def gives_pictures(self) -> bool:
        """Whether single frames are given (the i2v modes).

        Only in these modes, image guidance grows along the clip, and the given latents are restored after sampling.
        """
        return self.source is Source.PICTURE

    @property
    def max_references(self) -> int:
        """Largest number of files for the mode. Two pictures may come from one file or from two."""
        return len(self.parts_at_head)

    @property
    def parts_at_head(self) -> tuple[bool, ...]:
        """Position of each part of `reference_parts`: True for the first frames of the clip, False for the last."""
        return (True,) * self.at_head + (False,) * self.at_tail


_TABLE = (
    ConditionMode("t2v", Source.NONE, "nothing is given"),
    ConditionMode("i2v_head", Source.PICTURE, "the first frame is given", at_head=True),
    ConditionMode("i2v_tail", Source.PICTURE, "the last frame is given", at_tail=True),
    ConditionMode("i2v_loop", Source.PICTURE, "both are given", at_head=True, at_tail=True),
    ConditionMode("v2v_head", Source.VIDEO, "the first frames are given", at_head=True),
    ConditionMode("v2v_tail", Source.VIDEO, "the last frames are given", at_tail=True),
    ConditionMode("v2v_head_easy", Source.VIDEO, "more of the first frames are given", at_head=True, is_easy=True),
    ConditionMode("v2v_tail_easy", Source.VIDEO, "more of the last frames are given", at_tail=True, is_easy=True),
)
CONDITION_MODES: dict[str, ConditionMode] = {mode.name: mode for mode in _TABLE}
T2V = CONDITION_MODES["t2v"]
CONTINUING = CONDITION_MODES["v2v_head"]
"""Mode that gives a segment of an extended video the last frames of the previous segment."""


@dataclass(frozen=True, slots=True)
class ReferenceLengths:
    """Latent frames given by the video modes, without the extra first frame of a causal autoencoder.

    The defaults are those of the released model.
    """

    video: int = 8
    easy: int = 16

    def latent_frames(self, mode: ConditionMode, *, causal: bool) -> int:
        """Return the number of latent frames that `mode` gives at each of its positions."""
        if mode.source is not Source.VIDEO:
            return int(mode.needs_reference)
        # A causal autoencoder keeps the first frame on its own, in front of the groups of frames.
        return (self.easy if mode.is_easy else self.video) + int(causal)

    def given_latent_frames(self, mode: ConditionMode, *, causal: bool) -> int:
        """Return the number of latent frames that `mode` gives at all of its positions together."""
        return len(mode.parts_at_head) * self.latent_frames(mode, causal=causal)

    def pixel_frames(self, mode: ConditionMode, *, causal: bool, temporal_compression: int = 4) -> int:
        """Return the number of reference frames that are encoded to `latent_frames` latent frames."""
        latent_frames = self.latent_frames(mode, causal=causal)
        if mode.source is not Source.VIDEO:
            return latent_frames
        return (latent_frames - int(causal)) * temporal_compression + int(causal)


RELEASED_LENGTHS = ReferenceLengths()


@dataclass(frozen=True, slots=True)
class ReferencePart:
    """Run of frames to read from one reference file and encode separately, for `prepare_inference_condition`."""

    file_index: int
    """Index of the reference file: 0 is the first, -1 the last."""
    from_end: bool
    """Whether the frames are the last ones of the file, not the first ones."""
    num_frames: int
    """Number of pixel frames."""


def condition_mode(name: str, *, num_latent_frames: int | None = None) -> ConditionMode:
    """Return the mode `name`, or `t2v` for a clip of one latent frame, which cannot be conditioned on frames.
    Raises RequestError for an unknown mode.
    """
    mode = CONDITION_MODES.get(name)
    if mode is None:
        close = nearest(name, CONDITION_MODES, cutoff=0.0)
        problem = f"condition.mode={name!r} is not one of {', '.join(CONDITION_MODES)}"
        raise RequestError(problem, hint=f"did you mean {close}?")
    return T2V if num_latent_frames == 1 else mode


def suggested_mode(are_pictures: Sequence[bool]) -> ConditionMode | None:
    """Return the mode for files that are pictures (True) or videos (False); None if no mode fits."""
    match are_pictures:
        case []:
            return T2V
        case [True]:
            return CONDITION_MODES["i2v_head"]
        case [True, True]:
            return CONDITION_MODES["i2v_loop"]
        case [False]:
            return CONDITION_MODES["v2v_head"]
    return None


def reference_parts(
    mode: ConditionMode,
    *,
    causal: bool = True,
    temporal_compression: int = 4,
    lengths: ReferenceLengths = RELEASED_LENGTHS,
) -> tuple[ReferencePart, ...]:
    """Return the frames to read for `mode`, head before tail: one part for each entry of `ref_list[i]`.

    A `causal` autoencoder keeps the first frame on its own. `lengths` are latent frames.
    """
    num_frames = lengths.pixel_frames(mode, causal=causal, temporal_compression=temporal_compression)
    return tuple(
        ReferencePart(
            file_index=-1 if mode.gives_pictures and not at_head else 0, from_end=not at_head, num_frames=num_frames
        )
        for at_head in mode.parts_at_head
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentGrid:
    """Sizes of the latents of a clip. Ratios are frames per latent frame, and pixels per latent along each side.

    If `is_causal`, the first latent frame encodes the first frame alone, and a clip has 1 frame more than a multiple of
    `time_compression_ratio`. Otherwise the number of frames is a multiple of it, or 1 for a picture.
    """

    latent_channels: int
    time_compression_ratio: int
    spatial_compression_ratio: int
    is_causal: bool

    def latent_frames(self, num_frames: int) -> int:
        """Return the number of latent frames of a clip.

        Raises:
            RequestError: A clip cannot have this number of frames. The message names the nearest numbers.
        """
        ratio = self.time_compression_ratio
        if num_frames < 1:
            raise RequestError(f"num_frames={num_frames} must be at least 1")
        if num_frames == 1:
            return 1
        latent_frames, over = divmod(num_frames - self.is_causal, ratio)
        if over:
            rule, below = "1 more than" if self.is_causal else "1, or", num_frames - over
            raise RequestError(
                f"num_frames={num_frames} must be {rule} a multiple of {ratio}: use {max(below, 1)} or {below + ratio}"
            )
        return latent_frames + self.is_causal

    def latent_size(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width of the latents of a picture.
        Raises RequestError if the sides are not multiples of the compression ratio.
        """
        ratio = self.spatial_compression_ratio
        if min(height, width) < 1 or height % ratio or width % ratio:
            raise RequestError(f"height={height} and width={width} must be multiples of {ratio}")
        return height // ratio, width // ratio

    def num_frames(self, latent_frames: int) -> int:
        """Return the number of frames that latents are decoded to."""
        ratio = self.time_compression_ratio
        if self.is_causal:
            return (latent_frames - 1) * ratio + 1
        return 1 if latent_frames == 1 else latent_frames * ratio

    def longest_clip(self, num_frames: int) -> int:
        """Return the largest number of frames, up to `num_frames` of at least 1, that encoding and decoding keep.

        A clip of one latent frame is skipped if it would be decoded as a picture.
        """
        latent_frames = (num_frames - self.is_causal) // self.time_compression_ratio + self.is_causal
        return self.num_frames(max(1, latent_frames))
