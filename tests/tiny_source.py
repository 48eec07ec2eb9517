"""A small source of training clips: each has one color, which its name says."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from opensora_cli.core.exceptions import MediaError
from opensora_cli.data.batches import ClipRequest, EpochPlan


@dataclass(frozen=True)
class Colors:
    """`ClipSource` of twelve samples of 32 x 32 pixels: clips, and as many pictures if there are `pictures`."""

    num_frames: int = 5
    pictures: bool = False
    faded: int | None = None
    """Sample that cannot be read."""
    fingerprint: str = "colors"

    def plan_epoch(self, epoch: int) -> EpochPlan:
        buckets = np.arange(12, dtype=np.int32) % (2 if self.pictures else 1)
        return EpochPlan(buckets, np.array([2, 3]), rng=np.random.default_rng(epoch))

    def request(self, sample: int, *, bucket: int, number: int, place: int) -> ClipRequest:
        name, (num_frames, fps) = f"color:{sample}", ((self.num_frames, 12.0), (1, 0.0))[bucket]
        size = {"height": 32, "width": 32, "start": 0, "interval": 1}
        return ClipRequest(path=name, caption="a boat", motion_score=None, num_frames=num_frames, fps=fps, **size)

    def requests(self) -> Iterator[ClipRequest]:
        for sample in range(12):
            yield self.request(sample, bucket=sample % (2 if self.pictures else 1), number=0, place=0)

    def read(self, request: ClipRequest) -> torch.Tensor:
        sample = int(request.path.partition(":")[2])
        if sample == self.faded:
            raise MediaError(f"{request.path} has faded")
        return torch.full((request.num_frames, 32, 32, 3), 10 * sample, dtype=torch.uint8)
