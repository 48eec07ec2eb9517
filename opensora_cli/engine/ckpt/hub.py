"""Requests to the Hugging Face Hub, and downloads that resume after an interruption.

`hf_hub_download` removes what has arrived of a file if it is interrupted, and files have up to 24 GB. So the bytes go
through `http_get`, which huggingface_hub uses itself, into a file that stays.
"""

import hashlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, OfflineModeIsEnabled, RepositoryNotFoundError
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import build_hf_headers, tqdm  # type: ignore[attr-defined]  # public, but not marked so
from pydantic import Field

from opensora_cli.checkpoint.files import reading_file
from opensora_cli.core.documents import Document
from opensora_cli.core.exceptions import CheckpointError, OutputError
from opensora_cli.core.formatting import plain, without_credentials
from opensora_cli.core.locks import hint_for, open_regular
from opensora_cli.core.reading import stays_inside

_CHUNK_BYTES = 2**20

# Base of all errors of the HTTP library, httpx or httpx2, depending on the version of huggingface_hub.
_HTTPError: type[Exception] = HfHubHTTPError.__bases__[0]
_InvalidURL: type[Exception] = getattr(sys.modules[_HTTPError.__module__.partition(".")[0]], "InvalidURL", _HTTPError)
# Errors of a broken connection, and those that an answer of another form causes.
_UNEXPECTED = (_HTTPError, _InvalidURL, ValueError, TypeError, LookupError, AttributeError, RecursionError)

Advance = Callable[[int], None]
_Commit = Annotated[str, Field(pattern=r"^[0-9A-Za-z._-]{1,64}$")]


class HubFile(Document, strict=True):
    """File in a repository."""

    name: str
    """Path of the file below the folder."""
    repo: str
    commit: _Commit
    bytes: int = Field(ge=0)
    hash: str = Field(pattern=r"^([0-9a-f]{40}|[0-9a-f]{64})$")
    """SHA-256 of the content, with 64 digits, for large files; else SHA-1 as git computes it."""
    bytes_here: int = 0
    """Bytes in the local folder that need not be fetched."""
    hub_name: str = Field(exclude=True)
    """Path of the file in the repository."""


class HubRepo(Document, strict=True):
    """Repository at one commit."""

    name: str
    commit: _Commit
    licence: str | None
    gated: bool
    """Whether only users who accepted its terms may download its files."""
    files: dict[str, HubFile] = Field(exclude=True)

    def line(self) -> str:
        """Return the repository for people."""
        gate = ", given only to those who have accepted its terms: needs a token" if self.gated else ""
        return f"{self.name}: licence {self.licence or 'not stated'}{gate}"


def read_repo(name: str, *, wanted: Callable[[str], bool]) -> HubRepo:
    """Ask the Hub for a repository by its owner and name. `files` holds only files with `wanted` names.

    Raises CheckpointError if the Hub cannot be reached, lacks the repository, or gives this token no access to it.
    """
    # Proxies and certificates of the environment raise the last two.
    with _explained(name, OSError, ImportError):
        found = huggingface_hub.HfApi().model_info(
            name, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT, token=huggingface_hub.get_token()
        )
        card: Any = found.card_data or {}
        licence = card.get("license_name") or card.get("license")
        commit, files = found.sha or "main", {}
        for listed in found.siblings or ():
            if wanted(listed.rfilename) and stays_inside(listed.rfilename):
                digest = listed.lfs.sha256 if listed.lfs else listed.blob_id
                fields = {"repo": name, "commit": commit, "bytes": listed.size, "hash": digest}
                fields |= {"name": listed.rfilename, "hub_name": listed.rfilename}
                files[listed.rfilename] = HubFile.model_validate(fields)
        return HubRepo(
            name=name,
            commit=commit,
            licence=plain(str(licence)) if licence else None,
            gated=bool(found.gated),
            files=files,
        )


def _endpoint() -> str:
    """Return the address of the Hub for messages, escaped and without a password."""
    return plain(re.sub(r"(?<=://).*@", "<hidden>@", constants.ENDPOINT, flags=re.DOTALL))


