"""Requests to the Hugging Face Hub, and downloads that resume after an interruption.

huggingface_hub finds the endpoint, the token and the addresses. The bytes are fetched here: huggingface_hub restarts a
file after each interruption, and files have up to 24 GB. It also reads and decompresses answers of any size.
"""

import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
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
from pydantic import BaseModel, ConfigDict, Field, InstanceOf

from opensora_cli.core.exceptions import CheckpointError, OutputError, RequestError
from opensora_cli.core.formatting import format_bytes, plain, without_credentials
from opensora_cli.core.regular_files import hint_for, open_regular
from opensora_cli.core.strict_json import MAX_JSON_BYTES, is_too_large
from opensora_cli.engine.ckpt.hub_records import Commit, HubFile, HubRepo

RETRY_AFTER_S = 1.0
_MAX_FAILURES = 5
_MAX_REDIRECTS = 10
_CHUNK_BYTES = 2**20
_PART_SUFFIX = ".part"
_CHECK = "check HF_ENDPOINT if it is set"
_PROXIES = ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY", "http_proxy", "HTTP_PROXY")
_CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR")

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


class _Answered(BaseModel):
    """Part of an answer of the Hub; other fields are ignored."""

    model_config = ConfigDict(strict=True)


class _Lfs(_Answered):
    sha256: str


class _Sibling(_Answered):
    rfilename: InstanceOf[str]  # half a character may be in it
    size: int | None = None
    blob_id: str | None = Field(default=None, alias="blobId")
    lfs: _Lfs | None = None


class _Card(_Answered):
    license: object = None
    license_name: object = None


class _Model(_Answered):
    sha: Commit = "main"
    gated: bool | str = False
    siblings: list[_Sibling] = []
    card: _Card | None = Field(default=None, alias="cardData")


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
    with _explained(name):
        content = _metadata(name, f"{constants.ENDPOINT}/api/models/{name}?blobs=true")
        if is_too_large(content):
            raise ValueError("JSON with more values than any repository needs")
        found = _Model.model_validate(json.loads(content))
        if not found.model_fields_set:
            raise ValueError("JSON of something else")
    card = found.card or _Card()
    licence = card.license_name or card.license
    siblings = (each for each in found.siblings if wanted(each.rfilename))
    return HubRepo(
        name=name,
        commit=found.sha,
        licence=plain(str(licence)) if licence else None,
        is_gated=bool(found.gated),
        files={each.rfilename: _file(name, found.sha, each) for each in siblings},
    )


def _file(repo: str, commit: str, listed: _Sibling) -> HubFile:
    """Return a file from a repository's listing. Raises CheckpointError if its size or hash is missing."""
    name, size, digest = listed.rfilename, listed.size, listed.lfs.sha256 if listed.lfs else listed.blob_id
    if size is None or digest is None:  # a mirror that lists names only
        with _explained(repo):
            asked = huggingface_hub.get_hf_file_metadata(huggingface_hub.hf_hub_url(repo, name, revision=commit))
        size, digest = asked.size, asked.etag
    try:
        return HubFile.model_validate({"repo": repo, "commit": commit, "name": name, "size": size, "digest": digest})
    except ValueError as error:
        raise CheckpointError(f"{repo}: no valid size and hash of {name}", hint=_CHECK) from error


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


def _metadata(repo: str, url: str) -> bytes:
    """Return the content at an address of the Hub, which has a limited size."""
    content = bytearray()
    with _answer(repo, url, timeout=constants.HF_HUB_ETAG_TIMEOUT) as response:
        for piece in response.iter_raw():
            content += piece
            if len(content) > MAX_JSON_BYTES:
                raise CheckpointError(
                    f"{repo}: {_endpoint()} answers with over {MAX_JSON_BYTES:,} bytes of metadata", hint=_CHECK
                )
    return bytes(content)


def _session() -> Any:
    """Return the HTTP session. Raises RequestError if proxies or certificates in the environment are unusable."""
    try:
        return get_session()
    except (ImportError, OSError, ValueError, _InvalidURL) as error:
        names = _CERTIFICATES if isinstance(error, OSError) else _PROXIES
        given = (f"{name}={without_credentials(os.environ[name])}" for name in names if os.environ.get(name))
        reason = without_credentials(" ".join(str(error).split()))
        raise RequestError(
            f"{plain(', '.join(given) or 'the proxy')} cannot be used: {plain(reason)}",
            hint="unset it, or name a proxy as http://HOST:PORT and certificates as a file in PEM format",
        ) from error


@contextmanager
def _answer(repo: str, url: str, *, timeout: float, headers: Mapping[str, str] = MappingProxyType({})) -> Iterator[Any]:
    """Open the Hub's answer to a GET request: an uncompressed `httpx.Response` whose content has not been read.

    Redirections are followed here, because the HTTP library reads and decompresses the content of each one, and 2 MB
    may become gigabytes. The content of errors is not read either.

    Raises the errors of huggingface_hub, which `_explained` knows, and CheckpointError for a compressed answer.
    """
    session = _session()
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
            digest = _receive(file, out, advance, report)
            out.flush()
            os.fsync(out.fileno())
        if digest != file.digest:
            part.unlink()
            raise CheckpointError(
                f"{file.repo}/{file.name} arrived with the hash {digest} instead of {file.digest}",
                hint="what arrived is removed: try again",
            )
        part.replace(target)
    except OSError as error:
        raise OutputError(f"cannot write {part}: {error.strerror or error}", hint=hint_for(error)) from error
    finally:
        if part.is_file() and part.stat().st_size == 0:
            part.unlink()


def is_content(file: HubFile, path: Path, *, advance: Advance) -> bool:
    """Return whether a local file is `file` by its hash. Raises CheckpointError if it cannot be read."""
    hasher = _hasher(file)
    try:
        with path.open("rb") as content:
            while chunk := content.read(_CHUNK_BYTES):
                hasher.update(chunk)
                advance(len(chunk))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    return hasher.hexdigest() == file.digest


def _hasher(file: HubFile) -> "hashlib._Hash":
    if len(file.digest) == 64:
        return hashlib.sha256()
    return hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)


def _receive(file: HubFile, out: BinaryIO, advance: Advance, report: Callable[[str], None]) -> str:
    """Read the existing content of `out`, write the missing rest, and return the hash of the whole."""
    position, hasher = 0, _hasher(file)

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
    return hasher.hexdigest()


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
    """Turn errors of the Hub's client, and those that an unexpected answer causes, into one line."""
    try:
        yield
    except OfflineModeIsEnabled as error:
        raise OfflineProblem(f"{repo} is not requested: the machine is offline (HF_HUB_OFFLINE)") from error
    except GatedRepoError as error:
        reason = f"{repo} is only given to people who have accepted its terms"
        raise CheckpointError(reason, hint=_how_in(repo)) from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(f"{repo} is not at {_endpoint()}, or not public", hint=_how_in(repo)) from error
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
        raise ConnectionProblem(f"{repo}: the connection to {_endpoint()} broke ({cause})") from error
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{_endpoint()} does not answer as the Hub does", hint=_CHECK) from error


def _how_in(repo: str) -> str:
    page = f"accept its terms at {_endpoint()}/{repo}"
    if huggingface_hub.get_token():
        return f"{page} with the account of your token, which must be allowed to read such repositories"
    return f"{page}, then give a token of that account: hf auth login, or HF_TOKEN in the environment"
