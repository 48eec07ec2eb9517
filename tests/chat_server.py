"""A server on this machine that speaks OpenAI's interface, and may break it in every way."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

KEY = "not-to-be-shown"

Answer = str | int | bytes | Callable[[BaseHTTPRequestHandler], None]
"""What a model says, a status, a whole body, or what writes one."""


def said(text: object) -> bytes:
    """Return the body in which a model says this."""
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode()


def with_status(status: int, body: bytes = b"", **headers: str) -> Callable[[BaseHTTPRequestHandler], None]:
    """Return an answer with headers, whose names have `_` for `-`."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body)

    return answer


class ChatStub:
    """Gives its answers one after the other, and remembers what it was asked."""

    def __init__(self, *answers: Answer) -> None:
        self.asked: list[dict[str, Any]] = []
        """Bodies of the questions."""
        self.paths: list[str] = []
        self.keys: list[str | None] = []
        waiting, stub = list(answers), self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._note()
                self._give(json.dumps({"data": [{"id": "listed-model"}, {"id": "other"}]}).encode())

            def do_POST(self) -> None:
                self._note()
                stub.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self._give(waiting.pop(0))

            def _note(self) -> None:
                stub.paths.append(self.path)
                stub.keys.append(self.headers["Authorization"])

            def _give(self, answer: Answer) -> None:
                if isinstance(answer, str):
                    answer = said(answer)
                if isinstance(answer, int):
                    answer = with_status(answer)
                if isinstance(answer, bytes):
                    answer = with_status(200, answer)
                # The other side may have had enough.
                with suppress(BrokenPipeError, ConnectionResetError):
                    answer(self)

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.http.block_on_close = False
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self) -> None:
        """Stop serving."""
        self.http.shutdown()
        self.http.server_close()


@contextmanager
def serving(monkeypatch: pytest.MonkeyPatch, folder: Any) -> Iterator[Callable[..., ChatStub]]:
    """Yield what starts servers that the environment then names; the cache is in `folder`, and no one waits."""
    started: list[ChatStub] = []

    def start(*answers: Answer, model: str | None = "small") -> ChatStub:
        started.append(ChatStub(*answers))
        monkeypatch.setenv("OSORA_REFINE_URL", f"{started[-1].url}/")
        monkeypatch.setenv("OSORA_REFINE_KEY", KEY)
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        monkeypatch.delenv("OSORA_REFINE_MODEL", raising=False)
        if model is not None:
            monkeypatch.setenv("OSORA_REFINE_MODEL", model)
        return started[-1]

    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    yield start
    for stub in started:
        stub.close()
