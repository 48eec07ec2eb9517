"""Micro-batches of training: their samples, their order, their clips and their random states.

`train(settings, source=...)` trains on any `ClipSource`.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from torch import Tensor

from opensora_cli.core.exceptions import CheckpointError

_SUBSTITUTES = 3


class Stream(IntEnum):
    """Independent random streams of one seed."""

    LOSS = 0
    DATA = 1
    BUCKETS = 2
    ORDER = 3
    STARTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Request to a loader: several samples, all of one bucket."""

    number: int
    """Number in the whole run, over all ranks and epochs, from 0."""
    epoch: int
    position: int
    """Position in the epoch, from 0."""
    bucket: int
    samples: tuple[int, ...]
    substitutes: tuple[int, ...]
    """Samples that replace broken ones, in this order: the next samples of the bucket."""


class EpochPlan:
    """Full micro-batches of one epoch, in order. Samples that fill no micro-batch are not used.

    `bucket_of_sample` is negative for a sample without a bucket, and `batch_sizes` has an entry for each bucket.
    """

    def __init__(self, bucket_of_sample: NDArray[np.int32], batch_sizes: NDArray[np.int64], *, rng: Generator) -> None:
        shuffled = rng.permutation(len(bucket_of_sample))
        by_bucket = np.argsort(bucket_of_sample[shuffled], kind="stable")
        placed = bucket_of_sample[bucket_of_sample >= 0]
        # Samples without a bucket, -1, come first.
        self._samples = shuffled[by_bucket][len(bucket_of_sample) - len(placed) :]
        counts = np.bincount(placed, minlength=len(batch_sizes))
        self.samples_of_buckets: NDArray[np.int64] = counts
        """Number of samples of each bucket, including samples that fill no micro-batch."""
        self.batches_of_buckets: NDArray[np.int64] = counts // batch_sizes
        """Number of micro-batches of each bucket."""
        batches = self.batches_of_buckets
        self._begins = np.cumsum(counts) - counts
        self._batch_sizes = batch_sizes
        buckets = np.repeat(np.arange(len(batch_sizes)), batches)
        index_in_bucket = np.arange(len(buckets)) - np.repeat(np.cumsum(batches) - batches, batches)
        order = rng.permutation(len(buckets))
        self._buckets, self._index_in_bucket = buckets[order], index_in_bucket[order]

    def __len__(self) -> int:
        return len(self._buckets)

    def batch(self, position: int, *, number: int, epoch: int) -> MicroBatch:
        """Return the micro-batch at `position`, with its number and epoch in the run."""
        bucket = int(self._buckets[position])
        size, count = int(self._batch_sizes[bucket]), int(self.samples_of_buckets[bucket])
        members = self._samples[self._begins[bucket] : self._begins[bucket] + count]
        start = int(self._index_in_bucket[position]) * size
        own = members[start : start + size]
        others = [members[(start + size + step) % count] for step in range(min(_SUBSTITUTES, count - size))]
        return MicroBatch(
            number=number,
            epoch=epoch,
            position=position,
            bucket=bucket,
            samples=tuple(int(sample) for sample in own),
            substitutes=tuple(int(sample) for sample in (others or own)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipRequest:
    """Request for frames of a sample at a size."""

    path: str
    """File or other name of the clip. Caches and the random numbers of training depend on it."""
    caption: str = ""
    motion_score: float | None = None
    start: int = 0
    """First frame, from 0."""
    interval: int = 1
    """Distance between the frames to take, 1 or more."""
    num_frames: int
    height: int
    width: int
    fps: float = 0.0
    """Frames per second of the cut; 0 for pictures and unknown rates."""


class ClipSource(Protocol):
    """Clips of a training run, and their order.

    A sample is a number from 0, and a bucket is a number from 0: all clips of a bucket have one size. The order of an
    epoch says which samples form which micro-batch, `request` describes the clip of a sample, and `read` returns its
    pixels. `data.buckets` must list the largest of these sizes, since memory is planned by it.

    Worker processes read with copies of the source that were pickled, or forked before the first clip.
    """

    @property
    def fingerprint(self) -> str:
        """Hash of everything that the order depends on. A resumed run with another hash starts the next epoch."""

    def plan_epoch(self, epoch: int) -> EpochPlan:
        """Return the order of an epoch, counted from 0. It is the same in every process and run."""

    def request(self, sample: int, *, bucket: int, number: int, place: int) -> ClipRequest:
        """Return the clip of a sample for `place` in micro-batch `number` of the run, which determine a random cut.

        With `train_mmdit.cache`, the clip may depend only on the sample and its bucket.
        """

    def requests(self) -> Iterable[ClipRequest]:
        """Return each clip that any epoch may use, once. The cache is filled with these clips."""

    def read(self, request: ClipRequest) -> Tensor:
        """Return the pixels of a clip, uint8 RGB (num_frames, height, width, 3) from 0 to 255, on the host.

        Raises MediaError if the clip cannot be read; another sample of its bucket then replaces it.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    """Sample that could not be read, and its replacement."""

    path: str
    reason: str
    by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipBatch:
    """Clips of one micro-batch, all of one bucket."""

    number: int
    epoch: int
    requests: tuple[ClipRequest, ...]
    pixels_BTHWC: Tensor | None
    """Pixels in uint8 RGB, on the host; None if `cached` replaces them."""
    cached: tuple[Any, ...] | None
    """Cached values computed from the clips, one for each clip."""
    replaced: tuple[Replacement, ...] = ()
    """Samples of the micro-batch that could not be read."""

    @property
    def paths(self) -> tuple[str, ...]:
        """Names of the clips."""
        return tuple(request.path for request in self.requests)


@dataclass(frozen=True, slots=True)
class SampleRng:
    """Random state of one micro-batch, for arrays and for tensors on the host."""

    numpy: Generator
    torch: torch.Generator

    @classmethod
    def of(cls, seed: int, number: int, stream: Stream = Stream.LOSS) -> "SampleRng":
        """Return the state for the loss of a micro-batch (noise, time, condition mode, dropout), or for its contents.

        It depends only on the seed and on the micro-batch's number in the whole run, not on the number of ranks or on
        interruptions.
        """
        rng = np.random.default_rng((seed, number, stream))
        return cls(rng, torch.Generator().manual_seed(int(rng.integers(2**31))))

    def of_each(self, names: Sequence[str]) -> list["SampleRng"]:
        """Return a state for each sample, from its name and its number of earlier occurrences in the micro-batch."""
        seed = int(self.numpy.integers(2**63))
        seen: Counter[str] = Counter()
        states = []
        for name in names:
            digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()
            own = np.random.default_rng((seed, int.from_bytes(digest[:8]), seen[name]))
            states.append(SampleRng(own, torch.Generator().manual_seed(int(own.integers(2**63)))))
            seen[name] += 1
        return states


class SampledBatches:
    """Endless micro-batches, in one epoch, from `make(random state, number)`; they depend on the seed and number only.

    `rank` and `ranks` count data-parallel ranks.
    """

    epoch = 0

    def __init__(self, make: Callable[[SampleRng, int], Any], *, seed: int, rank: int = 0, ranks: int = 1) -> None:
        self._make, self._seed = make, seed
        self._rank, self._ranks = rank, ranks
        self._handed_out = 0

    def next(self) -> Any:
        number = self._handed_out + self._rank
        self._handed_out += self._ranks
        return self._make(SampleRng.of(self._seed, number, Stream.DATA), number)

    def state_dict(self) -> dict[str, Any]:
        return {"handed_out": self._handed_out}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        handed_out = state_dict.get("handed_out")
        if not isinstance(handed_out, int) or state_dict.keys() != {"handed_out"}:
            raise CheckpointError(
                "the checkpoint's place in the data is of another dataset", hint="use the `data` that it was trained on"
            )
        self._handed_out = handed_out
