"""Counter of the bytes that this rank sends: every collective of torch passes the dispatcher."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from opensora_cli.memory.counting import DispatchMode
from opensora_cli.parallel.shares import shares


@dataclass(slots=True)
class Traffic:
    """Bytes that one rank, or all ranks, send with algorithms that send as little as possible.

    An all-reduce is counted as a ring's: 2(n-1) parts of n. Summed over all ranks of a group, counts are exact.
    """

    num_bytes: int = 0


@contextmanager
def counted_bytes() -> Iterator[Traffic]:
    """Count inside the block, forward and backward, in this process.

    Barriers count nothing. So do the functional collectives of `torch.compile`, which osora does not use.
    """
    sent = Traffic()
    with _Counting(sent):
        yield sent


class _Counting(DispatchMode):
    def __init__(self, sent: Traffic) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sent = sent

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        if func.namespace == "c10d" and func._opname in _COUNTS:
            self._sent.num_bytes += _COUNTS[func._opname](args)
        return func(*args, **(kwargs or {}))


# The arguments are those of c10d's operators (torch/csrc/distributed/c10d/Ops.cpp), the same since torch 2.1.


def _all_reduce(args: tuple[Any, ...]) -> int:
    group = _group(args[1])
    return sum(shares(2 * (group.size() - 1) * tensor.nbytes, group.size())[group.rank()] for tensor in args[0])


def _broadcast(args: tuple[Any, ...]) -> int:
    tensors, group, root = args[0], _group(args[1]), args[2]
    # Passed on from rank to rank: all but the last send it once.
    is_last = group.rank() == (root - 1) % group.size()
    return 0 if is_last else _bytes(tensors)


def _all_to_all_whole(args: tuple[Any, ...]) -> int:
    sent, group, lengths = args[1], _group(args[2]), args[4]
    rows = lengths[group.rank()] if lengths else sent.shape[0] // group.size()
    return int(sent.nbytes - sent[:rows].nbytes)


def _all_to_all_pieces(args: tuple[Any, ...]) -> int:
    return _bytes(piece for rank, piece in enumerate(args[1]) if rank != _group(args[2]).rank())


def _to_all_others(own: Iterable[torch.Tensor], boxed: torch.ScriptObject) -> int:
    return _bytes(own) * (_group(boxed).size() - 1)


_COUNTS: Mapping[str, Callable[[tuple[Any, ...]], int]] = {
    "allreduce_": _all_reduce,
    "broadcast_": _broadcast,
    "_allgather_base_": lambda args: _to_all_others([args[1]], args[2]),
    "allgather_": lambda args: _to_all_others(args[1], args[2]),
    "_reduce_scatter_base_": lambda args: _to_all_others([args[0]], args[2]),
    "alltoall_base_": _all_to_all_whole,
    "alltoall_": _all_to_all_pieces,
    "send": lambda args: _bytes(args[0]),
}


def _group(boxed: torch.ScriptObject) -> dist.ProcessGroup:
    return dist.ProcessGroup.unbox(boxed)


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
