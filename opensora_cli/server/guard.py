"""Guard of the server: checks host, origin, token and size of a request, and adds headers to answers.

A web page elsewhere must neither post jobs nor read results, also if a name of its own resolves to this machine (DNS
rebinding).
"""

import asyncio
import hmac
import json
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException

from opensora_cli.server.errors import error_body

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Asgi = Callable[[Message, Receive, Send], Awaitable[None]]

COOKIE = "osora_token"
PATIENCE_S = 30.0
"""Seconds that a client may pause in its request."""
_CLOSE = {"Connection": "close"}
"""The rest of a refused body is not read."""
_OPEN_PATHS = ("/login", "/healthz", "/style.css")
"""Paths that need no token."""
_LARGEST_OPEN = 2**14
"""Most bytes of a request that needs no token."""
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; "
    "media-src 'self' blob:; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}


class Guard:
    """ASGI application in front of another one.

    Args:
        app: the application.
        hosts: names under which the server may be addressed, without a port; empty allows all.
        token: secret that requests must bring, in the header `Authorization: Bearer` or the page's cookie.
        largest_body: most bytes of a request.
    """

    def __init__(self, app: Asgi, *, hosts: Iterable[str], token: str | None, largest_body: int) -> None:
        self._app, self._hosts, self._token, self._largest = app, frozenset(hosts), token, largest_body

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        refusal = self._refusal(scope["path"], headers)
        if refusal is not None:
            await _refuse(send, *refusal)
            return
        length = headers.get("content-length", "0")
        largest = min(self._largest, _LARGEST_OPEN) if scope["path"] in _OPEN_PATHS else self._largest
        if not length.isdecimal() or int(length) > largest:
            await _refuse(send, 413, _too_large(largest))
            return
        await self._app(scope, _limited(receive, largest), _with_headers(send))

    def _refusal(self, path: str, headers: dict[str, str]) -> tuple[int, str] | None:
        host = headers.get("host", "")
        if self._hosts and _name_of(f"//{host}") not in self._hosts:
            return 403, "this server is not addressed by that name"
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            return 403, "requests of other web pages are refused"
        if self._token is not None and path not in _OPEN_PATHS and not self._knows(headers):
            return 401, "a token is needed: Authorization: Bearer TOKEN"
        return None

    def _knows(self, headers: dict[str, str]) -> bool:
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer":
            try:
                cookie = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
            except CookieError:
                return False
            given = "" if cookie is None else cookie.value
        return is_token(given, self._token)


def _limited(receive: Receive, left: int) -> Receive:
    """Return `receive` for a body, which raises HTTPException if it has more than `left` bytes, or stops."""
    largest, is_whole = left, False

    async def limited() -> Message:
        nonlocal left, is_whole
        if is_whole:  # the end of the connection, which may take any time
            return await receive()
        try:
            message = await asyncio.wait_for(receive(), PATIENCE_S)
        except TimeoutError:
            raise HTTPException(408, f"nothing came for {PATIENCE_S:g} s", headers=_CLOSE) from None
        left -= len(message.get("body", b""))
        is_whole = not message.get("more_body", False)
        if left < 0:
            raise HTTPException(413, _too_large(largest), headers=_CLOSE)
        return message

    return limited


def _too_large(largest: int) -> str:
    return f"a request may have {largest} bytes"


def is_token(given: str, token: str | None) -> bool:
    """Return whether a text is the token, in a time that does not depend on where they differ."""
    return token is not None and hmac.compare_digest(given.encode(), token.encode())


def _name_of(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _with_headers(send: Send) -> Send:
    async def with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            more = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
            message = {**message, "headers": [*message.get("headers", []), *more]}
        await send(message)

    return with_headers


async def _refuse(send: Send, status: int, message: str) -> None:
    headers = [(b"content-type", b"application/json")]
    if status == 413:
        headers.append((b"connection", b"close"))
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await _with_headers(send)({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(error_body(status, message)).encode()})
