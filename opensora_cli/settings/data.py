"""Settings of training clips: a table of files, or the procedural world; and those of `osora data`."""

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, NamedTuple, Self

import yaml
from pydantic import (
    AfterValidator,
    Field,
    NonNegativeInt,
    PositiveInt,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from opensora_cli.core.latent_grid import LatentGrid
from opensora_cli.core.media_choices import Fit
from opensora_cli.settings.base import Section
from opensora_cli.settings.explain import explain
from opensora_cli.settings.files import parse_yaml_text

Probability = Annotated[float, Field(ge=0, le=1)]
BatchSize = Annotated[int, Field(ge=1, le=4096)]


class BucketSettings(NamedTuple):
    """How often a sample that fits this bucket goes there, and how many of them make a micro-batch."""

    probability: Probability
    batch_size: BatchSize


_Length = Annotated[int, Field(ge=1, le=1025)]
_RESOLUTION = r"^[1-9]\d{1,3}(px|p)$"
BucketTable = dict[Annotated[str, Field(pattern=_RESOLUTION)], dict[_Length, BucketSettings]]
"""Resolution -> frames -> (probability, batch size)."""

RELEASED_BUCKETS: BucketTable = {
    "256px": {
        1: BucketSettings(1.0, 50),
        33: BucketSettings(1.0, 12),
        65: BucketSettings(1.0, 6),
        129: BucketSettings(1.0, 3),
    },
    "768px": {1: BucketSettings(1.0, 13), 33: BucketSettings(1.0, 2)},
}
"""Those that the reference implementation's tables were recorded with."""


class SceneSettings(Section):
    """The clips of the procedural world: clip number i of a seed is the same in every epoch and every run."""

    count: PositiveInt = Field(default=100_000, le=10**9, description="clips of an epoch")
    size: int = Field(default=64, ge=32, le=1024, description="width and height in pixels")
    num_frames: int = Field(default=17, ge=1, le=1025, description="frames of a clip, as the autoencoder takes them")
    fps: float = Field(default=12.0, gt=0, le=240, description="frames per second")
    batch_size: BatchSize = Field(default=8, description="clips of a micro-batch")
    picture_share: float = Field(default=0.0, ge=0, le=1, description="part of the clips that are single frames")
    picture_batch_size: BatchSize = Field(default=8, description="single frames of a micro-batch")
    held_out: bool = Field(default=False, description="scenes that training never sees, to validate on")


class DataSettings(Section):
    """A table of pictures and videos, sorted into buckets of one size; without a table, the procedural scenes."""

    table: str | None = Field(
        default=None, min_length=1, description="CSV or parquet table, as osora data scan makes it; none: the scenes"
    )
    buckets: BucketTable = Field(
        default=RELEASED_BUCKETS,
        min_length=1,
        description="{resolution: {frames: [probability, batch size]}}, as in {256px: {1: [1.0, 8], 33: [1.0, 2]}}",
    )
    fps_max: float = Field(
        default=24.0, gt=0, le=1000, description="faster videos lose frames: every second, or third, ... stays"
    )
    fit: Fit = Field(default=Fit.CROP, description="what happens to frames of another shape than their bucket's")
    workers: NonNegativeInt = Field(default=2, le=256, description="processes that read clips; 0: training itself does")
    prefetch: PositiveInt = Field(default=2, le=64, description="micro-batches that each of them keeps ready")
    scenes: SceneSettings = SceneSettings()

    @field_validator("buckets", mode="before")
    @classmethod
    def _read_buckets(cls, value: object) -> object:
        try:
            table = parse_yaml_text(value) if isinstance(value, str) else value
        except yaml.YAMLError:
            table = None
        if not isinstance(table, Mapping):
            raise ValueError(
                f"data.buckets={value} must be resolutions, frames, probabilities and batch sizes, "
                "as in {256px: {1: [1.0, 8], 33: [1.0, 2]}}"
            )
        if problems := list(_bucket_problems(table)):
            raise ValueError("\n".join(problems))
        return table

    @field_validator("buckets")
    @classmethod
    def _buckets_can_fill(cls, value: BucketTable) -> BucketTable:
        for resolution, lengths in value.items():
            if not lengths:
                raise ValueError(f"data.buckets.{resolution} must name a length, as in {{33: [1.0, 2]}}")
        if not any(bucket.probability for lengths in value.values() for bucket in lengths.values()):
            raise ValueError("data.buckets have probability 0: give at least one bucket a probability over 0")
        return value

    @model_validator(mode="after")
    def _share_leaves_clips_or_pictures(self) -> Self:
        for share, size, name in (
            (1 - self.scenes.picture_share, self.scenes.batch_size, "batch_size"),
            (self.scenes.picture_share, self.scenes.picture_batch_size, "picture_batch_size"),
        ):
            if self.table is None and 0 < round(share * self.scenes.count) < size:
                raise ValueError(
                    f"data.scenes.{name}={size} must be at most the {round(share * self.scenes.count)} of "
                    f"data.scenes.count={self.scenes.count} that it is made of"
                )
        return self

    def lengths(self) -> tuple[int, ...]:
        """Numbers of frames that micro-batches can have, the smallest first."""
        if self.table is not None:
            return tuple(sorted({length for lengths in self.buckets.values() for length in lengths}))
        shares = {1: self.scenes.picture_share, self.scenes.num_frames: 1 - self.scenes.picture_share}
        return tuple(sorted(length for length, share in shares.items() if share > 0))

    def length_problems(self, grid: LatentGrid) -> list[str]:
        """Return a line for every length that an autoencoder would not give back."""
        key = "data.buckets" if self.table is not None else "data.scenes.num_frames"
        problems = []
        for length in self.lengths():
            if (below := grid.longest_clip(length)) != length:
                above = length + 1
                while grid.longest_clip(above) != above:
                    above += 1
                problems.append(f"{key}: clips of {length} frames do not suit vae.kind: use {below} or {above} frames")
        return problems

    def size_problems(self, multiple: int) -> list[str]:
        """Return a line if the scenes' size is no multiple of a token's side, in pixels; buckets are made to fit."""
        size = self.scenes.size
        if self.table is not None or size % multiple == 0:
            return []
        above = (size // multiple + 1) * multiple
        return [f"data.scenes.size={size} must be a multiple of {multiple}, the side of a token: use {above}"]


def _bucket_problems(table: Mapping[Any, object]) -> Iterator[str]:
    """Yield what is wrong inside `data.buckets`, one line for each."""
    for resolution, lengths in table.items():
        place = f"data.buckets.{resolution}"
        if not re.match(_RESOLUTION, str(resolution)):
            yield f"data.buckets: {resolution} must be a resolution, as in 256px or 720p"
        elif not isinstance(lengths, Mapping):
            yield f"{place}={lengths} must be numbers of frames, each with its bucket, as in {{33: [1.0, 2]}}"
        else:
            for length, bucket in lengths.items():
                yield from _number_problems(_Length, length, label=f"{place}: frames")
                if not isinstance(bucket, list | tuple) or len(bucket) != 2:
                    yield f"{place}.{length}={bucket} must be [probability, batch size], as in [1.0, 2]"
                    continue
                yield from _number_problems(Probability, bucket[0], label=f"{place}.{length}: probability")
                yield from _number_problems(BatchSize, bucket[1], label=f"{place}.{length}: batch size")


def _number_problems(kind: Any, value: object, *, label: str) -> Iterator[str]:
    try:
        TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        yield from (f"{label} {line.removeprefix('=')}" for line in explain(error))


def _ending(*endings: str, key: str) -> AfterValidator:
    def check(value: str) -> str:
        if not value.lower().endswith(endings):
            raise ValueError(f"{key}={value} must end in {', '.join(endings[:-1])} or {endings[-1]}")
        return value

    return AfterValidator(check)


TableFile = Annotated[str, Field(min_length=1), _ending(".csv", ".parquet", key="table")]
PictureFile = Annotated[str, Field(min_length=1), _ending(".png", ".jpg", ".jpeg", ".webp", key="sheet")]


class ScanSettings(Section):
    """A folder of pictures and videos to make a table of."""

    folder: str = Field(min_length=1, description="looked through with all folders in it")
    table: TableFile | None = Field(
        default=None, description="CSV or parquet file to write; none: a CSV file beside the folder"
    )
    workers: PositiveInt | None = Field(
        default=None, le=1024, description="files that are read at a time; none: one for each core"
    )
    deep: bool = Field(default=False, description="decode every frame, to find damage in the middle of files")
    overwrite: bool = Field(default=False, description="read every file again, and replace a table of another origin")


class ShardSettings(Section):
    """A table to split into parts."""

    table: TableFile = Field(description="CSV or parquet file")
    parts: int = Field(ge=2, le=100_000, description="how many files, of as many rows each")
    overwrite: bool = Field(default=False, description="replace existing parts")


class PreviewSettings(Section):
    """A table to make a contact sheet of."""

    table: TableFile = Field(description="CSV or parquet file")
    sheet: PictureFile = Field(description="picture to write")
    count: int = Field(default=24, ge=1, le=1000, description="samples to show, chosen at random")
    seed: NonNegativeInt = Field(default=0, le=2**62, description="of the choice of samples")
    overwrite: bool = Field(default=False, description="replace an existing picture")
