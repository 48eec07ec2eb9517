"""Buckets: samples of one resolution, length and shape, which can form a batch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

NO_BUCKET = -1
FILLED = 0.8
"""Share of the pixels of a resolution that a sample needs to count as large enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Common properties of the samples of a batch after cutting and resizing."""

    resolution: str
    num_frames: int
    aspect_ratio: str
    """Aspect ratio as width:height."""
    height: int
    width: int
    batch_size: int

    @property
    def kind(self) -> tuple[str, int]:
        """Resolution and length, without the shape."""
        return self.resolution, self.num_frames


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """One resolution, with its shapes and lengths in training."""

    name: str
    pixels: float
    sizes: Mapping[str, tuple[int, int]]
    """Sizes of the shapes: aspect ratio width:height -> (height, width)."""
    lengths: Mapping[int, tuple[float, int]]
    """Lengths: frames -> (probability, batch size)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Properties that determine the bucket of each sample of a table, as arrays of one length."""

    num_frames: NDArray[np.int64]
    height: NDArray[np.int64]
    width: NDArray[np.int64]
    fps: NDArray[np.float64]
    """Frames per second; NaN for pictures and unknown rates."""

    def __len__(self) -> int:
        return len(self.num_frames)


class Buckets:
    """Assignment of samples to buckets.

    A sample goes to the largest resolution of which it has 80 % of the pixels. There it goes to the longest clip that
    it covers at the reduced frame rate (at most `fps_max`), and then to the nearest shape. If it covers no length, or
    the length's probability rejects it, the next smaller resolution is tried. Single frames go only to buckets of one
    frame, and videos never do.
    """

    def __init__(self, resolutions: list[Resolution], *, fps_max: float) -> None:
        self.resolutions = sorted(resolutions, key=lambda resolution: -resolution.pixels)
        """Resolutions, the largest first."""
        self._fps_max = fps_max
        self._all: list[Bucket] = []
        self._first: dict[tuple[str, int], int] = {}
        for resolution in self.resolutions:
            for length in sorted(resolution.lengths, reverse=True):
                self._first[resolution.name, length] = len(self._all)
                self._all += [
                    Bucket(
                        resolution=resolution.name,
                        num_frames=length,
                        aspect_ratio=ratio,
                        height=height,
                        width=width,
                        batch_size=resolution.lengths[length][1],
                    )
                    for ratio, (height, width) in resolution.sizes.items()
                ]
        lengths = {resolution.name: resolution.lengths for resolution in self.resolutions}
        self._probabilities = np.array([lengths[bucket.resolution][bucket.num_frames][0] for bucket in self._all])
        self.batch_sizes: NDArray[np.int64] = np.array([bucket.batch_size for bucket in self._all], dtype=np.int64)
        """Samples of a micro-batch of each bucket."""

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, index: int) -> Bucket:
        return self._all[index]

    def assign(self, samples: Samples, draws_NR: NDArray[np.float64]) -> NDArray[np.int32]:
        """Return the index of each sample's bucket, or `NO_BUCKET`.

        `draws_NR` has a number in [0, 1) for each sample and resolution, the largest first. A bucket rejects the sample
        if its probability is not above this number.
        """
        fitting_NR = self.fitting(samples)
        taken_NR = (fitting_NR != NO_BUCKET) & (draws_NR < self._probabilities[fitting_NR])
        first_N = taken_NR.argmax(axis=1)
        chosen_N = np.take_along_axis(fitting_NR, first_N[:, None], axis=1)[:, 0]
        return np.where(taken_NR.any(axis=1), chosen_N, NO_BUCKET).astype(np.int32)

    def reachable(self, samples: Samples) -> NDArray[np.int32]:
        """Return a possible bucket for each sample and resolution, (N, R), or `NO_BUCKET`.

        A bucket with probability 1 passes no sample on to smaller resolutions, and one with probability 0 takes none.
        """
        fitting_NR = self.fitting(samples)
        probabilities_NR = np.where(fitting_NR == NO_BUCKET, 0.0, self._probabilities[fitting_NR])
        stopped_NR = np.cumsum(probabilities_NR >= 1, axis=1) - (probabilities_NR >= 1) > 0
        return np.where((probabilities_NR > 0) & ~stopped_NR, fitting_NR, NO_BUCKET).astype(np.int32)

    def fitting(self, samples: Samples) -> NDArray[np.int32]:
        """Return the fitting bucket for each sample and resolution, (N, R), the largest first, or `NO_BUCKET`."""
        fitting_NR = np.full((len(samples), len(self.resolutions)), NO_BUCKET, dtype=np.int32)
        frames, intervals = samples.num_frames, frame_intervals(samples.fps, self._fps_max)
        for column, resolution in enumerate(self.resolutions):
            large_enough = samples.height * samples.width >= resolution.pixels * FILLED
            ratios = (ratio.partition(":") for ratio in resolution.sizes)
            shapes_S = np.array([1 / (float(width) / float(height)) for width, _, height in ratios])
            # The first shape for equal distances.
            nearest = np.abs((samples.height / samples.width)[:, None] - shapes_S).argmin(axis=1)
            for length in sorted(resolution.lengths):
                covered = frames == 1 if length == 1 else (frames > 1) & (frames >= length * intervals)
                fits = large_enough & covered
                fitting_NR[fits, column] = self._first[resolution.name, length] + nearest[fits]
        return fitting_NR


def map_target_fps(fps: float, max_fps: float) -> tuple[float, int]:
    """Return the reduced frame rate of a video, and the interval between the frames to take.

    A video slower than `max_fps` keeps all frames. Other videos get the smallest interval that reduces the rate to
    `max_fps` or less; the resulting rate is rounded down to an integer. An unknown rate, NaN, gives rate 0 and keeps
    all frames.
    """
    if math.isnan(fps):
        return 0.0, 1
    if fps < max_fps:
        return fps, 1
    interval = math.ceil(fps / max_fps)
    return float(math.floor(fps / interval)), interval


def frame_intervals(fps: NDArray[np.floating[Any]], max_fps: float) -> NDArray[np.int64]:
    """Return the intervals of `map_target_fps` for many videos at once."""
    known = np.nan_to_num(fps, nan=0.0)
    return np.where(known < max_fps, 1, np.ceil(known / max_fps)).astype(np.int64)
