"""Refusals of the server: errors in the shape of OpenAI's, and the guard that checks each request.

A web page elsewhere must neither post jobs nor read results, also if a name of its own resolves to this machine (DNS
rebinding).
"""

import asyncio
import errno
import hmac
import logging
import sqlite3
from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from opensora_cli.core.exceptions import MediaError, OsoraError
from opensora_cli.server.jobs import QueueFull
from opensora_cli.server.requests import InvalidField
from opensora_cli.server.uploads import without_paths

COOKIE = "osora_token"
PATIENCE_S = 30.0
"""Seconds that a client may pause in its request."""
_CODES = {
    401: "invalid_token",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    408: "timeout",
    413: "too_large",
    507: "disk_full",
}
_TYPES = {401: "authentication_error", 403: "permission_error"}
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


class ApiError(Exception):
    """An answer with an error; its code is that of the status unless it has its own."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers
        code = code or _CODES.get(status, "invalid_request")
        kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.body = {"error": {"code": code, "message": message, "param": param, "type": kind}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, headers=self.headers)


def add_errors(app: FastAPI) -> None:
    async def answer(_: Request, error: Exception) -> Response:
        return _api_error(error).response()

    kinds = (ApiError, HTTPException, RequestValidationError, ClientDisconnect, OsoraError)
    for kind in (*kinds, OSError, sqlite3.OperationalError, Exception):
        app.add_exception_handler(kind, answer)


def _api_error(error: Exception) -> ApiError:
    match error:
        case ApiError():
            return error
        case HTTPException():
            return ApiError(error.status_code, str(error.detail), headers=error.headers)
        case RequestValidationError():
            first = error.errors()[0]
            return ApiError(400, first["msg"], code="invalid_value", param=str(first["loc"][-1]))
        case ClientDisconnect():  # nobody reads the answer
            return ApiError(400, "the client left")
        case OsoraError():
            message = without_paths(error.message if error.hint is None else f"{error.message}: {error.hint}")
            code = "".join(f"_{each.lower()}" if each.isupper() else each for each in type(error).__name__).strip("_")
            if isinstance(error, QueueFull):
                return ApiError(429, message, code=code, headers={"Retry-After": "30"})
            status = 400 if error.exit_code == 2 or isinstance(error, MediaError) else 500
            return ApiError(status, message, code=code, param=error.field if isinstance(error, InvalidField) else None)
        case OSError():
            is_full, reason = error.errno in (errno.ENOSPC, errno.EDQUOT), error.strerror or type(error).__name__
        case sqlite3.OperationalError():
            is_full, reason = error.sqlite_errorcode == sqlite3.SQLITE_FULL, str(error)
        case _:
            # The framework raises the error again, and uvicorn logs its traceback.
            return ApiError(500, "the server has a bug, and its log has the details", code="internal_error")
    if is_full:
        return ApiError(507, "the disk of the server is full")
    logging.getLogger("uvicorn.error").error("a file cannot be used", exc_info=error)
    return ApiError(500, f"the server cannot use one of its files: {reason}", code="file_error")


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
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(raw=message.setdefault("headers", [])).update(_HEADERS)
            await send(message)

        is_open = scope["path"] in _OPEN_PATHS
        largest = min(self._largest, _LARGEST_OPEN) if is_open else self._largest
        try:
            self._check(HTTPConnection(scope), largest, is_open=is_open)
        except ApiError as error:
            await error.response()(scope, receive, with_headers)
        else:
            await self._app(scope, _limited(receive, largest), with_headers)

    def _check(self, request: HTTPConnection, largest: int, *, is_open: bool) -> None:
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        if self._hosts and _name_of(f"//{host}") not in self._hosts:
            raise ApiError(403, "this server is not addressed by that name")
        if origin is not None and origin.partition("://")[2] != host:
            raise ApiError(403, "requests of other web pages are refused")
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        given = given if kind.lower() == "bearer" else request.cookies.get(COOKIE, "")
        if self._token is not None and not is_open and not is_token(given, self._token):
            message = "a token is needed: Authorization: Bearer TOKEN"
            raise ApiError(401, message, headers={"WWW-Authenticate": "Bearer"})
        length = request.headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > largest:
            raise _too_large(largest)


def _limited(receive: Receive, largest: int) -> Receive:
    """Return `receive` for a body, which raises ApiError if it has more than `largest` bytes, or stops."""
    left, is_whole = largest, False

    async def limited() -> Message:
        nonlocal left, is_whole
        if is_whole:  # the end of the connection, which may take any time
            return await receive()
        try:
            message = await asyncio.wait_for(receive(), PATIENCE_S)
        except TimeoutError:
            raise ApiError(408, f"nothing came for {PATIENCE_S:g} s", headers=_CLOSE) from None
        left -= len(message.get("body", b""))
        is_whole = not message.get("more_body", False)
        if left < 0:
            raise _too_large(largest)
        return message

    return limited


def _too_large(largest: int) -> ApiError:
    return ApiError(413, f"a request may have {largest} bytes", headers=_CLOSE)


def is_token(given: str, token: str | None) -> bool:
    """Return whether a text is the token, in a time that does not depend on where they differ."""
    return token is not None and hmac.compare_digest(given.encode(), token.encode())


def _name_of(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""
