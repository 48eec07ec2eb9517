"""Scheduled, measured and retried exchanges, by the names of the community."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_cli.core.device import synchronize
from opensora_cli.core.exceptions import HardwareError, RequestError
from opensora_cli.parallel.collectives import Group, all_to_all, gather_forward_split_backward

_SCATTER, _GATHER = 1, 2
"""Dimensions of an exchange that is named only `all_to_all`."""
_CONGESTED = 1.5
_MEASURED = 20


class BandwidthMonitor:
    """Monitor of the speed of each group's collectives on this rank."""

    def __init__(self) -> None:
        self._rates: dict[dist.ProcessGroup, deque[float]] = {}

    @contextmanager
    def measure(self, group: dist.ProcessGroup, nbytes: int, *, device: torch.device) -> Iterator[None]:
        """Measure the context as one collective of `group` that moves `nbytes` of this rank."""
        synchronize(device)
        start = time.perf_counter()
        yield
        synchronize(device)
        self.record(group, nbytes, time.perf_counter() - start)

    def record(self, group: dist.ProcessGroup, nbytes: int, seconds: float) -> None:
        """Record a collective of `group` that moved `nbytes` of this rank in `seconds`."""
        self._rates.setdefault(group, deque(maxlen=_MEASURED)).append(seconds / max(nbytes, 1))

    def is_congested(self) -> bool:
        """Return whether the last collective of a group took over 1.5 times its mean time, corrected for size."""
        return any(rates[-1] > _CONGESTED * sum(rates) / len(rates) for rates in self._rates.values())


@dataclass(slots=True, eq=False)
class Scheduled:
    """Scheduled collective, through which no gradient flows."""

    scheduler: "CommunicationScheduler"
    comm_type: str
    tensor: Tensor
    group: dist.ProcessGroup
    result: Tensor | None = None

    def wait(self) -> Tensor:
        """Return the result, after the collectives that are before it in the queues of all ranks."""
        while self.result is None:
            self.scheduler.issue()
        return self.result


class CommunicationScheduler:
    """Scheduler that runs the smallest of the collectives first that all ranks have scheduled.

    All ranks schedule the same collectives in the same order, and wait for each at some time, in any order.
    `comm_type` is `all_to_all`, which divides dimension 1 and joins dimension 2, or `gather_split`, which joins the
    last dimension. The group None means all ranks.
    """

    def __init__(self, group: Group = None, monitor: BandwidthMonitor | None = None) -> None:
        self._group = group
        self.bandwidth_monitor = monitor or BandwidthMonitor()
        self.pending_ops: list[Scheduled] = []
        """Scheduled collectives that have not run."""

    def schedule_communication(self, comm_type: str, tensor: Tensor, group: Group = None) -> Scheduled:
        """Queue a collective until a caller waits for it or a later one."""
        _result_shape(tensor, comm_type, group)
        scheduled = Scheduled(self, comm_type, tensor.detach(), _ranks(group))
        self.pending_ops.append(scheduled)
        return scheduled

    def execute_communication(self, comm_type: str, tensor: Tensor, group: Group = None) -> Tensor:
        """Run and measure a collective after all scheduled ones, and return its result, which has a gradient."""
        _result_shape(tensor, comm_type, group)
        while self.pending_ops:
            self.issue()
        with self.bandwidth_monitor.measure(_ranks(group), tensor.nbytes, device=tensor.device):
            return _run(comm_type, tensor, _ranks(group))

    def issue(self) -> None:
        """Run the collectives that all ranks have scheduled. All ranks call this until theirs have run."""
        # A rank calls this only for scheduled collectives, so that the count is at least one.
        count = torch.tensor(len(self.pending_ops))
        dist.all_reduce(count, op=dist.ReduceOp.MIN, group=self._group)
        batch, self.pending_ops = self.pending_ops[: int(count)], self.pending_ops[int(count) :]
        for scheduled in sorted(batch, key=lambda each: each.tensor.nbytes):
            scheduled.result = _run(scheduled.comm_type, scheduled.tensor, scheduled.group)


