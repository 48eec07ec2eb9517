"""Run `osora serve`: lock the folder, choose the model, and answer until a signal ends the server."""

import asyncio
import os
import socket
import subprocess
from collections.abc import Awaitable, Callable
from contextlib import closing, suppress
from pathlib import Path

import uvicorn

from opensora_cli.core.exceptions import FileProblem, HardwareError, OutputError, RequestError
from opensora_cli.core.locks import sole_run
from opensora_cli.core.progress import Reporter
from opensora_cli.core.python_processes import module_command, safe_environment
from opensora_cli.core.reading import read_text
from opensora_cli.engine.generate.request import resolve
from opensora_cli.server.app import Server, make_app
from opensora_cli.server.guard import Guard
from opensora_cli.server.jobs import JobStore
from opensora_cli.server.scheduler import Scheduler
from opensora_cli.server.uploads import LARGEST
from opensora_cli.settings.layers import Given, Layer
from opensora_cli.settings.load import ANY_PROMPT, generate_request
from opensora_cli.settings.tools import LOOPBACK, ServeSettings

_SHORTEST_TOKEN = 16
_STOP_S = 3


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
        sock = _listen(settings)
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        address = f"http://{host}:{settings.port}"
        reporter.note(f"osora serves {server.model} at {address} (page), {address}/v1 (API); Ctrl-C ends it")
        config = uvicorn.Config(guard, http="h11", log_level="warning", access_log=False, server_header=False)
        config.timeout_graceful_shutdown = _STOP_S
        # A signal is how a server ends: uvicorn sends it again once the running job is saved.
        with suppress(KeyboardInterrupt):
            asyncio.run(_Uvicorn(config, server.scheduler.stop).serve(sockets=[sock]))


class _Uvicorn(uvicorn.Server):
    """Server that saves the running job before it waits for connections, of which some may never end."""

    def __init__(self, config: uvicorn.Config, stop: Callable[[], Awaitable[None]]) -> None:
        super().__init__(config)
        self._stop = stop

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._stop()
        await super().shutdown(sockets)


def _require_devices(groups: int, gpus: int) -> None:
    """Raise HardwareError if there are GPUs, but too few for the groups; torch counts them in a process of its own."""
    needed = groups * gpus
    if needed == 1:
        return
    command = [*module_command("opensora_cli.server.worker"), "devices"]
    counted = subprocess.run(command, env=safe_environment(os.environ), stdout=subprocess.PIPE, check=True)
    devices = int(counted.stdout)
    if 0 < devices < needed:
        each = f" of {gpus}" if gpus > 1 else ""
        raise HardwareError(f"--groups {groups}{each} needs {needed} GPUs, and this machine has {devices}")
    if devices == 0 and gpus > 1:
        raise HardwareError(f"--gpus {gpus}, and this machine has no GPU", hint="use --set runtime.device=cpu")


def _listen(settings: ServeSettings) -> socket.socket:
    try:
        family = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((settings.host, settings.port), family=family)
    except OSError as error:
        raise OutputError(
            f"--host {settings.host} --port {settings.port} cannot be used: {error.strerror}",
            hint="another program listens there: name another --port",
        ) from error


def _read_token(path: Path) -> str:
    token = read_text(path).strip()
    if len(token) < _SHORTEST_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise FileProblem(
            f"{path} must hold a token of at least {_SHORTEST_TOKEN} letters and digits",
            hint=f"make one: python -c 'import secrets; print(secrets.token_urlsafe())' > {path}",
        )
    return token
