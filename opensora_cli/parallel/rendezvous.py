"""Rendezvous of ranks through a store."""

import importlib
import os
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import FileStore, Store, TCPStore  # type: ignore[attr-defined]  # public, but not marked so

from opensora_cli.core.device import collective_backends
from opensora_cli.core.exceptions import HardwareError
from opensora_cli.core.formatting import first_few
from opensora_cli.core.ranks import RankContext
from opensora_cli.parallel.mesh import libraries_on_stderr

_LONGEST_PAUSE_S = 5.0
_RETRY_HINT = "see what became of the other ranks, and start the run again"
_HERE = "here"
_FIRST_NOTICE_S = 10.0
_SHORTEST_PAUSE_S = 0.01


def init_with_retry(
    device_type: str,
    context: RankContext,
    *,
    timeout_s: float = 600.0,
    connect_s: float = 10.0,
    first_pause_s: float = 1.0,
    report: Callable[[str], None] | None = None,
) -> None:
    """Join the other ranks and create the default group like `dist.init_process_group`, with retries.

    Without a file store, rank 0 opens the store once, unless torchrun has it. The others retry the connection, each
    time for `connect_s`, after pauses that double, up to five seconds. Later failures are not retried because keys from
    the first attempt would confuse the second. `device_type` chooses gloo or NCCL. `timeout_s` is the timeout of
    collectives and of the rendezvous. `report` gets a line about missing ranks after ten seconds, and again after
    twenty, forty and so on. None means no reports because a launcher watches the ranks.

    Raises:
        HardwareError: The store cannot be reached, or not all ranks arrived.
    """
    rank, world_size, limit = context.rank, context.world_size, timedelta(seconds=timeout_s)
    wait = _Wait(f"rank {rank} of {world_size}", timeout_s, report)
    store: Store
    if context.store is not None:
        # torch would wait minutes for the folder, and signals have no effect during that time.
        if not context.store.parent.is_dir():
            gone = f"rank {rank}: the folder of the ranks' store is gone: {context.store.parent}"
            raise HardwareError(gone, hint=_RETRY_HINT)
        # Without the number of ranks, torch does not remove the file. The launcher removes it.
        store = FileStore(str(context.store))
    elif rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        store = _opened_store(context, limit)
    else:
        store = _reached_store(context, wait, connect_s=connect_s, pause_s=first_pause_s)
    store.set_timeout(limit)
    try:
        with libraries_on_stderr():
            if report is not None:
                _wait_for_all(store, rank, world_size, wait)
            # Its functions store the current default group as a default argument. After a later import, they would keep
            # gloo's threads alive, and a thread that frees a tensor while Python ends aborts the process.
            importlib.import_module("torch.distributed.nn.functional")
            dist.init_process_group(
                collective_backends(device_type), store=store, rank=rank, world_size=world_size, timeout=limit
            )
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise HardwareError(f"{wait.who}: the ranks did not meet: {reason}", hint=_RETRY_HINT) from error


class _Wait:
    """Time of a wait, and reports of its reason: the first after ten seconds, each next one after twice the time."""

    def __init__(self, who: str, timeout_s: float, report: Callable[[str], None] | None) -> None:
        self.who, self.timeout_s, self._report = who, timeout_s, report
        self._start, self._next_s = time.monotonic(), _FIRST_NOTICE_S

    @property
    def passed_s(self) -> float:
        """Seconds since the wait began."""
        return time.monotonic() - self._start

    def give(self, text: str) -> None:
        """Report the reason for the wait if a report is due."""
        if self._report is not None and self.passed_s >= self._next_s:
            self._next_s *= 2
            self._report(f"{self.who}: {text} ({self.passed_s:.0f} s of {self.timeout_s:.0f} s)")


def _opened_store(context: RankContext, limit: timedelta) -> TCPStore:
    """Open the store of rank 0, on all interfaces of this machine."""
    host, port = context.master_addr, context.master_port
    try:
        socket.getaddrinfo(host, port)
    except OSError as error:
        raise HardwareError(
            f"MASTER_ADDR={host} is not a host that is known here", hint="set it to the address of this machine"
        ) from error
    try:
        # It connects to itself without reacting to signals: `host` may be an address that leads elsewhere.
        return TCPStore("localhost", port, is_master=True, timeout=limit, wait_for_workers=False)
    except dist.DistError as error:
        reason = " ".join(str(error).split())[:200]
        raise HardwareError(
            f"rank 0: cannot listen at port {port}: {reason}", hint="set MASTER_PORT to a free port, on all ranks"
        ) from error


def _reached_store(context: RankContext, wait: _Wait, *, connect_s: float, pause_s: float) -> TCPStore:
    host, port = context.master_addr, context.master_port
    while True:
        limit_s = max(_SHORTEST_PAUSE_S, min(connect_s, wait.timeout_s - wait.passed_s))
        try:
            # TCPStore prints the stack of its errors, and signals have no effect while it connects.
            socket.create_connection((host, port), timeout=limit_s).close()
            return TCPStore(host, port, timeout=timedelta(seconds=limit_s), wait_for_workers=False)
        except (OSError, dist.DistError) as error:
            if wait.passed_s + pause_s > wait.timeout_s:
                raise HardwareError(
                    f"rank {context.rank}: no answer from {host}:{port} within {wait.passed_s:.0f} s",
                    hint="check that the first machine runs, its address and port, and the firewall between",
                ) from error
        wait.give(f"waiting for an answer from {host}:{port}, where rank 0 or its launcher listens")
        time.sleep(pause_s)
        pause_s = min(_LONGEST_PAUSE_S, 2.0 * pause_s)


def _wait_for_all(store: Store, rank: int, world_size: int, wait: _Wait) -> None:
    """Wait until all ranks are present. Raises HardwareError, which names the missing ranks, after the timeout, and
    RuntimeError if the store is lost.
    """
    keys = [f"{_HERE}/{each}" for each in range(world_size)]
    store.set(keys[rank], "")
    missing = list(range(world_size))
    pause_s = _SHORTEST_PAUSE_S
    # `store.wait` would print a warning after its timeout, and signals have no effect during it.
    while missing := [each for each in missing if not store.check([keys[each]])]:
        if wait.passed_s >= wait.timeout_s:
            # Later ranks must not count this rank as present.
            store.delete_key(keys[rank])
            raise HardwareError(
                f"{wait.who}: {_named(missing)} did not come within {wait.timeout_s:.0f} s", hint=_RETRY_HINT
            )
        if rank == min({*range(world_size)} - {*missing}):  # one rank reports for all present ones
            wait.give(f"waiting for {_named(missing)}, here are {world_size - len(missing)}")
        time.sleep(pause_s)
        pause_s = min(1.0, 2 * pause_s)


def _named(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {first_few([str(rank) for rank in ranks])}"
