"""What downloads into a folder leave about their files, in the form that huggingface_hub leaves and reads it.

`.cache/huggingface/download/NAME.metadata` has three lines: the commit, the hash, and when it was written.
"""

import re
import time
from dataclasses import dataclass
from pathlib import Path

from opensora_cli.core.files import write_bytes_atomic

_FOLDER = Path(".cache", "huggingface", "download")
_SHA256 = re.compile(r"[0-9a-f]{64}")
# File systems keep times more coarsely than clocks.
_SLACK_S = 1.0


@dataclass(frozen=True, slots=True)
class Record:
    """What was downloaded as a file."""

    commit: str
    digest: str
    """SHA-256 if it has 64 digits, else SHA-1 as git computes it."""
    written: float
    """Seconds since 1970."""

    def is_newer_than(self, path: Path) -> bool:
        """Whether the file has not been touched since."""
        return path.stat().st_mtime <= self.written + _SLACK_S


def write_record(folder: Path, name: str, *, commit: str, digest: str) -> None:
    """Note what `name` below `folder` is.

    Raises:
        OutputError: that is not possible.
    """
    write_bytes_atomic(folder / _FOLDER / f"{name}.metadata", f"{commit}\n{digest}\n{time.time()}\n".encode())


def read_record(folder: Path, name: str) -> Record | None:
    """Return what is noted of `name` below `folder`, if anything is that can be read."""
    try:
        commit, digest, written = (folder / _FOLDER / f"{name}.metadata").read_text(encoding="utf-8").split()
        return Record(commit, digest, float(written))
    except (OSError, ValueError):
        return None


def downloaded_sha256(path: Path) -> str | None:
    """Return the SHA-256 that a file had on the Hub, if it was downloaded and that was noted.

    A file in the Hugging Face cache has it as the name of the blob that it is a link to. Of a file that was written
    since, nothing is known.
    """
    blob = path.resolve()
    if blob.parent.name == "blobs" and is_sha256(blob.name):
        return blob.name
    for folder in path.absolute().parents:
        record = read_record(folder, path.absolute().relative_to(folder).as_posix())
        if record is not None:
            known = is_sha256(record.digest) and path.exists() and record.is_newer_than(path)
            return record.digest if known else None
    return None


def is_sha256(text: str) -> bool:
    """Return whether it is a SHA-256 in small hexadecimal digits."""
    return _SHA256.fullmatch(text) is not None
