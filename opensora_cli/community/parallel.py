"""Functions for parallelism: collectives, groups of ranks, scheduled and retried exchanges."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_cli.community import refused
from opensora_cli.core.device import synchronize
from opensora_cli.core.exceptions import HardwareError, RequestError
from opensora_cli.core.rank_messages import all_gather_json
from opensora_cli.models.text.t5 import FusedRMSNorm
from opensora_cli.parallel import collectives
from opensora_cli.parallel.collectives import Group
from opensora_cli.parallel.collectives import all_to_all as all_to_all
from opensora_cli.parallel.mesh import get_data_parallel_group as get_data_parallel_group
from opensora_cli.parallel.mesh import get_sequence_parallel_group as get_sequence_parallel_group
from opensora_cli.parallel.mesh import get_tensor_parallel_group as get_tensor_parallel_group
from opensora_cli.parallel.mesh import set_data_parallel_group as set_data_parallel_group
from opensora_cli.parallel.mesh import set_sequence_parallel_group as set_sequence_parallel_group
from opensora_cli.parallel.mesh import set_tensor_parallel_group as set_tensor_parallel_group

_SCATTER, _GATHER = 1, 2
"""Dimensions of an exchange that is named only `all_to_all`."""
_CONGESTED = 1.5
_MEASURED = 20


def gather_forward_split_backward(
    input_: Tensor, process_group: Group, dim: int, grad_scale: str | float | None = None
) -> Tensor:
    """Join the shares of all ranks along `dim`; backward takes this rank's share. With the group None, do nothing.

    `grad_scale` `up` multiplies the gradient by the number of ranks, `down` divides it, and None and 1.0 do nothing.
    """
    return collectives.gather_forward_split_backward(input_, dim, process_group, _grad_scale(grad_scale, process_group))


def split_forward_gather_backward(
    input_: Tensor, process_group: Group, dim: int, grad_scale: str | float | None = 1.0
) -> Tensor:
    """Take this rank's share along `dim`; backward joins the gradients. See `gather_forward_split_backward`."""
    return collectives.split_forward_gather_backward(input_, dim, process_group, _grad_scale(grad_scale, process_group))


def _gather(input_: Tensor, pg: Group, dim: int = -1) -> Tensor:
    """Join the equal shares of all ranks along `dim`, without gradients."""
    return collectives.all_gather(input_.detach(), pg, dim=dim)


def _split(input_: Tensor, pg: Group, dim: int = -1) -> Tensor:
    """Take this rank's share along `dim`, without gradients. Raises ValueError for uneven shares."""
    return collectives.split_forward_gather_backward(input_.detach(), dim, pg)


def _grad_scale(value: str | float | None, group: object) -> collectives.GradScale:
    if isinstance(group, int):
        raise RequestError(f"process_group={group} is no group", hint="the order is (input_, process_group, dim)")
    match value:
        case "up" | "down" | None:
            return value
        case 1.0:
            return None
    raise RequestError(f"grad_scale={value!r} must be 'up', 'down' or None")


class T5LayerNorm(FusedRMSNorm):
    """RMS norm of T5, in one kernel."""

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__(hidden_size, eps=eps)

    @property
    def variance_epsilon(self) -> float:
        """Alias of `eps`."""
        return self.eps

    @staticmethod
    def from_native_module(module: Any, *_args: object, **_kwargs: object) -> "T5LayerNorm":
        """Return the norm for a fused one of apex or of this package, with a copy of its weight."""
        made = T5LayerNorm(module.weight.numel(), module.eps).to(module.weight)
        made.load_state_dict({"weight": module.weight})
        return made


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
        rates = self._rates.setdefault(group, deque(maxlen=_MEASURED))
        rates.append((time.perf_counter() - start) / max(nbytes, 1))

    def is_congested(self) -> bool:
        """Return whether the last collective of a group took over 1.5 times its mean time, corrected for size."""
        return any(rates[-1] > _CONGESTED * sum(rates) / len(rates) for rates in self._rates.values())


@dataclass(frozen=True, slots=True)
class Scheduled:
    """Scheduled collective, through which no gradient flows."""

    result: Tensor

    def wait(self) -> Tensor:
        """Return the result."""
        return self.result


