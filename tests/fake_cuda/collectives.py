"""Collectives between ranks of which one is there at a time: logged, and told what the others have said."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from fake_cuda.device import PER_MACHINE
from fake_cuda.log import Awaited, Collective, Log
from fake_cuda.storages import Storages
from fake_cuda.streams import Queues
from fake_cuda.values import give, value_of
from torch import Tensor
from torch._C._distributed_c10d import Work


@dataclass(frozen=True, slots=True)
class World:
    """The ranks of a run that take their turns, rank 0 first."""

    size: int = 1
    said: dict[tuple[tuple[int, ...], int, int], Tensor] = field(default_factory=dict)
    """The value that a rank has handed to the n-th collective of a group: (ranks, n, rank) -> tensor."""

    def machine(self, rank: int) -> str:
        return f"machine-{rank // PER_MACHINE:04d}"

    def heard(self, group: tuple[int, ...], number: int, rank: int, *, own: Tensor, by: int) -> Tensor:
        """Return what another rank says: what it has said, or else what `by` says, of a machine of its own."""
        if (group, number, rank) in self.said:
            return self.said[group, number, rank]
        if own.dtype is torch.uint8:
            text = bytes(own.numpy()).replace(self.machine(by).encode(), self.machine(rank).encode())
            return torch.frombuffer(bytearray(text), dtype=torch.uint8)
        return own


class Collectives:
    def __init__(self, world: World, log: Log, storages: Storages, queues: Queues) -> None:
        self._world, self._log, self._storages, self._queues = world, log, storages, queues
        self._works = count()
        self._called: Counter[tuple[int, ...]] = Counter()

    def together(self, transfers: list[dist.P2POp]) -> list[dist.Work]:
        """Stand in for `dist.batch_isend_irecv`: the messages start one after the other."""
        calls: list[tuple[Callable[..., dist.Work | None], dist.P2POp]] = [(each.op, each) for each in transfers]
        works = [call(each.tensor, group=each.group, **_peer(each)) for call, each in calls]
        return [work for work in works if work is not None]

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = func._opname
        group = next(dist.ProcessGroup.unbox(arg) for arg in args if _is_group(arg))
        ranks = tuple(dist.get_process_group_ranks(group))
        reads, writes, peer = _roles(name, args, ranks, self._log.rank)
        sent, received = [each.numel() for each in reads], [each.numel() for each in writes]
        if name == "alltoall_base_":
            each = len(ranks)
            received = list(args[3]) or [args[0].shape[0] // each] * each
            sent = list(args[4]) or [args[1].shape[0] // each] * each
            row_out, row_in = (tensor[0].numel() if tensor.shape[0] else 1 for tensor in (args[0], args[1]))
            received, sent = [size * row_out for size in received], [size * row_in for size in sent]
        if name not in ("send", "recv_"):
            self._called[ranks] += 1
            self._tell(name, args, ranks)
        tensors = [*reads, *writes]
        is_on_device = any(tensor.device.type == "cuda" for tensor in tensors)
        queue = f"{self._queues.device}/nccl {ranks[0]}-{ranks[-1]}x{len(ranks)}" if is_on_device else "gloo"
        number = next(self._works)
        self._log.asked(
            Collective,
            name.strip("_"),
            queue,
            tuple(map(self._storages.operand, reads)),
            tuple(map(self._storages.operand, writes)),
            caller=self._queues.current.queue if is_on_device else None,
            group=ranks,
            work=number,
            peer=peer,
            sent=tuple(sent),
            received=tuple(received),
        )
        work = LoggedWork(self._log, number, self._queues if is_on_device else None, tensors)
        boxed = Work.boxed(work)
        returns = len(func._schema.returns)
        return boxed if returns == 1 else (args[0], boxed)

    def _tell(self, name: str, args: tuple[Any, ...], ranks: tuple[int, ...]) -> None:
        number, own, said = self._called[ranks], self._log.rank, self._world.said
        if name == "broadcast_":
            [tensor], root = args[0], ranks[args[2]]
            value = value_of(tensor)
            if own == root and value is not None:
                said[ranks, number, own] = value
            elif own != root:
                give(tensor, said.get((ranks, number, root)))
        elif name == "allgather_":
            [outputs], [given] = args[0], args[1]
            value = value_of(given)
            if value is None:
                return
            said[ranks, number, own] = value
            for rank, output in zip(ranks, outputs, strict=True):
                give(output, self._world.heard(ranks, number, rank, own=value, by=own))


class LoggedWork(Work):
    """The handle of a collective; keeps its tensors until it is waited for, as that of NCCL does."""

    def __init__(self, log: Log, number: int, queues: Queues | None, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._log, self._number, self._queues = log, number, queues
        self._tensors: list[Tensor] = list(tensors)
        # torch holds the C++ side alone.
        _alive.add(self)

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        agent = self._log.thread if self._queues is None else self._queues.current.queue
        self._log.asked(Awaited, self._number, agent)
        self._tensors.clear()
        _alive.discard(self)
        return True

    def is_completed(self) -> bool:
        return True


_alive: set[LoggedWork] = set()


def _peer(transfer: dist.P2POp) -> dict[str, int]:
    return {"group_dst" if transfer.op is dist.isend else "group_src": transfer.group_peer}


def _is_group(arg: Any) -> bool:
    return isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type())


def _roles(
    name: str, args: tuple[Any, ...], ranks: tuple[int, ...], own: int
) -> tuple[list[Tensor], list[Tensor], int | None]:
    """Return what a rank hands in, what it gets, and the root or the other rank."""
    match name:
        case "broadcast_":
            root = ranks[args[2]]
            return (list(args[0]), [], root) if own == root else ([], list(args[0]), root)
        case "allreduce_" | "allreduce_coalesced_":
            return list(args[0]), list(args[0]), None
        case "reduce_":
            root = ranks[args[3]]
            return list(args[0]), list(args[0]) if own == root else [], root
        case "allgather_":
            return list(args[1]), [each for row in args[0] for each in row], None
        case "reduce_scatter_":
            return [each for row in args[1] for each in row], list(args[0]), None
        case "_allgather_base_" | "_reduce_scatter_base_" | "alltoall_base_":
            return [args[1]], [args[0]], None
        case "allgather_into_tensor_coalesced_" | "reduce_scatter_tensor_coalesced_" | "alltoall_":
            return list(args[1]), list(args[0]), None
        case "send":
            return list(args[0]), [], ranks[args[2]]
        case "recv_":
            return [], list(args[0]), ranks[args[2]]
        case "barrier":
            return [], [], None
    raise ValueError(f"the collective {name} is not rehearsed")
