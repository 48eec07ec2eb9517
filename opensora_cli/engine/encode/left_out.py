"""Rows of a table that training never sees: how many, why, and what would take them in."""

import math
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from opensora_cli.core.documents import Document
from opensora_cli.core.latent_grid import LatentGrid
from opensora_cli.data.buckets import FILLED, NO_BUCKET, Buckets, Resolution, Samples, frame_intervals
from opensora_cli.engine.encode.datasets import TableRequests

_EXAMPLES = 3


class LeftOut(Document):
    """Rows that fall out for one reason."""

    reason: str
    rows: int
    examples: tuple[str, ...]
    """Up to three of them, with the numbers that decide."""
    fix: str
    """What would take them in."""

    def lines(self) -> list[str]:
        """Return it for people."""
        return [
            f"left out  {self.rows:,} {'row' if self.rows == 1 else 'rows'}: {self.reason}",
            *(f"            {example}" for example in self.examples),
            f"          {self.fix}",
        ]


def find_left_out(
    requests: TableRequests, usable: NDArray[np.bool_], assigned: NDArray[np.int32], *, grid: LatentGrid | None = None
) -> tuple[LeftOut, ...]:
    """Return the rows that no epoch uses, by reason.

    Args:
        requests: the table and its buckets.
        usable: of each row of the table, whether it counts.
        assigned: the bucket of each usable row in the first epoch, where rejected by probabilities `NO_BUCKET`.
        grid: of the autoencoder, to name a length that it takes; None: none is named.
    """
    return tuple(_Finder(requests, usable, grid).find(assigned))


