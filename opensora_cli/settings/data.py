"""Settings of training clips: a table of files or the procedural world. Also the settings of `osora data`."""

from collections.abc import Iterator, Mapping
from typing import Annotated, NamedTuple

import yaml
from pydantic import BeforeValidator, Field

from opensora_cli.core.latent_grid import LatentGrid
from opensora_cli.core.media_choices import Fit
from opensora_cli.core.section import Count, FileName, Section, Share, ending, matching, rule_error
from opensora_cli.settings.files import parse_yaml_text

BatchSize = Annotated[int, Field(ge=1, le=4096)]


class BucketSettings(NamedTuple):
    """Bucket of clips of one size."""

    probability: Share
    """Probability that a fitting sample goes to this bucket."""
    batch_size: BatchSize
    """Samples of a micro-batch."""


_EXAMPLE = "{256px: {1: [1.0, 8], 33: [1.0, 2]}}"
_Length = Annotated[int, Field(ge=1, le=1025)]
_Resolution = Annotated[str, matching(r"[1-9]\d{1,3}(px|p)", "must be a resolution, as in 256px or 720p")]


def _read_table(value: object) -> object:
    try:
        table = parse_yaml_text(value) if isinstance(value, str) else value
    except yaml.YAMLError:
        table = None
    if not isinstance(table, Mapping):
        raise rule_error(f"must be resolutions, frames, probabilities and batch sizes, as in {_EXAMPLE}")
    return table


def _check_lengths(value: object) -> object:
    if not isinstance(value, Mapping) or not value:
        raise rule_error("must be numbers of frames, each with its bucket, as in {33: [1.0, 2]}")
    return value


def _check_pair(value: object) -> object:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise rule_error("must be [probability, batch size], as in [1.0, 2]")
    return value


_Lengths = Annotated[
    dict[_Length, Annotated[BucketSettings, BeforeValidator(_check_pair)]], BeforeValidator(_check_lengths)
]
BucketTable = Annotated[dict[_Resolution, _Lengths], BeforeValidator(_read_table)]
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
"""Buckets of the reference implementation."""


class SceneSettings(Section):
    """Clips of the procedural world. Clip i of a seed is the same in every epoch and run."""

    count: Count = Field(default=100_000, description="Clips of an epoch.")
    size: int = Field(default=64, ge=32, le=1024, description="Width and height in pixels.")
    num_frames: _Length = Field(default=17, description="Frames of a clip.")
    fps: float = Field(default=12.0, gt=0, le=240, description="Frames per second.")
    batch_size: BatchSize = Field(default=8, description="Clips of a micro-batch.")
    picture_share: Share = Field(default=0.0, description="Share of the clips that are single frames.")
    picture_batch_size: BatchSize = Field(default=8, description="Single frames of a micro-batch.")
    held_out: bool = Field(default=False, description="Use scenes for validation, which are never trained on.")


class DataSettings(Section):
    """Table of pictures and videos, sorted into buckets of one size, or the procedural scenes."""

    table: FileName | None = Field(default=None, description="CSV or parquet table. None means procedural scenes.")
    buckets: BucketTable = Field(
        default=RELEASED_BUCKETS,
        min_length=1,
        description=f"{{resolution: {{frames: [probability, batch size]}}}}, as in {_EXAMPLE}.",
    )
    fps_max: float = Field(default=24.0, gt=0, le=1000, description="Largest frame rate. Faster videos lose frames.")
    fit: Fit = Field(default=Fit.CROP, description="How frames of another shape are fitted to their bucket.")
    workers: int = Field(default=2, ge=0, le=256, description="Processes that read clips. 0: the training process.")
    prefetch: int = Field(default=2, ge=1, le=64, description="Micro-batches that each process prefetches.")
    scenes: SceneSettings = SceneSettings()

    def rules(self) -> Iterator[str]:
        if not any(bucket.probability for lengths in self.buckets.values() for bucket in lengths.values()):
            yield "data.buckets have probability 0: give at least one bucket a probability over 0"
        scenes = self.scenes
        for share, size, name in (
            (1 - scenes.picture_share, scenes.batch_size, "batch_size"),
            (scenes.picture_share, scenes.picture_batch_size, "picture_batch_size"),
        ):
            if self.table is None and 0 < (clips := round(share * scenes.count)) < size:
                yield (
                    f"data.scenes.{name}={size} must be at most the {clips} of data.scenes.count={scenes.count} "
                    "that it is made of"
                )

    def lengths(self) -> tuple[int, ...]:
        """Return the numbers of frames of micro-batches in ascending order."""
        if self.table is not None:
            return tuple(sorted({length for lengths in self.buckets.values() for length in lengths}))
        shares = {1: self.scenes.picture_share, self.scenes.num_frames: 1 - self.scenes.picture_share}
        return tuple(sorted(length for length, share in shares.items() if share > 0))

    def length_problems(self, grid: LatentGrid) -> list[str]:
        """Return one line for each length that the autoencoder cannot reconstruct."""
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
        """Return a line if the size of scenes is not a multiple of a token's side in pixels. Buckets always fit."""
        size = self.scenes.size
        if self.table is not None or size % multiple == 0:
            return []
        above = (size // multiple + 1) * multiple
        return [f"data.scenes.size={size} must be a multiple of {multiple}, the side of a token: use {above}"]


TableFile = Annotated[FileName, ending(".csv", ".parquet")]
PictureFile = Annotated[FileName, ending(".png", ".jpg", ".jpeg", ".webp")]


class ScanSettings(Section):
    """Folder of pictures and videos to make a table of."""

    folder: FileName = Field(description="Folder to scan, with its subfolders.")
    table: TableFile | None = Field(
        default=None, description="Table to write: CSV or parquet. None: CSV beside the folder."
    )
    workers: int | None = Field(
        default=None, ge=1, le=1024, description="Files that are read at a time. None: one for each core."
    )
    deep: bool = Field(default=False, description="Decode every frame to find damage inside files.")
    overwrite: bool = Field(default=False, description="Read every file again, and replace a table of another origin.")


class ShardSettings(Section):
    """Table to split into parts."""

    table: TableFile = Field(description="CSV or parquet file.")
    parts: int = Field(ge=2, le=100_000, description="Number of files with equally many rows.")
    overwrite: bool = Field(default=False, description="Replace existing parts.")


class PreviewSettings(Section):
    """Table to make a contact sheet of."""

    table: TableFile = Field(description="CSV or parquet file.")
    sheet: PictureFile = Field(description="Picture to write.")
    count: int = Field(default=24, ge=1, le=1000, description="Number of random samples.")
    seed: int = Field(default=0, ge=0, le=2**62, description="Seed of the choice of samples.")
    overwrite: bool = Field(default=False, description="Replace an existing picture.")
