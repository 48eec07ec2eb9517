"""The finished rows of a run over many prompts: `manifest.jsonl` beside the results. A rerun skips them."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

from opensora_cli.checkpoint.stream import write_all
from opensora_cli.core.exceptions import OutputError
from opensora_cli.core.files import write_bytes_atomic
from opensora_cli.core.folder_lock import sole_run
from opensora_cli.core.reading import stays_inside
from opensora_cli.core.regular_files import open_regular
from opensora_cli.engine.generate.prompts import Row, Shard
from opensora_cli.media.results import result_bytes

DONE, FAILED = "done", "failed"

_ANOTHER_FOLDER = "choose another folder with --out"


class Manifest:
    """The manifest of a folder of results, open for one process until the block ends.

    Each part of the rows (`Shard`) has a file of its own, and all of them are read. A line is written whole, and on the
    disk, before the next row begins; one that a crash cut off is removed.

    Args:
        folder: of the results; made if it is not there.
        shard: what this process makes.

    Raises:
        OutputError: the folder cannot be written, or another process writes this manifest.
    """

    def __init__(self, folder: Path, shard: Shard) -> None:
        part = "" if shard.count == 1 else f"-{shard.index}of{shard.count}"
        self.path = folder / f"manifest{part}.jsonl"
        self._done: dict[str, list[tuple[str, int]]] = {}
        self._open = ExitStack()

    def __enter__(self) -> Self:
        folder = self.path.parent
        with self._open:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise self._problem(error) from error
            self._open.enter_context(
                sole_run(
                    folder / f".osora-{self.path.name}.lock",
                    doing=f"writes {self.path}",
                    hint="wait until it ends, or give each run its --shard",
                )
            )
            for path in sorted(folder.glob("manifest*.jsonl")):
                for line in self._whole_lines(path):
                    self._read(line)
            self._file = self._open.enter_context(self._appending())
            self._open = self._open.pop_all()
        return self

    def __exit__(self, *reason: object) -> None:
        self._open.close()

    def finished(self, key: str) -> list[Path] | None:
        """Return the results of a row that is finished and whole; None: it is to be made."""
        results = self._done.get(key)
        if results is None:
            return None
        paths = [self.path.parent / name for name, _ in results]
        try:
            is_whole = [result_bytes(path) for path in paths] == [size for _, size in results]
        except OSError:
            return None
        return paths if is_whole else None

    def add_done(self, row: Row, key: str, results: Sequence[Path], *, seeds: Sequence[int], seconds: float) -> None:
        """Write that a row is finished."""
        folder = self.path.parent
        outputs = [
            {"path": os.path.relpath(path, folder), "seed": seed, "bytes": result_bytes(path)}
            for path, seed in zip(results, seeds, strict=True)
        ]
        self._add(row, key, {"status": DONE, "outputs": outputs, "seconds": round(seconds, 3)})

    def add_failed(self, row: Row, key: str | None, error: str) -> None:
        """Write why a row was not made; the next run tries it again."""
        self._add(row, key, {"status": FAILED, "error": error})

    def _add(self, row: Row, key: str | None, values: Mapping[str, object]) -> None:
        line = json.dumps({"row": row.number, "key": key, "prompt": row.prompt, "name": row.name, **values}) + "\n"
        before = os.fstat(self._file.fileno()).st_size
        try:
            write_all(self._file, line.encode("utf-8"))
            os.fsync(self._file.fileno())
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(before)
            raise self._problem(error) from error

    def _read(self, line: bytes) -> None:
        try:
            values: Any = json.loads(line)
            key, status = values["key"], values["status"]
            results = [(each["path"], each["bytes"]) for each in values.get("outputs", ())]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return
        if status == DONE and isinstance(key, str):
            self._done.pop(key, None)
            if results and all(stays_inside(path) and type(size) is int for path, size in results):
                self._done[key] = results

    def _whole_lines(self, path: Path) -> Iterator[bytes]:
        """Yield the lines of a manifest; what a crash cut off in this process's own is removed from it."""
        try:
            with open(path, "rb", opener=open_regular) as file:
                content = file.read()
        except OSError as error:
            raise OutputError(f"cannot read {path}: {error.strerror or error}", hint=_ANOTHER_FOLDER) from error
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content and path == self.path:
            write_bytes_atomic(path, whole)
        yield from whole.splitlines()

    def _appending(self) -> Any:
        try:
            return open(self.path, "ab", buffering=0, opener=open_regular)
        except OSError as error:
            raise self._problem(error) from error

    def _problem(self, error: OSError) -> OutputError:
        return OutputError(f"cannot write {self.path}: {error.strerror or error}", hint=_ANOTHER_FOLDER)
