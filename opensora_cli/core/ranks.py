"""Rank of this process, from the environment of torchrun, Slurm or osora's launcher, and its link to the launcher.

The link is one end of a socket pair, so that the kernel tells each side when the other has ended. A thread sends a
heartbeat every second, also while the main thread hangs in a collective. Waiting for a peer is no error: only the
launcher, which sees all ranks, can distinguish a hung rank from the ranks that wait for it. Ranks of torchrun and Slurm
have no link: collectives have a timeout.
"""

import faulthandler
import json
import os
import re
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Literal

from opensora_cli.core.exceptions import HardwareError, OsoraError, RequestError
from opensora_cli.core.files import writing
from opensora_cli.core.formatting import plain
from opensora_cli.core.locks import open_regular
from opensora_cli.core.signals import end_with_parent, held_back

LOG_VARIABLE = "OSORA_RANK_LOG"
"""Variable that osora's launcher sets to the log file of a rank."""
STORE_VARIABLE = "OSORA_RANK_STORE"
"""Variable that osora's launcher sets to the file store of its ranks."""

# Below the ephemeral ports of Linux, which begin at 32768.
_FIRST_PORT, _PORTS = 12_000, 20_000
CHANNEL_VARIABLE = "OSORA_RANK_CHANNEL"
"""Variable that the launcher sets to the file descriptor of the rank's end of the link."""
TRACEBACK_SIGNAL = getattr(signal, "SIGQUIT", None)
"""Signal at which a rank writes its traceback to its log."""
INTERRUPTED = 130
FIRST_STAGE = "start"
"""Stage of a rank before its first `beat`."""

_BEAT_S = 1.0
_SEND_S = 5.0
_WAITING = ("torch.distributed", "opensora_cli.parallel")
"""Modules with functions that wait for other ranks."""


# Environment.


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """Rank of a process, and the address of the store of its group."""

    rank: int
    """Rank from 0 to world_size - 1."""
    local_rank: int
    """Rank among the processes on this machine, which selects the GPU."""
    world_size: int
    nnodes: int
    """Number of machines."""
    master_addr: str = ""
    """Host of the store through which the ranks find each other; empty if they have a `store` file."""
    master_port: int = 0
    store: Path | None = None
    """File store instead of a host. None means that osora's launcher did not start this rank."""
    log: Path | None = None
    """Log file of this rank. None means that osora's launcher did not start it."""

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that prints and writes results."""
        return self.rank == 0


def find_context(environment: Mapping[str, str]) -> RankContext | None:
    """Return the rank of this process, or None if it runs alone.

    Variables of torchrun, which osora's launcher sets, too, have priority over those of Slurm: ranks that torchrun
    started in a Slurm job have both. Only processes that `srun` started are ranks of Slurm; the script of a batch job
    has most of the variables, but is no rank.

    Raises:
        RequestError: Variables are missing, no numbers, or contradict each other. The message names them.
    """
    is_slurm_step = "SLURM_PROCID" in environment and {"SLURM_STEP_ID", "SLURM_STEPID"} & environment.keys()
    # Scripts for srun often export WORLD_SIZE and the master's address, but can't know a rank.
    if {"RANK", "LOCAL_RANK"} & environment.keys() or ("WORLD_SIZE" in environment and not is_slurm_step):
        return _of_torchrun(environment)
    return _of_slurm(environment) if is_slurm_step else None


def is_of_launcher(path: Path, environment: Mapping[str, str]) -> bool:
    """Return whether osora's launcher wrote a file for this rank, that is, beside the log of the rank."""
    log = environment.get(LOG_VARIABLE)
    return log is not None and Path(log).absolute().parent == path.absolute().parent


def first_host(nodelist: str) -> str:
    """Return the first host of a Slurm host list: `node01` for `node[01-04,7],login`.
    Raises RequestError if the text is not such a list.
    """
    match = re.fullmatch(r"((?:[^,\[\]\s]|\[[\d,-]+\])+)(?:,.*)?", nodelist)
    first = re.sub(r"\[(\d+)[\d,-]*\]", r"\1", match[1]) if match else ""
    if not first or "[" in first:
        raise RequestError(f"SLURM_NODELIST={nodelist!r} is no list of hosts such as node[01-04,7]")
    return first