def _run(comm_type: str, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    if comm_type == "all_to_all":
        return all_to_all(tensor, group, _SCATTER, _GATHER)
    return gather_forward_split_backward(tensor, -1, group)


class RobustCommunication:
    """All-to-all that all ranks of a group retry together, each time on a new group of the same ranks.

    With gloo, a pair of ranks stays closed after a timeout, and NCCL ends the process, so that a failed group is never
    used again. The ranks compare notes through the store; all must arrive within `timeout_s`.
    """

    def __init__(self, max_retries: int = 3, *, timeout_s: float = 600.0) -> None:
        self.max_retries = max_retries
        self._timeout = timedelta(seconds=timeout_s)
        self._current: dict[dist.ProcessGroup, dist.ProcessGroup] = {}
        self._meetings = 0

    def safe_all_to_all(
        self, input_: Tensor, process_group: Group, scatter_dim: int = 2, gather_dim: int = 1
    ) -> Tensor:
        """Return the result of `all_to_all`, retried after 1, 2, 4 ... seconds. Raises HardwareError after the last."""
        if process_group is None:
            return input_
        group, reasons = self._current.get(process_group, process_group), dict[int, str]()
        for attempt in range(self.max_retries + 1):
            if attempt:
                time.sleep(2.0 ** (attempt - 1))
                group = self._rebuilt(group)
                self._current[process_group] = group
            out, reason = None, ""
            try:
                out = all_to_all(input_, group, scatter_dim, gather_dim)
            except RuntimeError as error:
                reason = str(error).partition("\n")[0] or type(error).__name__
            reasons = self._reasons(group, reason)
            if out is not None and not reasons:
                return out
        failed = ", ".join(f"rank {rank}: {reason}" for rank, reason in reasons.items())
        raise HardwareError(
            f"the collective failed {self.max_retries + 1} times: {failed}",
            hint="see what became of the other ranks, and start the run again",
        )

    def _rebuilt(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        ranks = dist.get_process_group_ranks(group)
        rebuilt: dist.ProcessGroup = dist.new_group(ranks, timeout=self._timeout, use_local_synchronization=True)
        return rebuilt

    def _reasons(self, group: dist.ProcessGroup, own: str) -> dict[int, str]:
        """Return the reasons of the ranks whose collective failed."""
        self._meetings += 1
        store, ranks = group.get_group_store(), range(group.size())
        keys = [f"retried/{self._meetings}/{rank}" for rank in ranks]
        store.set(keys[group.rank()], own or " ")
        try:
            store.wait(keys, self._timeout)
        except RuntimeError:
            absent = [rank for rank in ranks if not store.check([keys[rank]])]
            raise HardwareError(f"ranks {absent} did not come within {self._timeout.total_seconds():g} s") from None
        reasons = {rank: store.get(keys[rank]).decode().strip() for rank in ranks}
        return {rank: reason for rank, reason in reasons.items() if reason}

    def verify_communication(self, input_tensor: Tensor, output_tensor: Tensor, comm_type: str) -> None:
        """Check shape and numbers of a result over all ranks. Raises AssertionError if they cannot be right."""
        expected = self.calculate_expected_shape(input_tensor, comm_type)
        if output_tensor.shape != expected:
            raise AssertionError(f"{comm_type} gave {tuple(output_tensor.shape)} and not {tuple(expected)}")
        if not output_tensor.isfinite().all():
            raise AssertionError(f"{comm_type} gave numbers that are not finite")

    def calculate_expected_shape(self, input_tensor: Tensor, comm_type: str) -> torch.Size:
        """Return the shape of a result over all ranks; `CommunicationScheduler` describes `comm_type`."""
        return _result_shape(input_tensor, comm_type, None)


def _ranks(group: Group) -> dist.ProcessGroup:
    chosen = group or dist.group.WORLD
    assert chosen is not None
    return chosen


def _result_shape(tensor: Tensor, comm_type: str, group: Group) -> torch.Size:
    """Return the shape of a result. Raises RequestError for another type, and ValueError for uneven shares."""
    if comm_type not in ("all_to_all", "gather_split"):
        raise RequestError(f"comm_type={comm_type!r} must be all_to_all or gather_split")
    shape, ranks = list(tensor.shape), dist.get_world_size(group) if dist.is_initialized() else 1
    shape[_GATHER if comm_type == "all_to_all" else -1] *= ranks
    if comm_type == "all_to_all":
        if shape[_SCATTER] % ranks:
            raise ValueError(f"{shape[_SCATTER]} along dimension {_SCATTER} are not {ranks} equal shares")
        shape[_SCATTER] //= ranks
    return torch.Size(shape)
