"""Guard of the server: checks host, origin, token and size of a request, and adds headers to answers.

A web page elsewhere must neither post jobs nor read results, also if a name of its own resolves to this machine (DNS
rebinding).
"""

import asyncio
import hmac
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from opensora_cli.server.errors import error_body

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

    def __init__(self, app: ASGIApp, *, hosts: Iterable[str], token: str | None, largest_body: int) -> None:
        self._app, self._hosts, self._token, self._largest = app, frozenset(hosts), token, largest_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request, send, is_open = HTTPConnection(scope), _with_headers(send), scope["path"] in _OPEN_PATHS
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        length = request.headers.get("content-length", "0")
        largest = min(self._largest, _LARGEST_OPEN) if is_open else self._largest
        status, headers = 403, None
        if self._hosts and _name_of(f"//{host}") not in self._hosts:
            message = "this server is not addressed by that name"
        elif origin is not None and origin.partition("://")[2] != host:
            message = "requests of other web pages are refused"
        elif self._token is not None and not is_open and not is_token(_token_of(request), self._token):
            status, headers = 401, {"WWW-Authenticate": "Bearer"}
            message = "a token is needed: Authorization: Bearer TOKEN"
        elif not length.isdecimal() or int(length) > largest:
            status, message, headers = 413, _too_large(largest), _CLOSE
        else:
            await self._app(scope, _limited(receive, largest), send)
            return
        await JSONResponse(error_body(status, message), status, headers=headers)(scope, receive, send)


def _token_of(request: HTTPConnection) -> str:
    kind, _, given = request.headers.get("authorization", "").partition(" ")
    return given if kind.lower() == "bearer" else request.cookies.get(COOKIE, "")


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
            message.setdefault("headers", [])
            MutableHeaders(scope=message).update(_HEADERS)
        await send(message)

    return with_headers
