"""Datasets from settings: samples, the clip that is read of each sample, and the order of each epoch."""

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
from opensora_cli.settings.train import TrainSettings, TrainTarget


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRequests:
    """Clips from the files of a table."""

    table: ClipTable
    buckets: Buckets
    fps_max: float
    seed: int | None
    """Seed of random starts. None means that clips start with the first frame."""

    def request(self, sample: int, *, bucket: int, number: int, place: int) -> ClipRequest:
        """Return the clip of a sample for `place` in micro-batch `number`; its start depends on these and the seed."""
        table, wanted = self.table, self.buckets[bucket]
        fps, interval = map_target_fps(float(table.samples.fps[sample]), self.fps_max)
        is_picture = wanted.num_frames == 1
        latest = int(table.samples.num_frames[sample]) - (wanted.num_frames - 1) * interval - 1
        start = 0
        if self.seed is not None and latest > 0:
            start = random_start(seed=self.seed, number=number, place=place, latest=latest)
        return ClipRequest(
            path=str(table.file(sample)),
            caption=table.texts[sample],
            motion_score=table.motion_score(sample),
            start=start,
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
        """Return the clip with number `sample`, or its first frame."""
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
"""Function from the samples of a dataset to the clips that training asks for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipDataset:
    """Clips and the order of their epochs."""

    requests: ClipRequests
    plan_epoch: PlanEpoch
    fingerprint: str
    """Hash of everything that the order depends on."""


def open_dataset(data: DataSettings, *, seed: int, multiple: int, fixed_starts: bool) -> ClipDataset:
    """Return the clips of the table, or those of the procedural world.

    Heights and widths of buckets are multiples of `multiple` pixels; see `pixel_multiple`. With `fixed_starts` every
    clip begins with the first frame of its file, not at a random place.

    Raises what `read_table` raises, and RequestError if a resolution is too small for `multiple`.
    """
    if data.table is None:
        scenes = data.scenes
        return ClipDataset(
            requests=SceneRequests(scenes=scenes, seed=seed),
            plan_epoch=SceneSampler(
                count=scenes.count,
                batch_size=scenes.batch_size,
                picture_share=scenes.picture_share,
                picture_batch_size=scenes.picture_batch_size,
                seed=seed,
            ),
            fingerprint=_hash(scenes.model_dump(mode="json"), seed),
        )
    table = read_table(Path(data.table))
    buckets = make_buckets(data.buckets, fps_max=data.fps_max, multiple=multiple)
    plain = {name: {length: list(bucket) for length, bucket in rest.items()} for name, rest in data.buckets.items()}
    return ClipDataset(
        requests=TableRequests(table=table, buckets=buckets, fps_max=data.fps_max, seed=None if fixed_starts else seed),
        plan_epoch=BucketSampler(buckets=buckets, samples=table.samples, seed=seed),
        fingerprint=_hash(table.fingerprint(), plain, data.fps_max, multiple, seed),
    )


def _hash(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def pixel_multiple(settings: TrainSettings) -> int:
    """Return the divisor of the heights and widths of clips, in pixels: the side of a token, or of a latent."""
    compression = settings.vae.grid.spatial_compression_ratio
    return compression * (settings.model.patch_size if settings.target is TrainTarget.MMDIT else 1)


def make_buckets(table: BucketTable, *, fps_max: float, multiple: int) -> Buckets:
    """Return buckets in the shapes that the model is trained at.

    Raises RequestError for a resolution that is too small for `multiple`.
    """
    resolutions = []
    for name, buckets in table.items():
        try:
            sizes = training_sizes(name, multiple=multiple)
        except RequestError as error:
            raise RequestError(
                f"data.buckets.{name} is too small for frames in multiples of {multiple} pixels", hint=error.hint
            ) from error
        lengths = {length: (bucket.probability, bucket.batch_size) for length, bucket in buckets.items()}
        resolutions.append(Resolution(name=name, pixels=num_pixels(name), sizes=sizes, lengths=lengths))
    return Buckets(resolutions, fps_max=fps_max)


def all_requests(settings: TrainSettings) -> list[ClipRequest]:
    """Return each clip that any epoch can ask for with fixed starts, once; raises what `open_dataset` raises."""
    data = settings.data
    dataset = open_dataset(data, seed=settings.loop.seed, multiple=pixel_multiple(settings), fixed_starts=True)
    requests = dataset.requests
    if isinstance(requests, TableRequests):
        buckets_of_samples = requests.buckets.reachable(requests.table.samples).tolist()
    else:
        shares = (1 - data.scenes.picture_share, data.scenes.picture_share)
        buckets_of_samples = [[kind for kind, share in enumerate(shares) if share > 0]] * data.scenes.count
    found = (
        requests.request(sample, bucket=bucket, number=0, place=0)
        for sample, buckets in enumerate(buckets_of_samples)
        for bucket in buckets
        if bucket != NO_BUCKET
    )
    return list(dict.fromkeys(found))
