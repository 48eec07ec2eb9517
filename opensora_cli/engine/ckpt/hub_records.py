"""Repositories of the Hub, and the records of downloads beside their files.

`.cache/huggingface/download/NAME.metadata` has three lines, as written by huggingface_hub: the commit, the hash, and
the time of writing. A listing of the complete download serves machines that are offline.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, TypeAdapter, model_validator

from opensora_cli.checkpoint.readable import is_sha256
from opensora_cli.core.documents import Document
from opensora_cli.core.files import write_bytes_atomic
from opensora_cli.core.reading import stays_inside
from opensora_cli.core.regular_files import open_regular

_FOLDER = Path(".cache", "huggingface", "download")
# Times of file systems are coarser than those of clocks.
_SLACK_S = 1.0
_MAX_LISTING_BYTES = 10_000_000
_MAX_RECORD_BYTES = 10_000

Commit = Annotated[str, Field(pattern=r"^[0-9A-Za-z._-]{1,64}$")]


class HubFile(Document, strict=True):
    """File in a repository."""

    repo: str
    commit: Commit
    name: str
    size: int = Field(ge=0)
    digest: str = Field(pattern=r"^([0-9a-f]{40}|[0-9a-f]{64})$")
    """SHA-256 of the content, with 64 digits, for large files; else SHA-1 as git computes it."""


class HubRepo(Document, strict=True):
    """Repository at one commit."""

    name: str
    commit: Commit
    licence: str | None
    is_gated: bool
    """Whether only users who accepted its terms may download its files."""
    files: dict[str, HubFile]

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        if not all(file.name == name and stays_inside(name) for name, file in self.files.items()):
            raise ValueError("a file has two names, or is outside the folder")
        return self


_LISTING = TypeAdapter(dict[str, HubRepo])


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


def write_listing(folder: Path, name: str, repos: Sequence[HubRepo]) -> None:
    """Record the files of repositories that were downloaded into a folder, under the name `name`.

    Raises:
        OutputError: the listing cannot be written.
    """
    document = {repo.name: repo.to_json() for repo in repos}
    write_bytes_atomic(folder / _FOLDER / f"{name}.listing.json", json.dumps(document, indent=2).encode())


def read_listing(folder: Path, name: str) -> dict[str, HubRepo]:
    """Return the listing of a download by the names of the repositories; empty if it is missing or broken."""
    try:
        with open(folder / _FOLDER / f"{name}.listing.json", "rb", opener=open_regular) as file:
            return _LISTING.validate_json(file.read(_MAX_LISTING_BYTES))
    except (OSError, ValueError):
        return {}
