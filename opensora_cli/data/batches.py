"""What training is given: micro-batches of clips, and the cuts of files that they are made of."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipRequest:
    """Which frames of which sample are wanted, at what size."""

    path: str
    """A file, or the name of a procedural scene."""
    caption: str
    """As in the table."""
    motion_score: float | None
    start: int
    """First frame, from 0."""
    interval: int
    """Every how many-th frame from there on, 1 or more."""
    num_frames: int
    height: int
    width: int
    fps: float
    """Frames per second of the cut; 0 for pictures, and where it is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    """A sample that could not be read, and what took its place."""

    path: str
    reason: str
    by: str
    """Path of the other sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipBatch:
    """One micro-batch: clips of one bucket."""

    number: int
    """In the whole run, over all ranks and epochs; from 0."""
    epoch: int
    paths: tuple[str, ...]
    captions: tuple[str, ...]
    fps: tuple[float, ...]
    """Of the clips as they are here; 0 for pictures, and where it is unknown."""
    motion_scores: tuple[float | None, ...]
    pixels_BTHWC: Tensor | None
    """uint8 RGB, on the host; None where `cached` takes its place."""
    cached: tuple[Any, ...] | None
    """What was computed from the clips before, one value for each."""
    replaced: tuple[Replacement, ...] = ()
    """Samples that were meant to be here and could not be read."""
