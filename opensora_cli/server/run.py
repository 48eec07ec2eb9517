"""Run `osora serve`: choose the model, listen, guard each request, and answer until a signal ends the server.

A web page elsewhere must neither post jobs nor read results, also if a name of its own resolves to this machine (DNS
rebinding).
"""

import asyncio
import os
import socket
import subprocess
from collections.abc import Iterable
from contextlib import closing, suppress
from pathlib import Path
from urllib.parse import urlsplit

import uvicorn
from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from opensora_cli.core.exceptions import FileProblem, HardwareError, OutputError, RequestError
from opensora_cli.core.locks import sole_run
from opensora_cli.core.progress import Reporter
from opensora_cli.core.python_processes import module_command, safe_environment
from opensora_cli.core.reading import read_text
from opensora_cli.engine.generate.request import resolve
from opensora_cli.server.app import COOKIE, Server, is_token, make_app
from opensora_cli.server.jobs import JobStore
from opensora_cli.server.requests import ApiError
from opensora_cli.server.scheduler import Scheduler
from opensora_cli.server.uploads import LARGEST
from opensora_cli.settings.layers import Given, Layer
from opensora_cli.settings.load import ANY_PROMPT, generate_request
from opensora_cli.settings.tools import LOOPBACK, ServeSettings

PATIENCE_S = 30.0
"""Seconds that a client may pause in its request."""
_STOP_S = 3
_SHORTEST_TOKEN = 16
_OPEN_PATHS = ("/login", "/healthz", "/style.css")
"""Paths that need no token."""
_LARGEST_OPEN = 2**14
"""Most bytes of a request that needs no token."""
_CLOSE = {"Connection": "close"}
"""The rest of a refused body is not read."""
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; "
    "media-src 'self' blob:; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}


def serve(settings: ServeSettings, base: Layer, *, reporter: Reporter) -> None:
    """Answer requests until a signal ends the server.

    Raises:
        RequestError: settings of `base` are wrong, or name GPUs or machines that groups cannot use.
        HardwareError: this machine has GPUs, but fewer than the groups need.
        FileProblem: the token file is missing or too short, or the folder cannot be used.
    """
    token = None if settings.token_file is None else _read_token(Path(settings.token_file))
    folder = Path(settings.folder).absolute()
    usual = resolve(
        generate_request(
            {**base, "prompt": Given(ANY_PROMPT, "prompt"), "runtime.model_choice": Given(settings.model, "--model")}
        ),
        reporter=reporter,
    )
    parallel, groups = usual.parallel, settings.groups
    if parallel.nnodes > 1:
        raise RequestError(f"parallel.nnodes={parallel.nnodes}: a server has one machine", hint="run one on each")
    if groups > 1 and parallel.devices is not None:
        raise RequestError(f"parallel.devices names the GPUs of one group, and there are {groups}", hint="use --gpus N")
    if usual.runtime.device == "auto":
        _require_devices(groups, parallel.ranks_per_node)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise OutputError(f"--folder {folder} cannot be made: {error.strerror}") from error
    with (
        sole_run(folder / ".lock", problem=f"{folder} has a server already", hint="name another --folder"),
        closing(JobStore(folder / "jobs.sqlite", max_queue=settings.max_queue)) as store,
    ):
        scheduler = Scheduler(store, folder, groups=groups, save_every=settings.save_every)
        server = Server(store=store, scheduler=scheduler, folder=folder, usual=usual, base=base, token=token)
        # A page of another name that resolves to this machine does not know the token.
        hosts = LOOPBACK if token is None else ()
        guard = Guard(make_app(server), hosts=hosts, token=token, largest_body=LARGEST + 2**20)
        with _listening(settings.host, settings.port) as sock:
            host = f"[{settings.host}]" if ":" in settings.host else settings.host
            address = f"http://{host}:{settings.port}"
            reporter.note(f"osora serves {server.model} at {address} (page), {address}/v1 (API); Ctrl-C ends it")
            # A signal is how a server ends: uvicorn sends it again once the running job is saved.
            with suppress(KeyboardInterrupt):
                asyncio.run(_Uvicorn(guard, scheduler).serve(sockets=[sock]))


def _read_token(path: Path) -> str:
    token = read_text(path).strip()
    if len(token) < _SHORTEST_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise FileProblem(
            f"{path} must hold a token of at least {_SHORTEST_TOKEN} letters and digits",
            hint=f"make one: python -c 'import secrets; print(secrets.token_urlsafe())' > {path}",
        )
    return token


def _require_devices(groups: int, gpus: int) -> None:
    """Raise HardwareError if there are GPUs, but too few for the groups; torch counts them in a process of its own."""
    needed = groups * gpus
    if needed == 1:
        return
    command = [*module_command("opensora_cli.server.worker"), "devices"]
    counted = subprocess.run(command, env=safe_environment(os.environ), stdout=subprocess.PIPE, check=True)
    devices = int(counted.stdout)
    if devices == 0 and gpus > 1:
        raise HardwareError(f"--gpus {gpus}, and this machine has no GPU", hint="use --set runtime.device=cpu")
    if 0 < devices < needed:
        raise HardwareError(f"--groups {groups} --gpus {gpus} need {needed} GPUs, and this machine has {devices}")


def _listening(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise OutputError(
            f"--host {host} --port {port} cannot be used: {error.strerror}",
            hint="another program listens there: name another --port",
        ) from error


class _Connection(H11Protocol):
    """Connection that ends if its client sends no request."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self.loop.call_later(PATIENCE_S, lambda: self.cycle is None and transport.close())


class _Uvicorn(uvicorn.Server):
    """Server that saves the running jobs before it waits for connections, of which some may never end."""

    def __init__(self, app: ASGIApp, scheduler: Scheduler) -> None:
        config = uvicorn.Config(app, http=_Connection, lifespan="off", log_level="warning", access_log=False)
        config.server_header, config.timeout_graceful_shutdown = False, _STOP_S
        super().__init__(config)
        self._scheduler = scheduler

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._working = asyncio.create_task(self._scheduler.run())  # cancelled by `asyncio.run` in the end
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._scheduler.stop()
        await super().shutdown(sockets)


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


def _name_of(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


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
            raise ApiError(408, f"nothing came for {PATIENCE_S:g} s", code="timeout", headers=_CLOSE) from None
        left -= len(message.get("body", b""))
        is_whole = not message.get("more_body", False)
        if left < 0:
            raise _too_large(largest)
        return message

    return limited


def _too_large(largest: int) -> ApiError:
    return ApiError(413, f"a request may have {largest} bytes", headers=_CLOSE)
