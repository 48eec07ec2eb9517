"""Watched collectives of a run: before each collective, its ranks check that all of them have called it."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from opensora_cli.core.exceptions import HardwareError
from opensora_cli.parallel.rendezvous import AbsentRanks, Rendezvous
from opensora_cli.parallel.watching import ranks_named

_LATE_HINT = "see what that rank did last; if it was still at work, allow more: --set parallel.watch_limit_s=SECONDS"
_POINT_TO_POINT = {"send": "send", "recv_": "receive"}
# Common names of c10d's operators (torch/csrc/distributed/c10d/Ops.cpp).
_NAMES = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "broadcast_": "broadcast",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
    "gather_": "gather",
    "scatter_": "scatter",
    "reduce_": "reduce",
    "barrier": "barrier",
}
# Operators of _c10d_functional (torch/csrc/distributed/c10d/Functional.cpp), which DTensor calls, without wait_tensor.
_FUNCTIONAL_NAMES = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")


@contextmanager
def watched_collectives(*, limit_s: float) -> Iterator[None]:
    """Watch every collective that this thread calls inside the context, including backward passes.

    Before a collective or a message, its ranks exchange notes through the store. This costs round trips, so that it is
    for debugging hung runs. All ranks of the run must be inside such a context, with the same `limit_s`. A collective
    raises HardwareError on every present rank if another rank has not arrived within `limit_s` seconds, or has called
    another collective. The message names the collective, its group and those ranks, and no data is sent.

    A receive waits until the other rank calls its send. So at least one of two ranks that exchange messages must call
    its send first, also in `batch_isend_irecv`. If both call their receive first, they are reported as if neither sent.
    """
    with _Watching(limit_s):
        yield


class _Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, limit_s: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        from torch.distributed.tensor import DTensor  # slow, and only for watched runs

        self._sharded = DTensor
        self._limit_s = limit_s
        self._meetings: dict[dist.ProcessGroup, Rendezvous] = {}
        self._messages: Counter[tuple[dist.ProcessGroup, int, int]] = Counter()

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        if self._sharded in types:
            # DTensor's own dispatch must come first: its collectives arrive here again.
            return NotImplemented
        if func.namespace == "c10d" and func._opname in _POINT_TO_POINT:
            self._message(func._opname, args)
        elif name := _collective_name(func):
            self._collective(name, args)
        return func(*args, **(kwargs or {}))

    def _collective(self, name: str, args: tuple[Any, ...]) -> None:
        group = _group_of(args)
        if group is None or group.size() == 1:
            return
        ranks = dist.get_process_group_ranks(group)
        where = f"{name} between {ranks_named(ranks)}"
        if group not in self._meetings:
            self._meetings[group] = Rendezvous(group, "watched run")
        note = json.dumps(f"{name} of {_dtype_of(args)}")
        try:
            notes = self._meetings[group].exchange(note, timeout_s=self._limit_s)
        except AbsentRanks as absent:
            missing = ranks_named([ranks[rank] for rank in absent.ranks])
            what = (
                f"{missing} gave up waiting for rank {dist.get_rank()}"
                if absent.gave_up
                else f"{missing} did not come within {self._limit_s:g} s"
            )
            raise HardwareError(f"{where}: {what}", hint=_LATE_HINT) from None
        called = {rank: json.loads(each) for rank, each in zip(ranks, notes, strict=True)}
        if len(set(called.values())) > 1:
            listed = ", ".join(f"rank {rank}: {each}" for rank, each in called.items())
            raise HardwareError(f"{where}: ranks call different collectives: {listed}", hint=_LATE_HINT)

    def _message(self, operator: str, args: tuple[Any, ...]) -> None:
        group = _group_of(args)
        assert group is not None
        own, peer = group.rank(), int(args[2])
        source, target = (own, peer) if operator == "send" else (peer, own)
        # Both ranks count their messages, so that each message has a number.
        self._messages[group, source, target] += 1
        key, store = f"watched run/{source}>{target}/{self._messages[group, source, target]}", group.get_group_store()
        if operator == "send":
            store.set(key, "")
            return
        try:
            store.wait([key], timedelta(seconds=self._limit_s))
        except RuntimeError:
            ranks = dist.get_process_group_ranks(group)
            raise HardwareError(
                f"message from rank {ranks[source]} to rank {ranks[target]}, of {ranks_named(ranks)}: rank "
                f"{ranks[source]} did not send it within {self._limit_s:g} s",
                hint=_LATE_HINT,
            ) from None
        store.delete_key(key)


def _collective_name(func: torch._ops.OpOverload) -> str | None:
    if func.namespace == "c10d":
        return _NAMES.get(func._opname)
    if func.namespace == "_c10d_functional":
        return next((name for name in _FUNCTIONAL_NAMES if func._opname.startswith(name)), None)
    return None


def _group_of(args: tuple[Any, ...]) -> dist.ProcessGroup | None:
    for each in args:
        # The operator of a reduction is also a ScriptObject.
        if isinstance(each, torch.ScriptObject) and "ProcessGroup" in str(each._type()):
            group: dist.ProcessGroup = dist.ProcessGroup.unbox(each)
            return group
    # The last positional argument of functional collectives is the name of the group.
    last = args[-1]
    if not isinstance(last, str):
        return None
    return _resolve_process_group(last)  # type: ignore[arg-type]


def _dtype_of(args: tuple[Any, ...]) -> str:
    # In a gather, only the gathering rank has an output tensor; on other ranks the first tensor is an input.
    tensors = (each for each in tree_leaves(args) if isinstance(each, torch.Tensor))
    first = next(tensors, None)
    return "nothing" if first is None else str(first.dtype).removeprefix("torch.")
