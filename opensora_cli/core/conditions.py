"""What a clip is conditioned on: the table of modes, without torch.

A mode is one row: where the given frames come from, where they go, how many there are. Settings, sampling, training,
encoding and `--help` all read this table, and nothing reads the name of a mode: a further mode is a further row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum

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
    description: str
    """In a few words, for help and the descriptions of settings."""

    @property
    def needs_reference(self) -> bool:
        """Whether anything is given at all."""
        return self.source is not Source.NONE

    @property
    def max_references(self) -> int:
        """How many files it can use: two pictures may come from one file or from two."""
        if not self.needs_reference:
            return 0
        return 2 if self.source is Source.BOTH_PICTURES else 1

    @property
    def parts_at_head(self) -> tuple[bool, ...]:
        """Position of each of `reference_parts`: True for the first frames of the clip, False for the last."""
        return (True,) * self.at_head + (False,) * self.at_tail

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
    ConditionMode("t2v", Source.NONE, Position.NONE, Length.NONE, "nothing is given"),
    ConditionMode("i2v_head", Source.FIRST_PICTURE, Position.HEAD, Length.ONE, "the first frame is given"),
    ConditionMode("i2v_tail", Source.LAST_PICTURE, Position.TAIL, Length.ONE, "the last frame is given"),
    ConditionMode("i2v_loop", Source.BOTH_PICTURES, Position.BOTH, Length.ONE, "both are given"),
    ConditionMode("v2v_head", Source.VIDEO, Position.HEAD, Length.VIDEO, "the first frames are given"),
    ConditionMode("v2v_tail", Source.VIDEO, Position.TAIL, Length.VIDEO, "the last frames are given"),
    ConditionMode("v2v_head_easy", Source.VIDEO, Position.HEAD, Length.EASY, "more of the first frames are given"),
    ConditionMode("v2v_tail_easy", Source.VIDEO, Position.TAIL, Length.EASY, "more of the last frames are given"),
)
CONDITION_MODES: dict[str, ConditionMode] = {mode.name: mode for mode in _TABLE}
T2V = CONDITION_MODES["t2v"]
CONTINUING = CONDITION_MODES["v2v_head"]
"""How a segment of an extended video is given the last frames of the one before."""


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

    def given_latent_frames(self, mode: ConditionMode, *, causal: bool) -> int:
        """Return how many latent frames of a clip `mode` gives, at all of its positions."""
        return (mode.at_head + mode.at_tail) * self.latent_frames(mode, causal=causal)

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
    Raises RequestError if there is no such mode.
    """
    mode = CONDITION_MODES.get(name)
    if mode is None:
        nearest = get_close_matches(name, CONDITION_MODES, n=1, cutoff=0.0)[0]
        raise RequestError(
            f"condition.mode={name!r} is not one of {', '.join(CONDITION_MODES)}", hint=f"did you mean {nearest}?"
        )
    return T2V if num_latent_frames == 1 else mode


def suggested_mode(are_pictures: Sequence[bool]) -> ConditionMode | None:
    """Return the mode for files that are pictures or videos; None if no mode suits them."""
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


def longest_mode(
    position: Position, num_frames: int, *, causal: bool, temporal_compression: int, lengths: ReferenceLengths
) -> tuple[ConditionMode, int] | None:
    """Return the mode that takes most of a video of `num_frames`, and the frames that it takes; None if none fits."""
    takes = [
        (mode, lengths.pixel_frames(mode, causal=causal, temporal_compression=temporal_compression))
        for mode in CONDITION_MODES.values()
        if mode.position is position and mode.needs_reference
    ]
    return max((each for each in takes if each[1] <= num_frames), key=lambda each: each[1], default=None)


def reference_parts(
    mode: ConditionMode,
    *,
    causal: bool = True,
    temporal_compression: int = 4,
    lengths: ReferenceLengths = RELEASED_LENGTHS,
) -> tuple[ReferencePart, ...]:
    """Return what to read for `mode`, the head before the tail: one entry of `ref_list[i]` for each part.

    A `causal` autoencoder keeps the first frame on its own. `lengths` are latent frames.
    """
    num_frames = lengths.pixel_frames(mode, causal=causal, temporal_compression=temporal_compression)
    parts = []
    for at_head in mode.parts_at_head:
        if mode.source is Source.VIDEO:
            file_index, from_end = 0, not at_head
        elif mode.source is Source.FIRST_PICTURE or (mode.source is Source.BOTH_PICTURES and at_head):
            file_index, from_end = 0, False
        else:
            file_index, from_end = -1, True
        parts.append(ReferencePart(file_index=file_index, from_end=from_end, num_frames=num_frames))
    return tuple(parts)
