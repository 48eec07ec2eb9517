"""What the Hub said of a download that is complete, kept beside it for machines that may not ask again."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from opensora_cli.checkpoint.strict_json import parse_object
from opensora_cli.core.files import write_bytes_atomic
from opensora_cli.engine.ckpt.hub import HubFile, HubRepo, is_digest

_FOLDER = Path(".cache", "huggingface", "download")
_MAX_BYTES = 10_000_000


def write_listing(folder: Path, name: str, repos: Sequence[HubRepo]) -> None:
    """Note what of some repositories was downloaded into a folder as `name`.

    Raises:
        OutputError: that is not possible.
    """
    document = {repo.name: asdict(repo) for repo in repos}
    write_bytes_atomic(_path(folder, name), json.dumps(document, indent=2).encode())


def read_listing(folder: Path, name: str) -> dict[str, HubRepo]:
    """Return what is noted of a download, by the names of the repositories; nothing if nothing is that can be read."""
    try:
        with _path(folder, name).open("rb") as file:
            document = parse_object(file.read(_MAX_BYTES))
        return {repo: _repo(noted) for repo, noted in document.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _path(folder: Path, name: str) -> Path:
    return folder / _FOLDER / f"{name}.listing.json"


def _repo(noted: dict[str, Any]) -> HubRepo:
    files = {name: HubFile(**file) for name, file in noted["files"].items()}
    repo = HubRepo(**{**noted, "files": files})
    texts = [repo.name, repo.commit, *(text for file in files.values() for text in (file.repo, file.commit, file.name))]
    licence_is_known = isinstance(repo.licence, str | None)
    if not (licence_is_known and isinstance(repo.is_gated, bool) and all(isinstance(text, str) for text in texts)):
        raise ValueError("texts are of another type")
    if not all(type(file.size) is int and file.size >= 0 and is_digest(file.digest) for file in files.values()):
        raise ValueError("sizes or hashes are none")
    return repo
