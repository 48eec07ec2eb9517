"""Journal of the findings of a scan, so that the next scan reads only new and changed files."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Annotated

from pydantic import BaseModel, ConfigDict, Field, SkipValidation

from opensora_cli.core.exceptions import OutputError
from opensora_cli.core.files import write_bytes_atomic
from opensora_cli.core.regular_files import hint_for, open_regular

_Size = Annotated[int, Field(gt=0, lt=2**31)]


class Finding(BaseModel):
    """Properties of one file: a line of the journal."""

    model_config = ConfigDict(frozen=True, strict=True)

    path: Annotated[str, SkipValidation]
    """Path, which need not be UTF-8."""
    size: int
    mtime_ns: int
    """Modification time of the file."""
    deep: bool = False
    """Whether all frames of the file were decoded."""
    num_frames: _Size
    height: _Size
    width: _Size
    fps: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None
    """Mean rate in frames per second; None for a picture."""
    is_uneven: bool
    """Whether some frames last much longer than others."""

    def to_line(self) -> str:
        """Return the finding as a line of the journal."""
        return json.dumps(self.model_dump()) + "\n"


class ScanJournal:
    """Findings of a scan in a file beside its table, one line each, appended one by one.

    Unreadable files have no line, because the next scan may be able to read them, with the same size and time.
    """

    def __init__(self, table: Path) -> None:
        self.path = table.with_name(f"{table.name}.scan.jsonl")
        self._table = table
        self._findings: dict[str, Finding] = {}
        self._table_sha256s: set[str] = set()

    def read(self) -> None:
        """Read the findings of earlier scans, except for a line that a crash cut off."""
        try:
            with open(self.path, encoding="utf-8", opener=open_regular) as file:
                lines = file.read().splitlines()
        except (OSError, UnicodeDecodeError):
            return
        for line in lines:
            try:
                values = json.loads(line)
                if "table_sha256" in values:
                    self._table_sha256s.add(values["table_sha256"])
                else:
                    finding = Finding.model_validate(values)
                    self._findings[finding.path] = finding
            except (ValueError, KeyError, TypeError, RecursionError):
                continue

    def discard(self) -> None:
        """Remove the journal of earlier scans, if there is one. Raises OutputError if that is not possible."""
        try:
            self.path.unlink(missing_ok=True)
        except OSError as error:
            raise OutputError(f"cannot remove {self.path}: {error.strerror or error}", hint=hint_for(error)) from error

    def is_of_table(self) -> bool:
        """Return whether the last scan wrote this table, even if the scan was killed while it replaced the table."""
        return bool(self._table_sha256s) and self._table.is_file() and _sha256(self._table) in self._table_sha256s

    def find(self, path: str, *, size: int, mtime_ns: int) -> Finding | None:
        """Return the finding of a file, or None if there is none or the file has changed."""
        finding = self._findings.get(path)
        return finding if finding is not None and (finding.size, finding.mtime_ns) == (size, mtime_ns) else None

    @contextmanager
    def appending(self) -> Iterator[IO[str]]:
        """Open the journal to append lines, and remove a cut-off line. Raises OutputError if it cannot be written."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "a+b", opener=open_regular) as file:
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
            with open(self.path, "a", encoding="utf-8", opener=open_regular) as lines:
                yield lines
        except OSError as error:
            raise OutputError(f"cannot write {self.path}: {error.strerror or error}", hint=hint_for(error)) from error

    def expect(self, written: Path) -> None:
        """Note a hash of the table's next content before it is written: a scan may be killed between the two.

        `written` is the file that will become the table. Raises OutputError if the journal cannot be written.
        """
        with self.appending() as lines:
            lines.write(self._hash_line(written))

    def finish(self, findings: list[Finding]) -> None:
        """Rewrite the journal with these findings and a hash of the table. Raises OutputError on failure."""
        lines = [*(finding.to_line() for finding in findings), self._hash_line(self._table)]
        write_bytes_atomic(self.path, "".join(lines).encode())

    @staticmethod
    def _hash_line(table: Path) -> str:
        return json.dumps({"table_sha256": _sha256(table)}) + "\n"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