class _Finder:
    def __init__(self, requests: TableRequests, usable: NDArray[np.bool_], grid: LatentGrid | None) -> None:
        self._table = requests.table
        self._rows = np.flatnonzero(usable)
        self._samples: Samples = requests.table.samples.only(usable)
        self._buckets: Buckets = requests.buckets
        self._fps_max = requests.fps_max
        self._grid = grid
        self._pixels = self._samples.height * self._samples.width

    def find(self, assigned: NDArray[np.int32]) -> Iterator[LeftOut]:
        fits_none = (self._buckets.fitting(self._samples) == NO_BUCKET).all(axis=1)
        is_picture = self._samples.num_frames == 1
        resolutions = self._buckets.resolutions
        pictures = [each for each in resolutions if 1 in each.lengths]
        videos = [each for each in resolutions if max(each.lengths) > 1]
        yield from self._of_kind(fits_none & is_picture, pictures, "pictures", other="videos", frames="1 frame")
        yield from self._of_kind(fits_none & ~is_picture, videos, "videos", other="pictures", frames="more frames")
        closed = ~fits_none & (self._buckets.reachable(self._samples) == NO_BUCKET).all(axis=1)
        yield from self._group(
            closed, "their buckets have probability 0", self._size_of, "a probability over 0 takes them"
        )
        yield from self._unfilled(assigned)

    def _of_kind(
        self, unfit: NDArray[np.bool_], resolutions: list[Resolution], kind: str, *, other: str, frames: str
    ) -> Iterator[LeftOut]:
        """Yield pictures or videos that fit none of the resolutions of their `kind`, or for which there are none."""
        if not resolutions:
            reason, fix = f"{kind}, and all buckets are for {other}", f"a bucket of {frames} takes them"
            yield from self._group(unfit, reason, self._size_of, fix)
            return
        smallest = resolutions[-1]
        least = math.ceil(smallest.pixels * FILLED)
        is_small = unfit & (self._pixels < least)

        def larger_enough(members: NDArray[np.int64]) -> str:
            side = int(math.sqrt(self._pixels[members].min() / FILLED))
            return f"a resolution of {side}px or less in data.buckets takes them"

        reason = f"too small: {smallest.name}, the smallest, takes {least:,} pixels or more"
        yield from self._group(is_small, reason, self._size_of, larger_enough)
        yield from self._too_short(unfit & ~is_small, resolutions)

    def _too_short(self, which: NDArray[np.bool_], resolutions: list[Resolution]) -> Iterator[LeftOut]:
        """Yield videos, by the shortest length for their size; a picture that is large enough is never too short."""
        if not which.any():
            return
        lengths_R = np.array([min(length for length in each.lengths if length > 1) for each in resolutions])
        least_R = np.array([each.pixels * FILLED for each in resolutions])
        longest = lengths_R.max()
        shortest_N = np.where(self._pixels[:, None] >= least_R, lengths_R, longest).min(axis=1)
        for shortest in np.unique(shortest_N[which]).tolist():
            yield from self._shorter_than(shortest, which & (shortest_N == shortest), smallest=resolutions[-1])

    def _shorter_than(self, shortest: int, which: NDArray[np.bool_], *, smallest: Resolution) -> Iterator[LeftOut]:
        num_frames, fps = self._samples.num_frames, self._samples.fps
        left = num_frames // frame_intervals(fps, self._fps_max)

        def example(index: int) -> str:
            frames = f"{num_frames[index]} frames"
            if left[index] == num_frames[index]:
                return frames
            return f"{frames} at {fps[index]:g} fps, of which data.fps_max={self._fps_max:g} leaves {left[index]}"

        def fix(members: NDArray[np.int64]) -> str:
            ways = []
            if self._grid is not None and (fitting := self._grid.longest_clip(int(left[members].min()))) > 1:
                ways.append(f"a bucket of {fitting} frames at {smallest.name}")
            rate = rate_for(self._samples, members, length=shortest)
            if rate is not None:
                ways.append(f"data.fps_max={rate:g}")
            return f"{' or '.join(ways)} takes them" if ways else "give longer clips"

        yield from self._group(
            which, f"too short: the shortest bucket for their size has {shortest} frames", example, fix
        )

    def _unfilled(self, assigned: NDArray[np.int32]) -> Iterator[LeftOut]:
        counts = np.bincount(assigned[assigned >= 0], minlength=len(self._buckets))
        sizes = np.array([self._buckets[index].batch_size for index in range(len(self._buckets))])
        short: list[int] = np.flatnonzero((counts > 0) & (counts < sizes)).tolist()

        def example(index: int) -> str:
            bucket = int(assigned[index])
            return f"{self._size_of(index)}, one of {counts[bucket]} of {self._buckets[bucket].aspect_ratio}"

        for name, length in dict.fromkeys(self._buckets[index].kind for index in short):
            own = [index for index in short if self._buckets[index].kind == (name, length)]
            fix = f"a batch size of {counts[own].min()} takes them"
            yield from self._group(
                np.isin(assigned, own),
                f"too few of one shape for a micro-batch of {sizes[own[0]]} in data.buckets.{name}.{length}",
                example,
                fix,
            )

    def _size_of(self, index: int) -> str:
        return f"{self._samples.width[index]}x{self._samples.height[index]}"

    def _group(
        self,
        which: NDArray[np.bool_],
        reason: str,
        example: Callable[[int], str],
        fix: Callable[[NDArray[np.int64]], str] | str,
    ) -> Iterator[LeftOut]:
        members = np.flatnonzero(which)
        if len(members):
            first = members[:_EXAMPLES].tolist()
            yield LeftOut(
                reason=reason,
                rows=len(members),
                examples=tuple(f"{self._table.paths[int(self._rows[at])]}: {example(at)}" for at in first),
                fix=fix if isinstance(fix, str) else fix(members),
            )


def rate_for(samples: Samples, members: NDArray[np.int64], *, length: int) -> float | None:
    """Return the least `fps_max`, to a thousandth, that leaves `length` frames of each of these videos.
    None: one has too few frames, or has an unknown rate and so loses none.
    """
    intervals = samples.num_frames[members] // length
    fps = samples.fps[members]
    if not len(members) or (intervals < 1).any() or np.isnan(fps).any():
        return None
    return math.ceil(float((fps / intervals).max()) * 1000 - 1e-6) / 1000
