"""Watchful collectives: ranks that agree on what they are about to do, and errors that say who did not."""

import json
import os
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not marked so

from opensora_cli.core.exceptions import HardwareError
from opensora_cli.parallel.meeting import AbsentRanks, Meeting, group_with
from opensora_cli.parallel.mesh import backend_of

_PATIENCE_S = 1800.0
_LONGEST_PAUSE_S = 30.0
_POLL_S = 0.001
_AFRESH = "rebuild the group on all ranks together (rebuilt_group), or end the run"
_AGAIN = "see what became of the other ranks, and start the run again"


class Watched:
    """Runs collectives of a group, and before each lets the ranks tell one another what they bring.

    The checks go by the store and cost some of its round trips for each collective, so they are for finding out what
    is wrong. What they find they raise on all ranks, before anything is sent: the group can still be used. Without any
    of them a collective runs as it is. All ranks must watch a group in the same way.

    Args:
        group: the ranks.
        check_shapes: they must agree on shape and dtype.
        check_finite: their tensors must be finite.
        timeout_s: all must come within these seconds, and on a GPU the collective must end in as many. On a CPU the
            collective itself has the limit of its group. None: no limit but half an hour for the checks.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        check_shapes: bool = False,
        check_finite: bool = False,
        timeout_s: float | None = None,
    ) -> None:
        self._group = group
        self._check_shapes, self._check_finite, self._timeout_s = check_shapes, check_finite, timeout_s
        on = check_shapes or check_finite or timeout_s is not None
        self._meeting = Meeting(group, "watched") if on else None
        self._broken = False

    def __call__(
        self, collective: Callable[[Tensor], Tensor], tensor: Tensor, *, name: str, uneven_dim: int | None = None
    ) -> Tensor:
        """Return `collective(tensor)`.

        Args:
            collective: uses the group.
            tensor: what this rank brings.
            name: of the collective and the tensor, for messages: `all_gather of keys`; the same on all ranks.
            uneven_dim: along it the shapes may differ.

        Raises:
            HardwareError: a rank did not come, brings another shape or dtype, calls another collective, or brings what
                is not finite; or the collective failed, after which the group cannot be used.
        """
        if self._broken:
            raise HardwareError(f"{name}: an earlier collective of this group failed", hint=_AFRESH)
        called = f"{name}, {_told(tensor)}"
        if self._meeting is not None:
            self._agree(self._meeting, called, name, tensor, uneven_dim)
        start = time.monotonic()
        try:
            out = collective(tensor)
            if tensor.is_cuda and self._timeout_s is not None:
                _await_device(self._timeout_s)
        except RuntimeError as error:
            self._broken = True
            seconds = time.monotonic() - start
            reason = str(error).partition("\n")[0]
            raise HardwareError(
                f"{called}: failed on rank {self._group.rank()} after {seconds:.1f} s: {reason}", hint=_AFRESH
            ) from error
        return out

    def _agree(self, meeting: Meeting, called: str, name: str, tensor: Tensor, uneven_dim: int | None) -> None:
        shape = list(tensor.shape)
        if uneven_dim is not None:
            shape[uneven_dim] = -1
        finite = not self._check_finite or _is_finite(tensor)
        limit = _PATIENCE_S if self._timeout_s is None else self._timeout_s
        note = {"name": name, "told": _told(tensor), "kind": [shape, str(tensor.dtype)], "finite": finite}
        try:
            notes = [json.loads(got) for got in meeting.exchange(json.dumps(note), timeout_s=limit)]
        except AbsentRanks as absent:
            raise HardwareError(
                f"{called}: {_ranks(absent.ranks)} did not come to rank {self._group.rank()} within {limit:g} s",
                hint="look at what that rank did last: nothing was sent, and the group can still be used",
            ) from None
        if any(got["name"] != name for got in notes):
            told = ", ".join(f"rank {rank}: {got['name']}" for rank, got in enumerate(notes))
            raise HardwareError(f"ranks call different collectives: {told}")
        if self._check_shapes and any(got["kind"] != notes[0]["kind"] for got in notes):
            told = ", ".join(f"rank {rank}: {got['told']}" for rank, got in enumerate(notes))
            raise HardwareError(f"{name}: ranks bring different tensors: {told}")
        not_finite = [rank for rank, got in enumerate(notes) if not got["finite"]]
        if not_finite:
            raise HardwareError(f"{called}: not finite on {_ranks(not_finite)}")


def rebuilt_group(group: dist.ProcessGroup, *, timeout_s: float) -> dist.ProcessGroup:
    """Return a fresh group of the ranks of one that failed; all ranks of the run call it together, each for its own.

    With gloo a pair of ranks stays closed after a time-out, and NCCL ends the process, so a group that failed is never
    used again. The new one has a name of its own in the store, so that nothing of the old one is taken for new.

    Args:
        group: what failed. It is not destroyed, for that would wait for others.
        timeout_s: for all to come.

    Raises:
        HardwareError: not all came; then nothing is left but to end.
    """
    try:
        return group_with(dist.get_process_group_ranks(group), timeout_s=timeout_s)
    except AbsentRanks as absent:
        raise HardwareError(
            f"the group cannot be rebuilt: {_ranks(absent.ranks)} did not come within {timeout_s:g} s", hint=_AGAIN
        ) from None


def init_with_retry(
    device_type: str,
    *,
    host: str,
    port: int,
    rank: int,
    world_size: int,
    timeout_s: float = 600.0,
    connect_s: float = 30.0,
    first_pause_s: float = 1.0,
) -> None:
    """Meet the other ranks and make the default group; as `dist.init_process_group`, but patient.

    Rank 0 opens the store once, unless who started the ranks keeps it. Reaching it is tried again by the others, after
    pauses that double, up to half a minute: until then nobody knows of this rank. What fails after that is not tried
    again, as the traces of the first try would confuse the second.

    Args:
        device_type: `cpu` or `cuda`: chooses gloo or NCCL.
        host: of the store.
        port: of the store.
        rank: of this process.
        world_size: the number of ranks.
        timeout_s: the limit of collectives, and for all ranks to come.
        connect_s: for each attempt.
        first_pause_s: after the first attempt.

    Raises:
        HardwareError: the store cannot be reached, or the ranks did not come together.
    """
    limit = timedelta(seconds=timeout_s)
    # So torchrun says, and our launcher, that theirs is to be used.
    if rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        store = _opened_store(host, port, limit)
    else:
        store = _reached_store(
            host, port, rank, deadline=time.monotonic() + timeout_s, connect_s=connect_s, pause_s=first_pause_s
        )
    store.set_timeout(limit)
    try:
        dist.init_process_group(backend_of(device_type), store=store, rank=rank, world_size=world_size, timeout=limit)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise HardwareError(f"rank {rank} of {world_size}: the ranks did not meet: {reason}", hint=_AGAIN) from error


def _opened_store(host: str, port: int, limit: timedelta) -> TCPStore:
    try:
        return TCPStore(host, port, is_master=True, timeout=limit, wait_for_workers=False)
    except dist.DistError as error:
        reason = " ".join(str(error).split())[:200]
        raise HardwareError(
            f"rank 0: cannot listen at port {port}: {reason}", hint="set MASTER_PORT to a free port, on all ranks"
        ) from error


def _reached_store(host: str, port: int, rank: int, *, deadline: float, connect_s: float, pause_s: float) -> TCPStore:
    start = time.monotonic()
    while True:
        timeout = timedelta(seconds=min(connect_s, deadline - time.monotonic()))
        try:
            return TCPStore(host, port, timeout=timeout, wait_for_workers=False)
        except dist.DistError as error:
            if time.monotonic() + pause_s > deadline:
                raise HardwareError(
                    f"rank {rank}: no answer from {host}:{port} within {time.monotonic() - start:.0f} s",
                    hint="check that the first machine runs, its address and port, and the firewall between",
                ) from error
        time.sleep(pause_s)
        pause_s = min(_LONGEST_PAUSE_S, 2.0 * pause_s)


def _await_device(timeout_s: float) -> None:
    # A kernel that never ends cannot be waited for with a limit, but asked whether it has ended.
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()
    deadline = time.monotonic() + timeout_s
    while not done.query():  # type: ignore[no-untyped-call]
        if time.monotonic() > deadline:
            raise RuntimeError(f"the device has not finished within {timeout_s:g} s")
        time.sleep(_POLL_S)


def _is_finite(tensor: Tensor) -> bool:
    # torch does not ask it of fp8.
    wide = tensor.float() if tensor.is_floating_point() and tensor.dtype.itemsize == 1 else tensor
    return bool(wide.isfinite().all())


def _told(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
