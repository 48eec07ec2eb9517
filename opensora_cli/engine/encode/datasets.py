"""From settings to a dataset: its samples, the cut that is read of each, and the order of an epoch."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from opensora_cli.core.exceptions import RequestError
from opensora_cli.data.batches import BucketSampler, ClipRequest, PlanEpoch, SceneSampler, random_start
from opensora_cli.data.buckets import NO_BUCKET, Buckets, Resolution, map_target_fps
from opensora_cli.data.scene_clips import SceneClip
from opensora_cli.data.table import ClipTable, read_table
from opensora_cli.sampling.sizes import num_pixels, training_sizes
from opensora_cli.settings.data import BucketTable, DataSettings, SceneSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRequests:
    """Cuts of the files of a table."""

    table: ClipTable
    buckets: Buckets
    fps_max: float
    seed: int | None
    """Of random starts; None: clips start with the first frame."""

    def request(self, sample: int, *, bucket: int, number: int, place: int) -> ClipRequest:
        """Return what micro-batch `number` wants of a sample, at `place` in it: a whole cut, at random with a seed."""
        table, wanted = self.table, self.buckets[bucket]
        fps, interval = map_target_fps(float(table.samples.fps[sample]), self.fps_max)
        is_picture = wanted.num_frames == 1
        latest = int(table.samples.num_frames[sample]) - (wanted.num_frames - 1) * interval - 1
        random = self.seed is not None and latest > 0
        return ClipRequest(
            path=str(table.file(sample)),
            caption=table.texts[sample],
            motion_score=table.motion_score(sample),
            start=random_start(seed=self.seed or 0, number=number, place=place, latest=latest) if random else 0,
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


ClipRequests = TableRequests | SceneRequests
"""From samples of a dataset to the cuts that training asks for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipDataset:
    """Clips, and the order of their epochs."""

    requests: ClipRequests
    plan_epoch: PlanEpoch
    fingerprint: str
    """Of all that the order depends on."""


def open_dataset(data: DataSettings, *, seed: int, multiple: int, fixed_starts: bool) -> ClipDataset:
    """Return the table's clips, or those of the procedural world.

    Heights and widths of buckets are multiples of `multiple`, the side of a token in pixels. With `fixed_starts` every
    clip begins with its file's first frame, instead of at a random place.

    Errors are those of `read_table`; a RequestError, too, if a resolution is too small for `multiple`.
    """
    if data.table is None:
        return _scenes(data, seed=seed)
    table = read_table(Path(data.table))
    buckets = make_buckets(data.buckets, fps_max=data.fps_max, multiple=multiple)
    plain = {name: {length: list(bucket) for length, bucket in rest.items()} for name, rest in data.buckets.items()}
    return ClipDataset(
        requests=TableRequests(table=table, buckets=buckets, fps_max=data.fps_max, seed=None if fixed_starts else seed),
        plan_epoch=BucketSampler(buckets=buckets, samples=table.samples, seed=seed),
        fingerprint=_hash(table.fingerprint(), plain, data.fps_max, multiple, seed),
    )


def make_buckets(table: BucketTable, *, fps_max: float, multiple: int) -> Buckets:
    """Return buckets in the shapes that the model is trained at.

    A resolution that is too small for `multiple` is a RequestError.
    """
    return Buckets([_resolution(name, table, multiple=multiple) for name in table], fps_max=fps_max)


def all_requests(data: DataSettings, *, seed: int, multiple: int) -> list[ClipRequest]:
    """Return everything that any epoch can ask for with fixed starts; errors are those of `open_dataset`."""
    requests = open_dataset(data, seed=seed, multiple=multiple, fixed_starts=True).requests
    if isinstance(requests, TableRequests):
        buckets_of_samples = requests.buckets.reachable(requests.table.samples).tolist()
    else:
        shares = (1 - data.scenes.picture_share, data.scenes.picture_share)
        buckets_of_samples = [[kind for kind, share in enumerate(shares) if share > 0]] * data.scenes.count
    return [
        requests.request(sample, bucket=bucket, number=0, place=0)
        for sample, buckets in enumerate(buckets_of_samples)
        for bucket in buckets
        if bucket != NO_BUCKET
    ]


def _scenes(data: DataSettings, *, seed: int) -> ClipDataset:
    scenes = data.scenes
    sampler = SceneSampler(
        count=scenes.count,
        batch_size=scenes.batch_size,
        picture_share=scenes.picture_share,
        picture_batch_size=scenes.picture_batch_size,
        seed=seed,
    )
    return ClipDataset(
        requests=SceneRequests(scenes=scenes, seed=seed),
        plan_epoch=sampler,
        fingerprint=_hash(scenes.model_dump(mode="json"), seed),
    )


def _resolution(name: str, table: BucketTable, *, multiple: int) -> Resolution:
    try:
        sizes = training_sizes(name, multiple=multiple)
    except RequestError as error:
        raise RequestError(
            f"data.buckets.{name} is too small for frames in multiples of {multiple} pixels", hint=error.hint
        ) from error
    lengths = {length: (bucket.probability, bucket.batch_size) for length, bucket in table[name].items()}
    return Resolution(name=name, pixels=num_pixels(name), sizes=sizes, lengths=lengths)


def _hash(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
