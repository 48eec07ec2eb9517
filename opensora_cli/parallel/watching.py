"""Watched collectives: ranks compare their calls before a collective, and errors name the ranks that differ."""

import json
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_cli.core.exceptions import HardwareError
from opensora_cli.parallel.rendezvous import RETRY_HINT, AbsentRanks, Rendezvous, group_with

_PATIENCE_S = 1800.0
_POLL_S = 0.001
_REBUILD_HINT = "rebuild the group on all ranks (rebuilt_group), or end the run"


class Watched:
    """Wrapper for collectives of a group that compares the tensors of all ranks before each collective.

    The checks cost some round trips to the store for each collective, so that they are for debugging. They raise errors
    on all ranks before any data is sent, so that the group stays usable. Without checks, a collective runs unchanged.
    All ranks must watch a group in the same way.

    Args:
        timeout_s: seconds within which all ranks must arrive, and on a GPU the collective must end. On a CPU, the
            collective has the timeout of its group. None means only half an hour for the checks.
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
        self._rendezvous = Rendezvous(group, "watched") if on else None
        self._broken = False

    def __call__(
        self, collective: Callable[[Tensor], Tensor], tensor: Tensor, *, name: str, uneven_dim: int | None = None
    ) -> Tensor:
        """Return `collective(tensor)`. Shapes of the ranks may differ along `uneven_dim`.

        `name` is for messages, the same on all ranks: `all_gather of keys`.

        Raises:
            HardwareError: A rank did not arrive, calls another collective, or has another shape or dtype or a tensor
                that is not finite; or the collective failed, after which the group cannot be used.
        """
        if self._broken:
            raise HardwareError(f"{name}: an earlier collective of this group failed", hint=_REBUILD_HINT)
        called = f"{name}, {_described(tensor)}"
        if self._rendezvous is not None:
            self._agree(self._rendezvous, called, name, tensor, uneven_dim)
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
                f"{called}: failed on rank {self._group.rank()} after {seconds:.1f} s: {reason}", hint=_REBUILD_HINT
            ) from error
        return out

    def _agree(self, rendezvous: Rendezvous, called: str, name: str, tensor: Tensor, uneven_dim: int | None) -> None:
        shape = list(tensor.shape)
        if uneven_dim is not None:
            shape[uneven_dim] = -1
        finite = not self._check_finite or _is_finite(tensor)
        limit = _PATIENCE_S if self._timeout_s is None else self._timeout_s
        note = {"name": name, "described": _described(tensor), "kind": [shape, str(tensor.dtype)], "finite": finite}
        try:
            notes = [json.loads(got) for got in rendezvous.exchange(json.dumps(note), timeout_s=limit)]
        except AbsentRanks as absent:
            raise HardwareError(
                f"{called}: {ranks_named(absent.ranks)} did not come to rank {self._group.rank()} within {limit:g} s",
                hint="look at what that rank did last: nothing was sent, and the group can still be used",
            ) from None
        if any(got["name"] != name for got in notes):
            listed = ", ".join(f"rank {rank}: {got['name']}" for rank, got in enumerate(notes))
            raise HardwareError(f"ranks call different collectives: {listed}")
        if self._check_shapes and any(got["kind"] != notes[0]["kind"] for got in notes):
            listed = ", ".join(f"rank {rank}: {got['described']}" for rank, got in enumerate(notes))
            raise HardwareError(f"{name}: ranks bring different tensors: {listed}")
        not_finite = [rank for rank, got in enumerate(notes) if not got["finite"]]
        if not_finite:
            raise HardwareError(f"{called}: not finite on {ranks_named(not_finite)}")


class Retried:
    """Wrapper that repeats a failed collective on all ranks, each time on a new group.

    The ranks compare notes through the store, which costs round trips. Pauses double, from one second on. All ranks
    must arrive within `timeout_s`, and retry the same groups.
    """

    def __init__(self, retries: int, *, timeout_s: float = 600.0) -> None:
        self.retries, self._timeout_s = retries, timeout_s
        self._current: dict[dist.ProcessGroup, tuple[dist.ProcessGroup, Rendezvous]] = {}

    def __call__(self, collective: Callable[[dist.ProcessGroup], Tensor], group: dist.ProcessGroup) -> Tensor:
        """Return `collective(group)`, or the result on the group that has replaced `group`.

        Raises:
            HardwareError: The collective failed after all retries, or not all ranks arrived.
        """
        current, meeting = self._current.get(group) or (group, Rendezvous(group, "retried"))
        reasons: list[str] = []
        for attempt in range(self.retries + 1):
            if attempt:
                time.sleep(2.0 ** (attempt - 1))
                current = rebuilt_group(current, timeout_s=self._timeout_s)
                meeting = Rendezvous(current, "retried")
            self._current[group] = current, meeting
            out, reason = None, ""
            try:
                out = collective(current)
            except RuntimeError as error:
                reason = str(error).partition("\n")[0] or type(error).__name__
            reasons = meeting.exchange(reason, timeout_s=self._timeout_s)
            if out is not None and not any(reasons):
                return out
        failed = ", ".join(f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason)
        raise HardwareError(f"the collective failed {self.retries + 1} times: {failed}", hint=RETRY_HINT)


def rebuilt_group(group: dist.ProcessGroup, *, timeout_s: float) -> dist.ProcessGroup:
    """Return a new group with the ranks of a failed one. All ranks of the run call this, each for its own group.

    With gloo, a pair of ranks stays closed after a timeout, and NCCL ends the process, so that a failed group is never
    used again. It is not destroyed because that would wait for others. The new group has its own name in the store, so
    that notes of the old group are ignored.

    Raises:
        HardwareError: Not all ranks arrived; then the run must end.
    """
    try:
        return group_with(dist.get_process_group_ranks(group), timeout_s=timeout_s)
    except AbsentRanks as absent:
        raise HardwareError(
            f"the group cannot be rebuilt: {ranks_named(absent.ranks)} did not come within {timeout_s:g} s",
            hint=RETRY_HINT,
        ) from None


def _await_device(timeout_s: float) -> None:
    # Waiting for a kernel has no timeout, so poll whether it has ended.
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()
    deadline = time.monotonic() + timeout_s
    while not done.query():  # type: ignore[no-untyped-call]
        if time.monotonic() > deadline:
            raise RuntimeError(f"the device has not finished within {timeout_s:g} s")
        time.sleep(_POLL_S)


def _is_finite(tensor: Tensor) -> bool:
    # `isfinite` does not support fp8.
    wide = tensor.float() if tensor.is_floating_point() and tensor.dtype.itemsize == 1 else tensor
    return bool(wide.isfinite().all())


def _described(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def ranks_named(ranks: list[int]) -> str:
    """Return the ranks as text: `rank 1`, or `ranks 1, 2`."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
