"""Errors of the API, in the shape of OpenAI's: code, message, parameter and type."""

import errno
import logging
import sqlite3
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from opensora_cli.core.exceptions import MediaError, OsoraError
from opensora_cli.server.jobs import QueueFull
from opensora_cli.server.processes import without_paths
from opensora_cli.server.requests import InvalidField

_RETRY_AFTER_S = 30
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


class ApiError(Exception):
    """An answer with an error."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.body = status, error_body(status, message, code=code, param=param)


def error_body(status: int, message: str, *, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """Return the document of an error; its code is that of the status unless it has its own."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    error = {"code": code or _CODES.get(status, "invalid_request"), "message": message, "param": param, "type": kind}
    return {"error": error}


def add_errors(app: FastAPI) -> None:
    """Answer exceptions with the errors of the API."""

    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> JSONResponse:
        return JSONResponse(error.body, error.status)

    @app.exception_handler(OsoraError)
    async def osora_error(_: Request, error: OsoraError) -> JSONResponse:
        status = 400 if error.exit_code == 2 or isinstance(error, MediaError) else 500
        headers = None
        if isinstance(error, QueueFull):
            status, headers = 429, {"Retry-After": str(_RETRY_AFTER_S)}
        code = "".join(f"_{each.lower()}" if each.isupper() else each for each in type(error).__name__).strip("_")
        message = error.message if error.hint is None else f"{error.message}: {error.hint}"
        param = error.field if isinstance(error, InvalidField) else None
        return JSONResponse(error_body(status, without_paths(message), code=code, param=param), status, headers=headers)

    @app.exception_handler(Exception)
    async def internal_error(_: Request, error: Exception) -> JSONResponse:
        # The framework raises the error again, and uvicorn logs its traceback.
        message = "the server has a bug, and its log has the details"
        return JSONResponse(error_body(500, message, code="internal_error"), 500)

    @app.exception_handler(OSError)
    @app.exception_handler(sqlite3.OperationalError)
    async def disk_error(_: Request, error: OSError | sqlite3.OperationalError) -> JSONResponse:
        if isinstance(error, OSError):
            is_full, reason = error.errno in (errno.ENOSPC, errno.EDQUOT), error.strerror or type(error).__name__
        else:
            is_full, reason = error.sqlite_errorcode == sqlite3.SQLITE_FULL, str(error)
        if is_full:
            return JSONResponse(error_body(507, "the disk of the server is full"), 507)
        logging.getLogger("uvicorn.error").error("a file cannot be used", exc_info=error)
        body = error_body(500, f"the server cannot use one of its files: {reason}", code="file_error")
        return JSONResponse(body, 500)

    @app.exception_handler(ClientDisconnect)
    async def client_left(_: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=400)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        return JSONResponse(error_body(400, first["msg"], code="invalid_value", param=str(first["loc"][-1])), 400)

    @app.exception_handler(HTTPException)
    async def http_error(_: Request, error: HTTPException) -> JSONResponse:
        body = error_body(error.status_code, str(error.detail))
        return JSONResponse(body, error.status_code, headers=error.headers)
