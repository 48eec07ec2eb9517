"""Door of the server: host and origin of a request, its token, its size, and the headers of answers.

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
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; "
    "media-src 'self' blob:; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}
_CODES = {401: "invalid_token", 403: "forbidden", 413: "too_large"}
_TYPES = {401: "authentication_error", 403: "permission_error", 413: "invalid_request_error"}


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
        self._too_large = f"a request may have {largest_body} bytes"

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
        if not length.isdigit() or int(length) > self._largest:
            await _refuse(send, 413, self._too_large)
            return
        await self._app(scope, self._limited(receive), _with_headers(send))

    def _refusal(self, path: str, headers: dict[str, str]) -> tuple[int, str] | None:
        host = headers.get("host", "")
        if self._hosts and _name_of(f"//{host}") not in self._hosts:
            return 403, "this server is not addressed by that name"
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != host:
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

    def _limited(self, receive: Receive) -> Receive:
        """Return `receive` for a body of unknown length, which raises HTTPException if it is too long or stops."""
        left, is_whole = self._largest, False

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
                raise HTTPException(413, self._too_large, headers=_CLOSE)
            return message

        return limited


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
    error = {"error": {"code": _CODES[status], "message": message, "param": None, "type": _TYPES[status]}}
    headers = [(b"content-type", b"application/json")]
    if status == 413:
        headers.append((b"connection", b"close"))
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await _with_headers(send)({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(error).encode()})
