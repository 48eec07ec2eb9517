"""Repositories of the Hugging Face Hub: their files, and downloads that resume after an interruption.

huggingface_hub finds the endpoint, the token and the files. The bytes are fetched here, because huggingface_hub
restarts a file after each interruption, and files have up to 24 GB.
"""

import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO
from urllib.parse import urlsplit

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, OfflineModeIsEnabled, RepositoryNotFoundError
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # public, but not marked so
    build_hf_headers,
    get_session,
    hf_raise_for_status,
)

from opensora_cli.core.exceptions import CheckpointError, OutputError, RequestError
from opensora_cli.core.formatting import format_bytes, plain, without_credentials
from opensora_cli.core.regular_files import hint_for, open_regular
from opensora_cli.core.strict_json import MAX_JSON_BYTES, is_too_large

RETRY_AFTER_S = 1.0
_MAX_FAILURES = 5
_MAX_REDIRECTS = 10
_CHUNK_BYTES = 2**20
_PART_SUFFIX = ".part"
_COMMIT = re.compile(r"[0-9A-Za-z._-]{1,64}")
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_CHECK = "check HF_ENDPOINT if it is set"

# Base of all errors of the HTTP library, httpx or httpx2, depending on the version of huggingface_hub.
_HTTPError: type[Exception] = HfHubHTTPError.__bases__[0]
_InvalidURL: type[Exception] = getattr(sys.modules[_HTTPError.__module__.partition(".")[0]], "InvalidURL", _HTTPError)

Advance = Callable[[int], None]


class ConnectionProblem(CheckpointError):
    """Error that a retry may solve: the Hub cannot be reached now."""

    def __init__(self, message: str) -> None:
        super().__init__(message, hint="check the connection, and HF_ENDPOINT if it is set")


class OfflineProblem(CheckpointError):
    """Error in offline mode, in which no request may be made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubFile:
    """File in a repository."""

    repo: str
    commit: str
    name: str
    size: int
    digest: str
    """SHA-256 of the content, with 64 digits, for large files; else SHA-1 as git computes it."""

    def hasher(self) -> "hashlib._Hash":
        """Return the hash object that computes `digest` from the content."""
        if len(self.digest) == 64:
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)

    def is_content_of(self, path: Path, *, advance: Advance) -> bool:
        """Read a file, and return whether it has this content. `advance` is called with the bytes of each piece.

        Raises:
            CheckpointError: the file cannot be read.
        """
        hasher = self.hasher()
        try:
            with path.open("rb") as file:
                while chunk := file.read(_CHUNK_BYTES):
                    hasher.update(chunk)
                    advance(len(chunk))
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
        return hasher.hexdigest() == self.digest


@dataclass(frozen=True, slots=True, kw_only=True)
class HubRepo:
    """Repository at one commit."""

    name: str
    commit: str
    licence: str | None
    is_gated: bool
    """Whether only users who accepted its terms may download its files."""
    files: dict[str, HubFile]


def read_repo(name: str, *, wanted: Callable[[str], bool]) -> HubRepo:
    """Ask the Hub for a repository by its owner and name. `files` holds only files with `wanted` names.

    Raises:
        RequestError: HF_ENDPOINT is no address.
        CheckpointError: the repository is missing, or this token has no access to it.
        ConnectionProblem: the Hub cannot be reached.
        OfflineProblem: no request may be made.
    """
    if not _is_web_address(constants.ENDPOINT):
        raise RequestError(
            f"HF_ENDPOINT={_endpoint()} must be an address of http:// or https://, without query or fragment",
            hint="unset HF_ENDPOINT, or export HF_ENDPOINT=https://HOST",
        )
    with _explained(name), _like_the_hub():
        found = _metadata(name, f"{constants.ENDPOINT}/api/models/{name}?blobs=true")
        info = huggingface_hub.ModelInfo(**found)  # type: ignore[no-untyped-call]  # its **kwargs have no types
    commit, card = info.sha or "main", info.card_data or huggingface_hub.ModelCardData()
    if not (isinstance(commit, str) and _COMMIT.fullmatch(commit) and isinstance(card, huggingface_hub.ModelCardData)):
        raise _unlike_the_hub()
    files = {}
    for sibling in info.siblings or ():
        if not isinstance(sibling.rfilename, str):
            raise _unlike_the_hub()
        if wanted(sibling.rfilename):
            digest = sibling.lfs.sha256 if sibling.lfs else sibling.blob_id
            files[sibling.rfilename] = _file(name, commit, sibling.rfilename, size=sibling.size, digest=digest)
    noted = vars(card)
    licence = noted.get("license_name") or noted.get("license")
    return HubRepo(
        name=name,
        commit=commit,
        licence=plain(str(licence)) if licence else None,
        is_gated=bool(info.gated),
        files=files,
    )


def _file(repo: str, commit: str, name: str, *, size: object, digest: object) -> HubFile:
    """Return a file from a repository's listing. Raises CheckpointError if its size or hash is missing."""
    if size is None or digest is None:  # a mirror that lists names only
        with _explained(repo), _like_the_hub():
            found = huggingface_hub.get_hf_file_metadata(huggingface_hub.hf_hub_url(repo, name, revision=commit))
        size, digest = found.size, found.etag
    if type(size) is not int or size < 0 or not is_digest(str(digest)):
        raise CheckpointError(f"{repo}: no valid size and hash of {name}", hint=_CHECK)
    return HubFile(repo=repo, commit=commit, name=name, size=size, digest=str(digest))