def part_of(file: HubFile, target: Path) -> Path:
    """Return the path of the partial file of an unfinished download."""
    return target.with_name(f"{target.name}.{file.hash[:12]}.part")


def fetch(file: HubFile, target: Path, *, advance: Advance) -> None:
    """Fetch `file` to `target`, and resume from the partial file of an earlier call.

    The content goes to a partial file beside `target`, which is renamed when the hash is correct. Broken connections
    are retried. `advance` is called with the bytes of each piece, including pieces from an earlier call.

    Raises:
        CheckpointError: the Hub cannot be reached or refuses, or the content has another hash.
        OutputError: the file cannot be written.
    """

    class Bar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options | {"disable": True})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> None:
            advance(int(n or 0))

    part = part_of(file, target)
    try:
        part.parent.mkdir(parents=True, exist_ok=True)
        with open(part, "r+b" if part.exists() else "w+b", opener=open_regular) as out:
            start = out.seek(0, os.SEEK_END)
            advance(start)
            if start < file.bytes:
                url = huggingface_hub.hf_hub_url(file.repo, file.hub_name, revision=file.commit)
                headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
                with _explained(file.repo):
                    http_get(url, out, resume_size=start, headers=headers, tqdm_class=Bar)
            out.flush()
            os.fsync(out.fileno())
        if not is_content(file, part):
            part.unlink()
            raise CheckpointError(
                f"{file.repo}/{file.hub_name} arrived with another hash than {file.hash}",
                hint="what arrived is removed: try again",
            )
        part.replace(target)
    except OSError as error:
        raise OutputError(f"cannot write {part}: {error.strerror or error}", hint=hint_for(error)) from error
    finally:
        if part.is_file() and part.stat().st_size == 0:
            part.unlink()


def is_content(file: HubFile, path: Path, *, advance: Advance = lambda count: None) -> bool:
    """Return whether a local file is `file` by its hash. Raises CheckpointError if it cannot be read."""
    is_sha256 = len(file.hash) == 64
    hasher = hashlib.sha256() if is_sha256 else hashlib.sha1(b"blob %d\0" % file.bytes, usedforsecurity=False)
    with reading_file(path), path.open("rb") as content:
        while chunk := content.read(_CHUNK_BYTES):
            hasher.update(chunk)
            advance(len(chunk))
    return hasher.hexdigest() == file.hash


@contextmanager
def _explained(repo: str, *more: type[Exception]) -> Iterator[None]:
    """Turn errors of the Hub's client, those that an unexpected answer causes, and `more` into one line."""
    token = "then give a token of that account: hf auth login, or HF_TOKEN in the environment"
    if huggingface_hub.get_token():
        token = "with the account of your token, which must be allowed to read such repositories"
    access = f"accept its terms at {_endpoint()}/{repo}, {token}"
    again = "the same command continues from what has arrived"
    unexpected: tuple[type[Exception], ...] = (*_UNEXPECTED, *more)
    try:
        yield
    except OfflineModeIsEnabled as error:
        raise CheckpointError(
            f"{repo} is not requested: the machine is offline (HF_HUB_OFFLINE)",
            hint="unset HF_HUB_OFFLINE, or copy the folder from another machine: osora ckpt verify checks its files",
        ) from error
    except GatedRepoError as error:
        raise CheckpointError(f"{repo} is only given to people who have accepted its terms", hint=access) from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(f"{repo} is not at {_endpoint()}, or not public", hint=access) from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        reason = f"{repo}: the Hub answers {status} {error.response.reason_phrase}".rstrip()
        raise CheckpointError(reason, hint=access if status in (401, 403) else f"try again later: {again}") from error
    except unexpected as error:
        cause = plain(without_credentials(" ".join(str(error).split()))[:300]) or type(error).__name__
        raise CheckpointError(
            f"{repo}: {_endpoint()} gives no usable answer: {cause}",
            hint=f"check the connection, and HF_ENDPOINT, HTTPS_PROXY and SSL_CERT_FILE if they are set: {again}",
        ) from error
