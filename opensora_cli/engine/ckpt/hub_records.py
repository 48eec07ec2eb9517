"""Records of downloads beside their files.

`.cache/huggingface/download/NAME.metadata` has three lines, as written by huggingface_hub: the commit, the hash, and
the time of writing.
"""

import time
from pathlib import Path

from opensora_cli.checkpoint.readable import is_sha256
from opensora_cli.core.files import write_bytes_atomic
from opensora_cli.core.locks import open_regular

_FOLDER = Path(".cache", "huggingface", "download")
# Times of file systems are coarser than those of clocks.
_SLACK_S = 1.0
_MAX_RECORD_BYTES = 10_000


def write_record(folder: Path, name: str, *, commit: str, digest: str) -> None:
    """Record the commit and hash of `name` below `folder`. Raises OutputError if the record cannot be written."""
    write_bytes_atomic(folder / _FOLDER / f"{name}.metadata", f"{commit}\n{digest}\n{time.time()}\n".encode())


def recorded_digest(folder: Path, name: str) -> str | None:
    """Return the recorded hash of `name` below `folder`.

    The result is None without a record, and empty if the file was modified after it was recorded. Raises OSError if
    there is a record and no file.
    """
    try:
        with open(folder / _FOLDER / f"{name}.metadata", "rb", opener=open_regular) as file:
            _, digest, written = file.read(_MAX_RECORD_BYTES).decode().split()
        recorded_at = float(written)
    except (OSError, ValueError):
        return None
    return digest if (folder / name).stat().st_mtime <= recorded_at + _SLACK_S else ""


def downloaded_sha256(path: Path) -> str | None:
    """Return the SHA-256 of an existing file on the Hub, if its download was recorded.

    A file in the Hugging Face cache is a link to a blob, whose name is the hash. For a file that was modified after
    the download, the result is None.
    """
    blob = path.resolve()
    if blob.parent.name == "blobs" and is_sha256(blob.name):
        return blob.name
    for folder in path.absolute().parents:
        digest = recorded_digest(folder, path.absolute().relative_to(folder).as_posix())
        if digest is not None:
            return digest if is_sha256(digest) else None
    return None