def _is_web_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        is_plain = url.isprintable() and not {" ", "?", "#", "\\"} & set(url)
        return is_plain and parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        return False


def _endpoint() -> str:
    """Return the address of the Hub for messages, escaped and without a password."""
    return plain(re.sub(r"(?<=://).*@", "<hidden>@", constants.ENDPOINT, flags=re.DOTALL))


def _metadata(repo: str, url: str) -> dict[str, Any]:
    """Return the JSON object at an address of the Hub. Raises CheckpointError or ValueError for another content.

    huggingface_hub itself does not limit the size of the answer.
    """
    content = bytearray()
    with _answer(repo, url, timeout=constants.HF_HUB_ETAG_TIMEOUT) as response:
        for piece in response.iter_raw():
            content += piece
            if len(content) > MAX_JSON_BYTES:
                raise CheckpointError(
                    f"{repo}: {_endpoint()} answers with over {MAX_JSON_BYTES:,} bytes of metadata", hint=_CHECK
                )
    document = {} if is_too_large(bytes(content)) else json.loads(content)
    if not document or not isinstance(document, dict):
        raise _unlike_the_hub()
    return document


@contextmanager
def _answer(repo: str, url: str, *, timeout: float, headers: Mapping[str, str] = MappingProxyType({})) -> Iterator[Any]:
    """Open the Hub's answer to a GET request: an uncompressed `httpx.Response` whose content has not been read.

    Redirections are followed here, because the HTTP library reads and decompresses the content of each one, and 2 MB
    may become gigabytes. The content of errors is not read either.

    Raises the errors of huggingface_hub, which `_explained` knows, and CheckpointError for a compressed answer.
    """
    session = get_session()
    # A compressed stream has neither the length nor the positions of the file.
    headers = {**build_hf_headers(), "Accept-Encoding": "identity", **headers}
    request = session.build_request("GET", url, headers=headers, timeout=timeout)
    for _ in range(_MAX_REDIRECTS):
        response = session.send(request, stream=True, follow_redirects=False)
        with closing(response):
            if response.next_request is not None:
                request = response.next_request
                continue
            if response.is_error:
                response.close()
            hf_raise_for_status(response)
            encoding = response.headers.get("Content-Encoding", "identity")
            if encoding.lower() != "identity":
                raise CheckpointError(
                    f"{repo}: {_endpoint()} sends compressed content ({plain(encoding)}), which was not asked for",
                    hint=_CHECK,
                )
            yield response
            return
    raise CheckpointError(f"{repo}: {_endpoint()} redirects more than {_MAX_REDIRECTS} times", hint=_CHECK)


@contextmanager
def _like_the_hub() -> Iterator[None]:
    """Turn errors that an unexpected answer causes in the Hub's client into one line."""
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise _unlike_the_hub() from error


def _unlike_the_hub() -> CheckpointError:
    return CheckpointError(f"{_endpoint()} does not answer as the Hub does", hint=_CHECK)


def is_digest(text: str) -> bool:
    """Return whether a text can be the `digest` of a file."""
    return _DIGEST.fullmatch(text) is not None


def part_of(file: HubFile, target: Path) -> Path:
    """Return the path of the partial file of an unfinished download."""
    return target.with_name(f"{target.name}.{file.digest[:12]}{_PART_SUFFIX}")


