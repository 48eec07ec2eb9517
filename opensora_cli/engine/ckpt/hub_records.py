"""Records of downloads beside their files: one for each file, in the format of huggingface_hub, and a listing of all.

`.cache/huggingface/download/NAME.metadata` has three lines: the commit, the hash, and the time of writing. The listing
of the complete download serves machines that are offline.
"""

import json
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from opensora_cli.core.files import write_bytes_atomic
from opensora_cli.core.reading import stays_inside
from opensora_cli.core.regular_files import open_regular
from opensora_cli.core.strict_json import parse_object
from opensora_cli.engine.ckpt.hub import HubFile, HubRepo, is_digest

_FOLDER = Path(".cache", "huggingface", "download")
_SHA256 = re.compile(r"[0-9a-f]{64}")
# Times of file systems are coarser than those of clocks.
_SLACK_S = 1.0
_MAX_BYTES = 10_000_000
_MAX_RECORD_BYTES = 10_000


@dataclass(frozen=True, slots=True)
class Record:
    """Record of a downloaded file."""

    commit: str
    digest: str
    """Hash of the content: SHA-256 if it has 64 digits, else SHA-1 as git computes it."""
    written: float
    """Time of the record in seconds since 1970."""

    def is_newer_than(self, path: Path) -> bool:
        """Return whether the file has not been modified since the record was written."""
        return path.stat().st_mtime <= self.written + _SLACK_S


def write_record(folder: Path, name: str, *, commit: str, digest: str) -> None:
    """Record the commit and hash of file `name` below `folder`.

    Raises:
        OutputError: the record cannot be written.
    """
    write_bytes_atomic(folder / _FOLDER / f"{name}.metadata", f"{commit}\n{digest}\n{time.time()}\n".encode())


def read_record(folder: Path, name: str) -> Record | None:
    """Return the record of `name` below `folder`; None if it is missing or broken."""
    try:
        with open(folder / _FOLDER / f"{name}.metadata", "rb", opener=open_regular) as file:
            commit, digest, written = file.read(_MAX_RECORD_BYTES).decode().split()
        return Record(commit, digest, float(written))
    except (OSError, ValueError):
        return None


def downloaded_sha256(path: Path) -> str | None:
    """Return the SHA-256 of a file on the Hub, if its download was recorded.

    A file in the Hugging Face cache is a link to a blob, whose name is the hash. For a file that was modified after
    the download, the result is None.
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
    """Return whether a text is a SHA-256 in lowercase hexadecimal digits."""
    return _SHA256.fullmatch(text) is not None


def write_listing(folder: Path, name: str, repos: Sequence[HubRepo]) -> None:
    """Record the files of repositories that were downloaded into a folder, under the name `name`.

    Raises:
        OutputError: the listing cannot be written.
    """
    document = {repo.name: asdict(repo) for repo in repos}
    write_bytes_atomic(_path(folder, name), json.dumps(document, indent=2).encode())


def read_listing(folder: Path, name: str) -> dict[str, HubRepo]:
    """Return the listing of a download by the names of the repositories; empty if it is missing or broken."""
    try:
        with open(_path(folder, name), "rb", opener=open_regular) as file:
            document = parse_object(file.read(_MAX_BYTES))
        return {repo: _repo(fields) for repo, fields in document.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _path(folder: Path, name: str) -> Path:
    return folder / _FOLDER / f"{name}.listing.json"


def _repo(fields: dict[str, Any]) -> HubRepo:
    files = {name: HubFile(**file) for name, file in fields["files"].items()}
    repo = HubRepo(**{**fields, "files": files})
    texts = [repo.name, repo.commit, *(text for file in files.values() for text in (file.repo, file.commit, file.name))]
    licence_is_known = isinstance(repo.licence, str | None)
    if not (licence_is_known and isinstance(repo.is_gated, bool) and all(isinstance(text, str) for text in texts)):
        raise ValueError("texts are of another type")
    if not all(type(file.size) is int and file.size >= 0 and is_digest(file.digest) for file in files.values()):
        raise ValueError("sizes or hashes are none")
    if not all(file.name == name and stays_inside(name) for name, file in files.items()):
        raise ValueError("a file has two names, or is outside the folder")
    return repo
