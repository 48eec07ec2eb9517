"""Settings of training clips. Also the settings of `osora data`."""

from collections.abc import Iterator, Mapping
from typing import Annotated, NamedTuple

import yaml
from pydantic import BeforeValidator, Field

from opensora_cli.core.choices import Fit
from opensora_cli.core.conditions import LatentGrid
from opensora_cli.core.section import FileName, Section, Share, ending, matching, rule_error
from opensora_cli.settings.layers import parse_yaml_text

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


def _check_pair(value: object) -> object:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise rule_error("must be [probability, batch size], as in [1.0, 2]")
    return value


_Lengths = Annotated[dict[_Length, Annotated[BucketSettings, BeforeValidator(_check_pair)]], Field(min_length=1)]
BucketTable = Annotated[dict[_Resolution, _Lengths], BeforeValidator(_read_table)]
"""Resolution -> frames -> (probability, batch size)."""

RELEASED_BUCKETS: BucketTable = {
    "256px": {length: BucketSettings(1.0, size) for length, size in ((1, 50), (33, 12), (65, 6), (129, 3))},
    "768px": {length: BucketSettings(1.0, size) for length, size in ((1, 13), (33, 2))},
}
"""Buckets of the reference implementation."""


class DataSettings(Section):
    """Clips, sorted into buckets of one size."""

    table: FileName | None = Field(None, description="CSV or parquet table of clips. None: from a Python program.")
    buckets: BucketTable = Field(
        RELEASED_BUCKETS,
        min_length=1,
        description=f"{{resolution: {{frames: [probability, batch size]}}}}, as in {_EXAMPLE}.",
    )
    fps_max: float = Field(24.0, gt=0, le=1000, description="Largest frame rate. Faster videos lose frames.")
    fit: Fit = Field(Fit.CROP, description="How frames of another shape are fitted to their bucket.")
    workers: int = Field(2, ge=0, le=256, description="Processes that read clips. 0: the training process.")
    prefetch: int = Field(2, ge=1, le=64, description="Micro-batches that each process prefetches.")

    def rules(self) -> Iterator[str]:
        if not any(bucket.probability for lengths in self.buckets.values() for bucket in lengths.values()):
            yield "data.buckets have probability 0: give at least one bucket a probability over 0"

    def lengths(self) -> tuple[int, ...]:
        """Return the numbers of frames of micro-batches in ascending order."""
        return tuple(sorted({length for lengths in self.buckets.values() for length in lengths}))

    def length_problems(self, grid: LatentGrid) -> list[str]:
        """Return one line for each length that the autoencoder cannot reconstruct."""
        return [
            f"data.buckets: clips of {length} frames do not suit vae.kind: use {below} frames"
            for length in self.lengths()
            if (below := grid.longest_clip(length)) != length
        ]


TableFile = Annotated[FileName, ending(".csv", ".parquet")]
PictureFile = Annotated[FileName, ending(".png", ".jpg", ".jpeg", ".webp")]


class ScanSettings(Section):
    """Folder of pictures and videos to make a table of."""

    folder: FileName = Field(description="Folder to scan, with its subfolders.")
    table: TableFile | None = Field(None, description="Table to write, CSV or parquet. None: DIR.csv.")
    workers: int | None = Field(None, ge=1, le=1024, description="Files to read at a time. None: cores.")
    overwrite: bool = Field(False, description="Replace an existing table.")


class ShardSettings(Section):
    """Table to split into parts."""

    table: TableFile = Field(description="CSV or parquet file.")
    parts: int = Field(ge=2, le=100_000, description="Number of files with equally many rows.")
    overwrite: bool = Field(False, description="Replace existing parts.")


class PreviewSettings(Section):
    """Table to make a contact sheet of."""

    table: TableFile = Field(description="CSV or parquet file.")
    sheet: PictureFile = Field(description="Picture to write: .png, .jpg or .webp.")
    count: int = Field(24, ge=1, le=1000, description="Number of random samples.")
    seed: int = Field(0, ge=0, le=2**62, description="Seed of the choice of samples.")
    overwrite: bool = Field(False, description="Replace an existing picture.")
