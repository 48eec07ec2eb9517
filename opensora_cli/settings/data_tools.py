"""Settings of `osora data scan`, `shard` and `preview`."""

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator

from opensora_cli.settings.base import Section

TABLE_ENDINGS = (".csv", ".parquet")
PICTURE_ENDINGS = (".png", ".jpg", ".jpeg", ".webp")


class ScanSettings(Section):
    """A folder of pictures and videos to make a table of."""

    folder: str = Field(min_length=1, description="looked through with all folders in it")
    table: str | None = Field(
        default=None, min_length=1, description="CSV or parquet file to write; none: a CSV file beside the folder"
    )
    workers: PositiveInt | None = Field(
        default=None, le=1024, description="files that are read at a time; none: one for each core"
    )
    overwrite: bool = Field(default=False, description="read everything anew, and replace a table of another origin")

    @field_validator("table")
    @classmethod
    def _is_a_table(cls, value: str | None) -> str | None:
        return value if value is None else _ending(value, TABLE_ENDINGS, key="table")


class ShardSettings(Section):
    """A table to cut into parts."""

    table: str = Field(min_length=1, description="CSV or parquet file")
    parts: int = Field(ge=2, le=100_000, description="how many files, of as many rows each")
    overwrite: bool = Field(default=False, description="replace existing parts")

    @field_validator("table")
    @classmethod
    def _is_a_table(cls, value: str) -> str:
        return _ending(value, TABLE_ENDINGS, key="table")


class PreviewSettings(Section):
    """A table to draw a contact sheet of."""

    table: str = Field(min_length=1, description="CSV or parquet file")
    sheet: str = Field(min_length=1, description="picture to draw")
    count: int = Field(default=24, ge=1, le=1000, description="samples to show, drawn by chance")
    seed: NonNegativeInt = Field(default=0, description="of the choice of samples")
    overwrite: bool = Field(default=False, description="replace an existing picture")

    @field_validator("table")
    @classmethod
    def _is_a_table(cls, value: str) -> str:
        return _ending(value, TABLE_ENDINGS, key="table")

    @field_validator("sheet")
    @classmethod
    def _is_a_picture(cls, value: str) -> str:
        return _ending(value, PICTURE_ENDINGS, key="sheet")


def _ending(value: str, endings: tuple[str, ...], *, key: str) -> str:
    if not value.lower().endswith(endings):
        raise ValueError(f"{key}={value} must end in {', '.join(endings[:-1])} or {endings[-1]}")
    return value