class CommunicationScheduler:
    """Runner of collectives, which all ranks schedule in the same order. `pending_ops` is always empty.

    `all_to_all` divides dimension 1 and joins dimension 2, and `gather_split` joins the last dimension.
    """

    def __init__(self) -> None:
        self.bandwidth_monitor = BandwidthMonitor()
        self.pending_ops: list[Scheduled] = []

    def schedule_communication(self, comm_type: str, tensor: Tensor, group: Group = None) -> Scheduled:
        """Run and measure a collective, and return a handle of its result."""
        return Scheduled(self.execute_communication(comm_type, tensor.detach(), group))

    def execute_communication(self, comm_type: str, tensor: Tensor, group: Group = None) -> Tensor:
        """Run and measure a collective, and return its result, which has a gradient."""
        _result_shape(tensor, comm_type, group)
        with self.bandwidth_monitor.measure(_ranks(group), tensor.nbytes, device=tensor.device):
            if comm_type == "all_to_all":
                return all_to_all(tensor, _ranks(group), _SCATTER, _GATHER)
            return gather_forward_split_backward(tensor, _ranks(group), -1)


class RobustCommunication:
    """All-to-all that all ranks of a group retry together. The ranks tell each other their errors in a second group."""

    def __init__(self, max_retries: int = 3) -> None:
        self.max_retries = max_retries
        self._meetings: dict[dist.ProcessGroup, dist.ProcessGroup] = {}

    def safe_all_to_all(
        self, input_: Tensor, process_group: Group, scatter_dim: int = 2, gather_dim: int = 1
    ) -> Tensor:
        """Return the result of `all_to_all`, retried after 1, 2, 4 ... seconds. Raises HardwareError after the last."""
        if process_group is None:
            return input_
        if process_group not in self._meetings:
            ranks = dist.get_process_group_ranks(process_group)
            self._meetings[process_group] = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        reasons = [""]
        for attempt in range(self.max_retries + 1):
            if attempt:
                time.sleep(2.0 ** (attempt - 1))
            out, reason = None, ""
            try:
                out = all_to_all(input_, process_group, scatter_dim, gather_dim)
            except RuntimeError as error:
                reason = str(error).partition("\n")[0] or type(error).__name__
            reasons = all_gather_json(reason, self._meetings[process_group])
            if out is not None and not any(reasons):
                return out
        failed = ", ".join(f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason)
        raise HardwareError(
            f"the collective failed {self.max_retries + 1} times: {failed}",
            hint="see what became of the other ranks, and start the run again",
        )

    def verify_communication(self, input_tensor: Tensor, output_tensor: Tensor, comm_type: str) -> None:
        """Check shape and numbers of a result over all ranks. Raises AssertionError if they cannot be right.

        An `all_to_all` divided dimension 1 and joined dimension 2, unlike the defaults of `safe_all_to_all`.
        """
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
    """Return the shape of a result. Raises RequestError for another type."""
    if comm_type not in ("all_to_all", "gather_split"):
        raise RequestError(f"comm_type={comm_type!r} must be all_to_all or gather_split")
    shape, ranks = list(tensor.shape), dist.get_world_size(group) if dist.is_initialized() else 1
    shape[_GATHER if comm_type == "all_to_all" else -1] *= ranks
    if comm_type == "all_to_all":
        shape[_SCATTER] //= ranks
    return torch.Size(shape)


T5EncoderPolicy = refused("T5EncoderPolicy", hint="opensora_cli.models.text.t5.T5Model has fused norms")
init_inference_environment = refused("init_inference_environment", hint="use osora generate --gpus N")
get_booster = refused("get_booster", hint="use osora generate --gpus N, with --set parallel.ulysses_degree=N")
benchmark_communication = refused("benchmark_communication", hint="use osora bench-comm")
weak_scaling_analysis = refused("weak_scaling_analysis", hint="use osora bench-comm --scaling weak")
strong_scaling_analysis = refused("strong_scaling_analysis", hint="use osora bench-comm --scaling strong")
