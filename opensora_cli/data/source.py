"""Interface of training data: `train(settings, source=...)` trains on any `ClipSource`."""

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor

from opensora_cli.data.batches import ClipRequest, EpochPlan


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
