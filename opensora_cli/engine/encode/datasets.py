"""From settings to a dataset: what it holds, and in which order an epoch goes through it."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from opensora_cli.core.exceptions import RequestError
from opensora_cli.data.buckets import Buckets, Resolution
from opensora_cli.data.sampler import BucketSampler, PlanEpoch, SceneSampler
from opensora_cli.data.table import read_table
from opensora_cli.engine.encode.requests import AllRequests, ClipRequests, SceneRequests, TableRequests, possible_places
from opensora_cli.sampling.sizes import num_pixels, training_sizes
from opensora_cli.settings.data import BucketTable, DataSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipDataset:
    """Clips, and the order of their epochs."""

    requests: ClipRequests
    plan_epoch: PlanEpoch
    fingerprint: str
    """Of all that the order depends on."""


def open_dataset(data: DataSettings, *, seed: int, multiple: int, fixed_starts: bool) -> ClipDataset:
    """Return the table's clips, or those of the procedural world.

    Args:
        data: which.
        seed: of the order and the starts of clips, and of the scenes.
        multiple: heights and widths of buckets are multiples of it: the side of a token, in pixels.
        fixed_starts: cut every clip from its file's first frame on, instead of a random place.

    Raises:
        FileProblem: the table is missing or broken.
        RequestError: a resolution is too small for `multiple`.
        HardwareError: the table is parquet, and pyarrow is not installed.
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

    Raises:
        RequestError: a resolution is too small for `multiple`.
    """
    return Buckets([_resolution(name, table, multiple=multiple) for name in table], fps_max=fps_max)


def all_requests(data: DataSettings, *, seed: int, multiple: int) -> AllRequests:
    """Return everything that any epoch can ask for with fixed starts; errors are those of `open_dataset`."""
    dataset = open_dataset(data, seed=seed, multiple=multiple, fixed_starts=True)
    requests = dataset.requests
    if isinstance(requests, TableRequests):
        return AllRequests(requests, [*possible_places(requests.buckets, requests.table)])
    scenes = data.scenes
    shares = (1 - scenes.picture_share, scenes.picture_share)
    kinds = [bucket for bucket, share in enumerate(shares) if share > 0]
    return AllRequests(requests, [(number, bucket) for number in range(scenes.count) for bucket in kinds])


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
