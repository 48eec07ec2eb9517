"""The largest micro-batch that a training run can be given, for what is planned by sizes alone."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from opensora_cli.data.batches import ClipBatch
from opensora_cli.engine.data.loading import pixel_multiple
from opensora_cli.engine.sampling.sizes import training_sizes
from opensora_cli.settings.train import TrainSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """Clips of one size."""

    batch_size: int
    num_frames: int
    height: int
    width: int

    def zeros(self) -> ClipBatch:
        """Return black clips of this shape, without captions."""
        count = self.batch_size
        return ClipBatch(
            number=0,
            epoch=0,
            paths=tuple(f"black:{index}" for index in range(count)),
            captions=("",) * count,
            fps=(0.0,) * count,
            motion_scores=(None,) * count,
            pixels_BTHWC=torch.zeros(count, self.num_frames, self.height, self.width, 3, dtype=torch.uint8),
            cached=None,
        )


def largest_batch_shape(settings: TrainSettings) -> BatchShape:
    """Return the shape with the most pixels.

    Raises:
        RequestError: a resolution is too small.
    """
    return max(_shapes(settings), key=lambda found: _pixels(found[1]))[1]


def with_batch_size(settings: TrainSettings, batch_size: int) -> TrainSettings:
    """Return the same run with other micro-batches: of its largest bucket alone, where it has buckets.

    Raises:
        RequestError: a resolution is too small.
    """
    if settings.data.table is None:
        scenes = {"batch_size": batch_size, "count": max(settings.data.scenes.count, batch_size), "picture_share": 0.0}
        changes = {f"data.scenes.{name}": value for name, value in scenes.items()}
        return settings.replace({"text.batch_size": batch_size, **changes})
    resolution, shape = max(_shapes(settings), key=lambda found: _pixels(found[1]))
    return settings.replace({"data.buckets": {resolution: {shape.num_frames: (1.0, batch_size)}}})


def _shapes(settings: TrainSettings) -> Iterator[tuple[str, BatchShape]]:
    data = settings.data
    if data.table is None:
        scenes = data.scenes
        yield (
            "",
            BatchShape(
                batch_size=scenes.batch_size, num_frames=scenes.num_frames, height=scenes.size, width=scenes.size
            ),
        )
        return
    for resolution, lengths in data.buckets.items():
        for height, width in training_sizes(resolution, multiple=pixel_multiple(settings)).values():
            for length, bucket in lengths.items():
                if bucket.probability > 0:
                    yield (
                        resolution,
                        BatchShape(batch_size=bucket.batch_size, num_frames=length, height=height, width=width),
                    )


def _pixels(shape: BatchShape) -> int:
    return shape.batch_size * shape.num_frames * shape.height * shape.width
