"""Files of prompts: a row for each request, with its own settings. Needs no torch."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from opensora_cli.core.exceptions import FileProblem, RequestError
from opensora_cli.core.formatting import plain
from opensora_cli.core.reading import reading, require_file
from opensora_cli.data.table_files import CSV, PARQUET, read_rows
from opensora_cli.settings.explain import Given, either, nearest
from opensora_cli.settings.flags import FLAGS
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.generate_sections import MAX_SEED
from opensora_cli.settings.layers import all_keys

ENDINGS = (".txt", CSV, ".jsonl", PARQUET)
_REFERENCES = "condition.references"
OWN_KEYS = ("prompt", "negative_prompt", "sampling.seed", _REFERENCES)
"""Settings that may differ between rows with the same plan."""

_NAME, _SEED = "name", "sampling.seed"
_SHORT = {"prompt": "prompt", "negative": "negative_prompt", _NAME: _NAME}
_OF_ALL_ROWS = ("output.", "parallel.", "runtime.device", "runtime.weights", "from_latents", "resume")
_LONGEST_NAME = 200


@dataclass(frozen=True, slots=True)
class Row:
    """Row of a file of prompts."""

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
        """Prompt of the row; empty without one."""
        return str(self.given["prompt"].value) if "prompt" in self.given else ""

    @property
    def shape(self) -> tuple[tuple[str, Given], ...]:
        """Settings of the row that decide its plan: rows of one shape are planned alike."""
        own = [(key, given) for key, given in self.given.items() if key not in OWN_KEYS]
        return tuple(sorted(own, key=lambda pair: pair[0]))


@dataclass(frozen=True, slots=True)
class Shard:
    """One of several equal parts of the rows: every `count`-th, from number `index` on."""

    index: int = 1
    count: int = 1

    @classmethod
    def of(cls, text: str) -> "Shard":
        """Return the part that a text like `2/8` names. Raises RequestError for any other text."""
        index, _, count = text.partition("/")
        if not (index.isascii() and index.isdigit() and count.isascii() and count.isdigit()):
            raise RequestError(f"--shard {text} must be two numbers, as in --shard 2/8")
        if not 1 <= int(index) <= int(count):
            raise RequestError(f"--shard {text} must count from 1/{count} to {count}/{count}")
        return cls(int(index), int(count))

    def part(self, index: int, count: int) -> "Shard":
        """Return one of `count` equal parts of this part; `index` counts from 0."""
        return Shard(self.index + index * self.count, self.count * count)

    def rows(self, rows: Iterable[Row]) -> list[Row]:
        """Return the rows of this part."""
        return [row for row in rows if (row.number - self.index) % self.count == 0]


def read_prompts(path: Path) -> list[Row]:
    """Read all rows of a `.txt` file (a prompt a line), or a `.csv`, `.jsonl` or `.parquet` table.

    Columns are prompt, negative, ref, seed, name, the other options of `osora generate` (`num_frames`), and settings by
    their keys (`sampling.flow_shift`). An empty cell gives nothing. Paths start from the folder of the file. Rows that
    cannot be used have a `problem`.

    Raises:
        RequestError: the file is of another kind, or a column is unknown.
        FileProblem: the file is missing or broken, has no column `prompt`, or no rows.
        HardwareError: the file is parquet, and pyarrow is not installed.
    """
    kind = path.suffix.lower()
    if kind not in ENDINGS:
        raise RequestError(f"--prompts {path} must end in {either(ENDINGS)}, which determines the format")
    require_file(path)
    cells = _of_text(path) if kind == ".txt" else _of_json(path) if kind == ".jsonl" else _of_table(path)
    folder = path.absolute().parent
    keys: dict[str, str] = {}
    rows: list[Row] = []
    names: dict[str, int] = {}
    for number, values in enumerate(cells, start=1):
        row = values if isinstance(values, str) else _row(number, values, keys, path, folder)
        if isinstance(row, str):
            row = Row(number, problem=row)
        elif row.name is not None and names.setdefault(row.name, number) != number:
            row = replace(row, problem=f"name={row.name} is that of row {names[row.name]}")
        rows.append(row)
    if not rows:
        raise FileProblem(f"{path} has no rows")
    if keys and "prompt" not in keys:
        raise FileProblem(f"{path} has no column prompt; it has {plain(', '.join(keys))}")
    return rows


def _of_text(path: Path) -> Iterator[dict[str, object]]:
    for line in _lines(path):
        yield {"prompt": line}


def _of_json(path: Path) -> Iterator[dict[str, object] | str]:
    """Yield the object of each line, or the reason why the line has none."""
    for line in _lines(path):
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:
            yield f"it is no JSON: {plain(str(error))}"
            continue
        yield values if isinstance(values, dict) else "it is no JSON object"


def _lines(path: Path) -> Iterator[str]:
    try:
        with reading(path), path.open(encoding="utf-8-sig") as file:
            yield from (line for line in map(str.strip, file) if line)
    except UnicodeDecodeError as error:
        raise FileProblem(f"{path} is not text in UTF-8") from error


def _of_table(path: Path) -> Iterator[dict[str, object] | str]:
    header, rows = read_rows(path)
    twice = {name for name in header if header.count(name) > 1}
    if twice:
        raise FileProblem(f"{path} has two columns {plain(min(twice))}")
    for cells in rows:
        if len(cells) > len(header):
            yield f"it has {len(cells)} cells, and the table {len(header)} columns: quote a text that has commas in it"
        else:
            yield dict(zip(header, [*cells, *[None] * (len(header) - len(cells))], strict=True))


def _row(number: int, values: Mapping[str, object], keys: dict[str, str], path: Path, folder: Path) -> Row | str:
    """Return a row, or the reason why it cannot be used; `keys` collects the setting of each column."""
    given: dict[str, Given] = {}
    name: str | None = None
    for column, value in values.items():
        if column not in keys:
            keys[column] = _key(column, path)
        key = keys[column]
        if value is None or value == "" or value != value:  # the last is NaN, an empty cell of parquet
            continue
        if key == _NAME:
            name = str(value)
        elif key == _REFERENCES:
            listed = value.split(";") if isinstance(value, str) else value if isinstance(value, list) else [value]
            files = map(str, listed)
            given[key] = Given(tuple(str(folder / file.strip()) for file in files if file.strip()), f"row {number}")
        elif key in OWN_KEYS:
            given[key] = Given(value, f"row {number}")
        else:
            # Values must be comparable, and are read like values from the command line.
            typed = value if isinstance(value, str | int | float | bool) else ",".join(map(str, cast(list[Any], value)))
            given[key] = Given(typed, f"column {column}")
    own: dict[str, Any] = {key: at.value for key, at in given.items()}
    if not str(own.get("prompt", "")).strip():
        return "prompt is empty"
    seed = own.get(_SEED, 0)
    try:
        seed_number = int(seed) if isinstance(seed, float) and seed.is_integer() else int(str(seed))
    except ValueError:
        seed_number = -1
    if not 0 <= seed_number <= MAX_SEED:
        return f"seed={plain(str(seed))} must be a whole number of at least 0 and at most {MAX_SEED}"
    if _SEED in given:
        given[_SEED] = Given(seed_number, f"row {number}")  # parquet has 3.0 in a column with empty cells
    for file in own.get(_REFERENCES, ()):
        if not os.path.exists(file):
            return f"{file} does not exist"
    if name is not None and (
        name.startswith(".") or {"/", "\\", "\0"} & set(name) or len(os.fsencode(name)) > _LONGEST_NAME
    ):
        return f"name={plain(name)} must be the name of a file, without a folder, of at most {_LONGEST_NAME} bytes"
    return Row(number, given, name)


def _key(column: str, path: Path) -> str:
    """Return the setting of a column. Raises RequestError for an unknown column, or a setting that all rows share."""
    known = {**_SHORT, **{name: flag.key for name, flag in FLAGS.items() if not flag.is_negated}}
    key = known.get(column) or (column if column in all_keys(GenerateSettings) else None)
    if key is None:
        close = nearest(column, [*known, *all_keys(GenerateSettings)])
        raise RequestError(
            f"{path}: there is no column {plain(column)}",
            hint=f"did you mean {close}?" if close else "columns are prompt, negative, ref, seed, name, and settings",
        )
    if key.startswith(_OF_ALL_ROWS):
        raise RequestError(f"{path}: {column} is the same for all rows", hint="give it on the command line")
    return key