def _of_torchrun(environment: Mapping[str, str]) -> RankContext:
    store, log = (Path(text) if (text := environment.get(name)) else None for name in (STORE_VARIABLE, LOG_VARIABLE))
    counts, meeting = ("RANK", "LOCAL_RANK", "WORLD_SIZE"), () if store else ("MASTER_ADDR", "MASTER_PORT")
    _require(environment, (*counts, *meeting), "torchrun", "start with torchrun or --gpus; to run alone: unset")
    context = _counted(environment, *counts, "GROUP_WORLD_SIZE")
    if store:
        return replace(context, store=store, log=log)
    return replace(context, master_addr=environment["MASTER_ADDR"], master_port=_port(environment), log=log)


def _of_slurm(environment: Mapping[str, str]) -> RankContext | None:
    # A step may be smaller than its job.
    tasks = _first_set(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    nodes = _first_set(environment, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    hosts = _first_set(environment, "SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
    counts = ("SLURM_PROCID", "SLURM_LOCALID", tasks, nodes)
    _require(environment, (*counts, hosts, "SLURM_JOB_ID"), "srun", "start with srun; to run alone: unset")
    context = _counted(environment, *counts)
    if context.world_size == 1:
        return None
    port = _FIRST_PORT + _number(environment, "SLURM_JOB_ID") % _PORTS
    return replace(
        context,
        master_addr=environment.get("MASTER_ADDR") or first_host(environment[hosts]),
        master_port=_port(environment) if environment.get("MASTER_PORT") else port,
    )


def _first_set(environment: Mapping[str, str], *names: str) -> str:
    """Return the first name that is set, or the best-known name for a message."""
    return next((name for name in names if name in environment), names[1])


def _require(environment: Mapping[str, str], names: Sequence[str], starter: str, hint: str) -> None:
    missing = [name for name in names if not environment.get(name)]
    if missing:
        there, verb = next(name for name in names if name in environment), "is" if len(missing) == 1 else "are"
        raise RequestError(
            f"{there} is set, but {' and '.join(missing)} {verb} not: {starter} sets all of them",
            hint=f"{hint} {there}",
        )


def _counted(environment: Mapping[str, str], rank: str, local: str, size: str, nodes: str) -> RankContext:
    """Return a rank without a store. Raises RequestError if the variables contradict each other."""
    world_size, nnodes = _number(environment, size), _number(environment, nodes) if nodes in environment else 1
    for name in (rank, local):
        if _number(environment, name) >= world_size:
            raise RequestError(f"{name}={environment[name]} contradicts {size}={world_size}: ranks are 0 to {size} - 1")
    if nnodes == 0 or world_size % nnodes:
        raise RequestError(
            f"machines have different numbers of ranks: {world_size} on {nnodes}",
            hint="start equally many on every machine",
        )
    numbers = _number(environment, rank), _number(environment, local)
    return RankContext(rank=numbers[0], local_rank=numbers[1], world_size=world_size, nnodes=nnodes)


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment[name]
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise RequestError(f"{name}={text!r} must be a whole number from 0 on")
    return int(text)


def _port(environment: Mapping[str, str]) -> int:
    number = _number(environment, "MASTER_PORT")
    if not 0 < number < 2**16:
        raise RequestError(f"MASTER_PORT={number} must be 1 to 65535")
    return number


# Link to the launcher.


Kind = Literal["error", "bug", "lost", "interrupted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """Reason for the end of a rank. `exit_code` is that of the whole run, and `message` has one problem per line.

    The kinds are `error` (a user can fix it), `lost` (another rank has ended, which is seldom the cause),
    `interrupted` (the rank was asked to end) and `bug` (anything else).
    """

    kind: Kind
    message: str
    hint: str | None
    exit_code: int


@dataclass(slots=True, kw_only=True)
class Heartbeat:
    """State of a rank, sent every second."""

    stage: str = FIRST_STAGE
    moves: int = 0
    """Number of progress reports; ranks with the same work have similar numbers."""
    step_s: float | None = None
    """Seconds of the longest step of the stage. None while unknown, and outside of steps."""
    waits: bool = False
    """Whether the main thread appears to wait for other ranks, as in a collective."""


class _Link:
    """Rank's end of the link. Without a launcher it only knows the stage."""

    def __init__(self, channel: socket.socket | None = None, log: IO[bytes] | None = None) -> None:
        self.channel, self.log, self.state = channel, log, Heartbeat()
        self._sending = threading.Lock()

    def send(self, message: object) -> None:
        if self.channel is not None:
            with held_back(), self._sending, suppress(OSError):  # a partial line would break the next one
                self.channel.sendall(json.dumps(message).encode() + b"\n")

    def send_state(self) -> None:
        self.state.waits = _main_thread_waits()
        self.send({"beat": asdict(self.state)})


_link: _Link | None = None


@contextmanager
def linked(context: RankContext) -> Iterator[None]:
    """Keep the link open inside the block. A rank that osora's launcher started ends at once when that has ended.

    Raises OutputError if the log cannot be written.
    """
    global _link
    number = os.environ.pop(CHANNEL_VARIABLE, None)  # child processes must not inherit it
    try:
        if number is None or context.log is None:
            _link = _Link()
            yield
        else:
            # The log stays open: faulthandler may need it until the process is gone.
            with writing(context.log):
                log = open(context.log, "ab", buffering=0, opener=open_regular)  # noqa: SIM115
            channel = socket.socket(fileno=int(number))
            _link = _Link(channel, log)
            with _heartbeats(_link, channel, log):
                yield
    finally:
        _link = None


@contextmanager
def _heartbeats(link: _Link, channel: socket.socket, log: IO[bytes]) -> Iterator[None]:
    """Send heartbeats inside the block, and write tracebacks of crashes to the log."""
    faulthandler.enable(log)
    if TRACEBACK_SIGNAL is not None:
        faulthandler.register(TRACEBACK_SIGNAL, log)
    channel.set_inheritable(False)
    channel.settimeout(_SEND_S)
    # The end of the launcher, also by SIGKILL, ends a rank even if it is stopped or hangs.
    end_with_parent()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # Scripts ignore SIGINT in background commands. A rank gets it only from the launcher.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    has_ended = threading.Event()

    def beat_until_end() -> None:
        while not has_ended.is_set():
            link.send_state()
            if select.select([channel], [], [], _BEAT_S)[0] and not has_ended.is_set():
                os.kill(os.getpid(), signal.SIGKILL)  # a rank never receives data: the launcher has ended

    thread = threading.Thread(target=beat_until_end, name="rank-link", daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        _ignore_interrupts()
        channel.shutdown(socket.SHUT_RDWR)  # wakes the thread
        thread.join()


def beat(stage: str, step_s: float | None = None) -> None:
    """Report that the main thread makes progress; without effect in a process that is no rank.

    `stage` is the name of the present stage, and `step_s` the seconds of its longest step, see `Heartbeat`.
    """
    if _link is not None:
        is_new = stage != _link.state.stage
        _link.state.stage, _link.state.step_s = stage, step_s
        _link.state.moves += 1
        if is_new:
            _link.send_state()


def move() -> None:
    """Report that a part of a step is done; without effect in a process that is no rank."""
    if _link is not None:
        _link.state.moves += 1


def current_stage() -> str | None:
    """Return the stage of this rank; None in a process that is no rank."""
    return None if _link is None else _link.state.stage


def report_left(lines: Callable[[], Sequence[str]]) -> bool:
    """Tell the launcher how to continue if this rank is killed; return False, without `lines`, if there is none."""
    if _link is None or _link.channel is None:
        return False
    _link.send({"left": "\n".join(lines())})
    return True


def report_failure(message: str, *, hint: str | None = None, exit_code: int) -> bool:
    """Report an error that a user can fix to the launcher; return False if there is none: the caller must print it."""
    return _report("interrupted" if exit_code == INTERRUPTED else "error", message, hint, exit_code)


def report_bug(error: BaseException) -> bool:
    """Report an unexpected error, and write its traceback to the rank's log. Returns the same as `report_failure`."""
    if _link is not None and _link.log is not None:
        with suppress(OSError):
            _link.log.write("".join(traceback.format_exception(error)).encode("utf-8", "backslashreplace"))
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    message = f"{type(error).__name__}: {plain(line)}".removesuffix(": ")
    if is_loss(error):
        return _report("lost", message, None, HardwareError.exit_code)
    return _report("bug", message, None, OsoraError.exit_code)


def _report(kind: Kind, message: str, hint: str | None, exit_code: int) -> bool:
    if _link is None or _link.channel is None:
        return False
    _ignore_interrupts()
    _link.send({"report": asdict(RankReport(kind=kind, message=message, hint=hint, exit_code=exit_code))})
    return True


def is_loss(error: BaseException) -> bool:
    """Return whether a collective failed because peers have ended. It compares names to avoid importing torch."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return "DistError" in names or ("RuntimeError" in names and "gloo/" in str(error))


def _ignore_interrupts() -> None:
    """Ignore SIGINT from now on: an exiting rank would print a traceback beside the launcher's message."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _main_thread_waits() -> bool:
    main = threading.main_thread().ident
    frame = None if main is None else sys._current_frames().get(main)
    module = "" if frame is None else str(frame.f_globals.get("__name__", ""))
    return any(module == waiting or module.startswith(f"{waiting}.") for waiting in _WAITING)
