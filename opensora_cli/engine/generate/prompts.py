"""Files of prompts: a row for each request, with its own settings. Needs no torch."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from opensora_cli.core.exceptions import FileProblem, RequestError
from opensora_cli.core.formatting import nearest, plain
from opensora_cli.core.reading import reading, require_file
from opensora_cli.core.section import all_keys
from opensora_cli.data.table import CSV, read_rows
from opensora_cli.settings.flags import FLAGS
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.layers import Given

_NAME, _REFERENCES = "name", "condition.references"
_COLUMNS = {
    **{key: key for key in all_keys(GenerateSettings)},
    **{name: flag.key for name, flag in FLAGS.items() if not flag.is_negated},
    "negative": "negative_prompt",
    "text": "prompt",  # of the reference's tables
    _NAME: _NAME,
}
"""Setting of each column; `name` is the name of the result."""
_OF_ALL_ROWS = ("output.", "parallel.", "runtime.device", "runtime.weights", "from_latents", "resume")
_LONGEST_NAME = 200


@dataclass(frozen=True, slots=True)
class Row:
    number: int
    """Number of the row from 1, without the header and blank lines."""
    given: Mapping[str, Given] = field(default_factory=dict)
    """Settings of the row."""
    name: str | None = None
    """Name of the result, without the folder."""
    problem: str | None = None
    """Reason why the row cannot be used; None if none is known."""

    @property
    def prompt(self) -> str:
        return str(self.given["prompt"].value) if "prompt" in self.given else ""


def read_prompts(path: Path) -> list[Row]:
    """Read all rows of a `.txt` file (a prompt a line) or a `.csv` table.

    Columns are prompt, negative, ref, seed, name, the other options of `osora generate` (`num_frames`), and settings by
    their keys (`sampling.flow_shift`). An empty cell gives nothing. Paths start from the folder of the file. Rows that
    cannot be used have a `problem`.
    """
    kind = path.suffix.lower()
    if kind not in (".txt", CSV):
        raise RequestError(f"--prompts {path} must end in .txt or .csv, which determines the format")
    require_file(path)
    rows: list[Row] = []
    names: dict[str, int] = {}
    columns: dict[str, None] = {}
    for number, cells in enumerate(_table(path) if kind == CSV else _lines(path), start=1):
        if isinstance(cells, str):
            rows.append(Row(number, problem=cells))
            continue
        for column in cells.keys() - columns.keys():
            if column not in _COLUMNS:
                close, known = nearest(column, _COLUMNS), "columns are prompt, negative, ref, seed, name, and settings"
                hint = f"did you mean {close}?" if close else known
                raise RequestError(f"{path}: there is no column {plain(column)}", hint=hint)
            if _COLUMNS[column].startswith(_OF_ALL_ROWS):
                raise RequestError(f"{path}: {column} is the same for all rows", hint="give it on the command line")
        columns |= dict.fromkeys(cells)
        row = _row(number, cells, path.absolute().parent)
        if row.name is not None and names.setdefault(row.name, number) != number:
            row = replace(row, problem=f"name={row.name} is that of row {names[row.name]}")
        rows.append(row)
    if not rows:
        raise FileProblem(f"{path} has no rows")
    if columns and columns.keys().isdisjoint(("prompt", "text")):
        raise FileProblem(f"{path} has no column prompt; it has {plain(', '.join(columns))}")
    return rows


def rows_of_shard(shard: str) -> slice:
    """Return the rows of a part such as `2/8`: every 8th, from the second on. Raises RequestError for other texts."""
    index, _, count = shard.partition("/")
    if not (index.isascii() and index.isdigit() and count.isascii() and count.isdigit()):
        raise RequestError(f"--shard {shard} must be two numbers, as in --shard 2/8")
    if not 1 <= int(index) <= int(count):
        raise RequestError(f"--shard {shard} must count from 1/{count} to {count}/{count}")
    return slice(int(index) - 1, None, int(count))


def _lines(path: Path) -> Iterator[dict[str, object]]:
    """Yield the prompt of each line of a text."""
    try:
        with reading(path), path.open(encoding="utf-8-sig") as file:
            for line in filter(None, map(str.strip, file)):
                yield {"prompt": line}
    except UnicodeDecodeError as error:
        raise FileProblem(f"{path} is not text in UTF-8") from error


def _table(path: Path) -> Iterator[dict[str, object] | str]:
    """Yield the cells of each row by column, or the reason why a row cannot be used."""
    header, rows = read_rows(path)
    # pandas numbers the rows in a column without a name.
    numbering = {name for name in header if not name.strip() or name.startswith("Unnamed: ")}
    if twice := {name for name in header if header.count(name) > 1} - numbering:
        raise FileProblem(f"{path} has two columns {plain(min(twice))}")
    for cells in rows:
        if len(cells) > len(header):
            yield f"it has {len(cells)} cells, and the table {len(header)} columns: quote a text that has commas in it"
        else:
            named = zip(header, [*cells, *[None] * (len(header) - len(cells))], strict=True)
            yield {name: cell for name, cell in named if name not in numbering}


def _row(number: int, cells: Mapping[str, object], folder: Path) -> Row:
    given: dict[str, Given] = {}
    name = problem = None
    for column, value in cells.items():
        key = _COLUMNS[column]
        if value is None or value == "":
            continue
        if key == _NAME:
            name = str(value)
            continue
        if key == _REFERENCES:
            value = tuple(str(folder / file.strip()) for file in str(value).split(";") if file.strip())
        given[key] = Given(value, f"column {column}")
    if "prompt" not in given or not str(given["prompt"].value).strip():
        problem = "prompt is empty"
    elif name and (name.startswith(".") or {*"/\\\0"} & {*name} or len(os.fsencode(name)) > _LONGEST_NAME):
        problem = f"name={plain(name)} must be the name of a file, without a folder, of at most {_LONGEST_NAME} bytes"
    return Row(number, given, name, problem)
