"""A Hugging Face Hub on this machine, with the faults of real networks, for tests of downloading.

It answers what huggingface_hub asks: model information with or without sizes, and `resolve`, where large files are
redirected to another host.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import MappingProxyType, SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

import pytest
from huggingface_hub import constants, file_download, hf_api

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_allowed"
_LARGE = (".safetensors", ".bin", ".model")


@dataclass
class FakeRepo:
    """Files by name."""

    files: dict[str, bytes]
    licence: str | None = "apache-2.0"
    gated: bool = False


@dataclass
class FakeHub:
    """What the server has, how it misbehaves, and what it was asked."""

    endpoint: str = ""
    repos: dict[str, FakeRepo] = field(default_factory=dict)
    sent_instead: dict[str, bytes] = field(default_factory=dict)
    """File names to other content than the listing promises."""
    knows_ranges: bool = True
    speaks_html: bool = False
    listing: bytes | None = None
    """Sent in place of the information on a repository."""
    listing_headers: dict[str, str] = field(default_factory=dict)
    """Sent with the information on a repository."""
    changes: Callable[[dict[str, Any]], None] = lambda document: None
    """Done to the information on a repository before it is sent."""
    locations: dict[str, str] = field(default_factory=dict)
    """Names of large files to the addresses that they are redirected to."""
    requests: list[tuple[str, str]] = field(default_factory=list)
    """Methods and paths."""
    transfers: list[tuple[str, int]] = field(default_factory=list)
    """Names of the files whose content was sent, and from which byte."""

    def info(self, name: str, repo: FakeRepo, *, blobs: bool) -> dict[str, object]:
        siblings: list[dict[str, object]] = [{"rfilename": file} for file in repo.files]
        if blobs:
            for sibling, (file, content) in zip(siblings, repo.files.items(), strict=True):
                sibling |= {"size": len(content), "blobId": _git_hash(content), **_lfs(file, content)}
        card = {"license": repo.licence} if repo.licence else {}
        document: dict[str, Any] = {
            "id": name,
            "modelId": name,
            "sha": COMMIT,
            "private": False,
            "gated": "auto" if repo.gated else False,
            "tags": [],
            "cardData": card,
            "siblings": siblings,
        }
        self.changes(document)
        return document


def _lfs(name: str, content: bytes) -> dict[str, object]:
    if not name.endswith(_LARGE):
        return {}
    return {"lfs": {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}}


def _git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        url = urlsplit(self.path)
        path = unquote(url.path)
        self.hub.requests.append((self.command, path))
        if self.hub.speaks_html:
            self._send(200, b"<html>Please log in to this network</html>", {"Content-Type": "text/html"})
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+?)(?:/revision/[^/]+)?", path):
            self._give_info(found[1], blobs="blobs" in parse_qs(url.query))
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._resolve(found[1], found[3])
        elif found := re.fullmatch(r"/storage/([^/]+/[^/]+)/(.+)", path):
            self._give_file(found[2], self.hub.repos[found[1]].files[found[2]], {})
        else:
            self._refuse(404, "")

    def _give_info(self, name: str, *, blobs: bool) -> None:
        repo = self.hub.repos.get(name)
        if repo is None:
            self._refuse(401, "RepoNotFound")  # as the Hub answers to people that it does not know
        elif self.hub.listing is not None:
            headers = {"Content-Type": "application/json", **self.hub.listing_headers}
            self._send(200, self.hub.listing, headers)
        else:
            self._give_json(self.hub.info(name, repo, blobs=blobs), self.hub.listing_headers)

    def _resolve(self, name: str, file: str) -> None:
        repo = self.hub.repos.get(name)
        if repo is None:
            return self._refuse(401, "RepoNotFound")
        token = self.headers.get("Authorization")
        if repo.gated and token != f"Bearer {TOKEN}":
            return self._refuse(403 if token else 401, "GatedRepo")
        content = repo.files.get(file)
        if content is None:
            return self._refuse(404, "EntryNotFound")
        headers = {"X-Repo-Commit": COMMIT}
        if file.endswith(_LARGE):
            headers |= {
                "X-Linked-Etag": f'"{hashlib.sha256(content).hexdigest()}"',
                "X-Linked-Size": str(len(content)),
                # Another host to the client, though the same server.
                "Location": self.hub.endpoint.replace("127.0.0.1", "localhost") + quote(f"/storage/{name}/{file}"),
            }
            if file in self.hub.locations:
                headers["Location"] = self.hub.locations[file]
            return self._send(302, b"", headers)
        return self._give_file(file, content, {**headers, "ETag": f'"{_git_hash(content)}"'})

    def _give_file(self, name: str, content: bytes, headers: dict[str, str]) -> None:
        content = self.hub.sent_instead.get(name, content)
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(asked[1]) if asked and self.hub.knows_ranges else 0
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        if self.command == "GET":
            self.hub.transfers.append((name, start))
        return self._send(206 if start else 200, content[start:], headers)

    def _give_json(self, document: object, headers: Mapping[str, str] = MappingProxyType({})) -> None:
        self._send(200, json.dumps(document).encode(), {"Content-Type": "application/json", **headers})

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"", {"X-Error-Code": code, "X-Error-Message": "refused"} if code else {})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def connect(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the client of the Hub in this process ask this one, without a token."""
    template = f"{hub.endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nonexistent")
    monkeypatch.setattr(hf_api.api, "endpoint", hub.endpoint)
    monkeypatch.setenv("HF_TOKEN", "")
    # The client waits a second before it asks again.
    monkeypatch.setattr(file_download, "time", SimpleNamespace(sleep=lambda _: None))


@contextmanager
def serving() -> Iterator[FakeHub]:
    """Run a hub, empty at first, on a free port."""
    hub = FakeHub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        hub.endpoint = f"http://127.0.0.1:{server.server_port}"
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        yield hub
        server.shutdown()
        thread.join()