def fetch(file: HubFile, target: Path, *, advance: Advance, report: Callable[[str], None]) -> None:
    """Fetch `file` to `target`, and resume from the partial file of an earlier call.

    The content goes to a partial file beside `target`, which is renamed when the hash is correct. Broken connections
    are retried. `advance` is called with the bytes of each piece, including pieces from an earlier call. `report` is
    called with a line before each retry.

    Raises:
        CheckpointError: the Hub cannot be reached or refuses, or the content has another hash.
        OutputError: the file cannot be written.
    """
    part = part_of(file, target)
    try:
        part.parent.mkdir(parents=True, exist_ok=True)
        with open(part, "r+b" if part.exists() else "w+b", opener=open_regular) as out:
            hasher = file.hasher()
            _receive(file, out, hasher, advance, report)
            out.flush()
            os.fsync(out.fileno())
        if hasher.hexdigest() != file.digest:
            part.unlink()
            raise CheckpointError(
                f"{file.repo}/{file.name} arrived with the hash {hasher.hexdigest()} instead of {file.digest}",
                hint="what arrived is removed: try again",
            )
        part.replace(target)
    except OSError as error:
        raise OutputError(f"cannot write {part}: {error.strerror or error}", hint=hint_for(error)) from error
    finally:
        if part.is_file() and part.stat().st_size == 0:
            part.unlink()


def _receive(
    file: HubFile, out: BinaryIO, hasher: "hashlib._Hash", advance: Advance, report: Callable[[str], None]
) -> None:
    """Read the existing content of `out`, and write the missing rest."""
    position = 0

    def take(chunk: bytes) -> None:
        nonlocal position
        hasher.update(chunk)
        position += len(chunk)
        advance(len(chunk))

    while chunk := out.read(_CHUNK_BYTES):
        take(chunk)
    failures = 0
    while position < file.size:
        before = position
        try:
            for chunk in _chunks(file, position):
                out.write(chunk)
                take(chunk)
        except ConnectionProblem as problem:
            failures = 1 if position > before else failures + 1
            if failures == _MAX_FAILURES:
                kept = f"{format_bytes(position)} are kept: the same command continues from there"
                raise CheckpointError(f"{problem.message}, {failures} times", hint=kept) from problem
            report(f"{problem.message}: trying again, {failures + 1} of {_MAX_FAILURES}")
            time.sleep(RETRY_AFTER_S * failures)


def _chunks(file: HubFile, position: int) -> Iterator[bytes]:
    """Yield the content from `position` to the end, piece by piece."""
    url = huggingface_hub.hf_hub_url(file.repo, file.name, revision=file.commit)
    headers = {"Range": f"bytes={position}-"}
    with (
        _explained(file.repo),
        _answer(file.repo, url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT) as response,
    ):
        # A server without support for ranges sends the whole file.
        skipped = position if response.status_code == 200 else 0
        left = file.size - position
        for chunk in response.iter_raw():
            new = chunk[skipped:]
            skipped -= len(chunk) - len(new)
            if len(new) > left:
                raise CheckpointError(
                    f"{without_credentials(url)}: the server sends more than the {file.size} bytes of the file"
                )
            left -= len(new)
            yield new
        if left:
            raise ConnectionProblem(f"{file.repo}: {file.name} ended {left} bytes too early")


@contextmanager
def _explained(repo: str) -> Iterator[None]:
    """Turn errors of the Hub's client into one line."""
    try:
        yield
    except OfflineModeIsEnabled as error:
        raise OfflineProblem(f"{repo} is not requested: the machine is offline (HF_HUB_OFFLINE)") from error
    except GatedRepoError as error:
        reason = f"{repo} is only given to people who have accepted its terms"
        raise CheckpointError(reason, hint=_how_in(repo)) from error
    except RepositoryNotFoundError as error:
        reason = f"{repo} is not at {_endpoint()}, or not public"
        raise CheckpointError(reason, hint=_how_in(repo)) from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        reason = f"{repo}: the Hub answers {status} {error.response.reason_phrase}".rstrip()
        if status in (408, 429) or status >= 500:
            raise ConnectionProblem(reason) from error
        raise CheckpointError(reason, hint=_how_in(repo) if status in (401, 403) else None) from error
    except _InvalidURL as error:
        reason = f"{repo}: {_endpoint()} names an address that is none ({plain(without_credentials(str(error)))})"
        raise CheckpointError(reason, hint=_CHECK) from error
    except _HTTPError as error:
        cause = plain(without_credentials(str(error))) or type(error).__name__
        reason = f"{repo}: the connection to {_endpoint()} broke ({cause})"
        raise ConnectionProblem(reason) from error


def _how_in(repo: str) -> str:
    page = f"accept its terms at {_endpoint()}/{repo}"
    if huggingface_hub.get_token():
        return f"{page} with the account of your token, which must be allowed to read such repositories"
    return f"{page}, then give a token of that account: hf auth login, or HF_TOKEN in the environment"
