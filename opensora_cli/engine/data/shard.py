"""`osora data shard`: a large table in parts."""

import os
from dataclasses import dataclass
from pathlib import Path

from opensora_cli.core.exceptions import OutputError
from opensora_cli.data.table_files import split_table
from opensora_cli.settings.data_tools import ShardSettings

RESULT_SCHEMA = "osora.data-shard/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardResult:
    """The parts, in order, with their rows."""

    parts: tuple[tuple[Path, int], ...]

    def to_json(self) -> dict[str, object]:
        """Return the result as a document of the schema `osora.data-shard/1`."""
        return {"schema": RESULT_SCHEMA, "parts": [{"table": str(path), "rows": rows} for path, rows in self.parts]}

    def lines(self) -> list[str]:
        """Return the path of every part."""
        return [str(path) for path, _ in self.parts]


def shard(settings: ShardSettings) -> ShardResult:
    """Write the parts beside the table, so that relative paths in it stay right: `clips_1-of-8.csv` and so on.

    Raises:
        FileProblem: the table is missing, broken, or has fewer rows than parts.
        OutputError: a part exists already, or cannot be written.
        HardwareError: the table is parquet, and pyarrow is not installed.
    """
    table = Path(settings.table)
    digits = len(str(settings.parts))
    targets = [
        table.with_name(f"{table.stem}_{part:0{digits}d}-of-{settings.parts}{table.suffix}")
        for part in range(1, settings.parts + 1)
    ]
    existing = [target for target in targets if os.path.lexists(target)]
    if existing and not settings.overwrite:
        raise OutputError(f"{existing[0]} exists already", hint="use --overwrite")
    return ShardResult(parts=tuple(zip(targets, split_table(table, targets), strict=True)))
