"""From a sample and its bucket to the frames that are wanted of it: the two datasets that training knows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, overload

from opensora_cli.data.batches import ClipRequest
from opensora_cli.data.buckets import NO_BUCKET, Buckets
from opensora_cli.data.frame_rates import map_target_fps
from opensora_cli.data.sampler import draw_start
from opensora_cli.data.scene_clips import SceneClip
from opensora_cli.data.table import ClipTable
from opensora_cli.settings.data import SceneSettings


class ClipRequests(Protocol):
    """Says what is wanted of the samples of a dataset."""

    def request(self, sample: int, *, bucket: int, number: int, place: int) -> ClipRequest:
        """Return what micro-batch `number` wants of a sample, at `place` in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRequests:
    """Cuts of the files of a table."""

    table: ClipTable
    buckets: Buckets
    fps_max: float
    seed: int | None
    """What starts are drawn from; None: clips start with the first frame."""

    def request(self, sample: int, *, bucket: int, number: int, place: int) -> ClipRequest:
        """Return the cut of a sample for a bucket, beginning anywhere that leaves it whole."""
        table, wanted = self.table, self.buckets[bucket]
        fps, interval = map_target_fps(float(table.samples.fps[sample]), self.fps_max)
        is_picture = wanted.num_frames == 1
        latest = int(table.samples.num_frames[sample]) - (wanted.num_frames - 1) * interval - 1
        random = self.seed is not None and latest > 0
        return ClipRequest(
            path=str(table.file(sample)),
            caption=table.texts[sample],
            motion_score=table.motion_score(sample),
            start=draw_start(seed=self.seed or 0, number=number, place=place, latest=latest) if random else 0,
            interval=1 if is_picture else interval,
            num_frames=wanted.num_frames,
            height=wanted.height,
            width=wanted.width,
            fps=0.0 if is_picture else fps,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SceneRequests:
    """Clips of the procedural world: bucket 0 has the clips, bucket 1 the single frames."""

    scenes: SceneSettings
    seed: int

    def request(self, sample: int, *, bucket: int, number: int, place: int) -> ClipRequest:
        """Return the clip of this number, or its first frame."""
        clip = SceneClip(seed=self.seed, number=sample, held_out=self.scenes.held_out)
        is_picture = bucket == 1 or self.scenes.num_frames == 1
        return ClipRequest(
            path=clip.name,
            caption=clip.caption,
            motion_score=None,
            start=0,
            interval=1,
            num_frames=1 if is_picture else self.scenes.num_frames,
            height=self.scenes.size,
            width=self.scenes.size,
            fps=0.0 if is_picture else self.scenes.fps,
        )


class AllRequests(Sequence[ClipRequest]):
    """Every request of a dataset, made when it is asked for.

    Args:
        requests: of the dataset, with fixed starts.
        places: a sample and a bucket that it may land in, for each.
    """

    def __init__(self, requests: ClipRequests, places: Sequence[tuple[int, int]]) -> None:
        self._requests = requests
        self._places = places

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> ClipRequest: ...
    @overload
    def __getitem__(self, index: slice) -> "AllRequests": ...
    def __getitem__(self, index: int | slice) -> "ClipRequest | AllRequests":
        """Return one request, or some of them."""
        if isinstance(index, slice):
            return AllRequests(self._requests, self._places[index])
        sample, bucket = self._places[index]
        return self._requests.request(sample, bucket=bucket, number=0, place=0)


def possible_places(buckets: Buckets, table: ClipTable) -> Iterator[tuple[int, int]]:
    """Yield every sample with each bucket that it may land in, in the order of the table.

    A bucket of probability 1 lets none go on to smaller resolutions; with a lower one, those are possible as well.
    """
    reachable = buckets.reachable(table.samples)
    for sample, row in enumerate(reachable.tolist()):
        yield from ((sample, bucket) for bucket in row if bucket != NO_BUCKET)
