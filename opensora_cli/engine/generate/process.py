"""The process of a run: the only one here, or one of several (`ranks.Ranks`, which imports much more)."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_cli.core.rank_messages import Json

if TYPE_CHECKING:
    from opensora_cli.engine.generate.plan import Plan
    from opensora_cli.models.mmdit.model import MMDiT
    from opensora_cli.sampling.denoise import VelocityFn


class OneProcess:
    """The only process of a run. Only rank 0 reads references, prints and writes files."""

    count = 1
    """Number of processes."""
    device: torch.device | None = None
    """Device of this rank; None for a single process, which may choose."""
    text_group: dist.ProcessGroup | None = None
    """Ranks that share the layers of T5; None for a single process."""
    tensor_group: dist.ProcessGroup | None = None
    """Ranks that share each block's heads and features; None if each rank has all of them."""
    machine_group: dist.ProcessGroup | None = None
    """Ranks of this machine, which share one copy of the weights that are offloaded to the CPU."""

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return True

    def of(self, plan: "Plan") -> "OneProcess":
        """Return the same processes on the mesh of a plan; all ranks call it."""
        return self

    def same(self, value: Json) -> Json:
        """Return the value of rank 0; tuples arrive as lists on the others."""
        return value

    def least(self, value: int) -> int:
        """Return the smallest value of all ranks."""
        return value

    def same_tensors(self, tensors: Sequence[Tensor] | None) -> Sequence[Tensor]:
        """Return the tensors of rank 0, on the device of each of several ranks."""
        return tensors or ()

    def share_tokens(self, transformer: "MMDiT") -> Callable[..., Tensor]:
        """Return a function like the transformer that computes this rank's share of the tokens."""
        return transformer

    def share_branches(self, velocity: "VelocityFn", *, on_evaluation: Callable[[], None]) -> "VelocityFn":
        """Return the same velocity, computed together: each rank evaluates its share of the branches."""
        return velocity


ALONE = OneProcess()
