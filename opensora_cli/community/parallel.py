"""Functions for parallelism: collectives, groups of ranks, scheduled and retried exchanges."""

from typing import Any

from torch import Tensor

from opensora_cli.community import refused
from opensora_cli.community._communication import BandwidthMonitor as BandwidthMonitor
from opensora_cli.community._communication import CommunicationScheduler as CommunicationScheduler
from opensora_cli.community._communication import RobustCommunication as RobustCommunication
from opensora_cli.community._communication import Scheduled as Scheduled
from opensora_cli.core.exceptions import RequestError
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


T5EncoderPolicy = refused("T5EncoderPolicy", hint="opensora_cli.models.text.t5.T5Model has fused norms")
init_inference_environment = refused("init_inference_environment", hint="use osora generate --gpus N")
get_booster = refused("get_booster", hint="use osora generate --gpus N, with --set parallel.ulysses_degree=N")
benchmark_communication = refused("benchmark_communication", hint="use osora bench-comm")
weak_scaling_analysis = refused("weak_scaling_analysis", hint="use osora bench-comm --scaling weak")
strong_scaling_analysis = refused("strong_scaling_analysis", hint="use osora bench-comm --scaling strong")
