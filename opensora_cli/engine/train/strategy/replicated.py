"""Every rank has the whole model, and gradients are averaged: DistributedDataParallel (Li et al. 2020)."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from opensora_cli.engine.train.strategy.distribution import Distribution
from opensora_cli.models.mmdit import MMDiT
from opensora_cli.parallel.mesh import ParallelMesh


class ReplicatedDistribution(Distribution):
    """The whole model on every rank.

    Gradients are summed once an update, while backward is still computing others.

    Args:
        device: of this process.
        mesh: all of its ranks lie along `replicate`.
    """

    def __init__(self, device: torch.device, mesh: ParallelMesh) -> None:
        super().__init__(device, mesh)
        self._group = mesh.group("replicate")
        self._wrapped: list[DistributedDataParallel] = []

    def shard(self, module: nn.Module) -> Callable[..., Tensor]:
        """Average the gradients of a module from now on, where it is called by what this returns.

        Every weight that is trained has to be of use in every such call.
        """
        wrapped = DistributedDataParallel(
            module.to(self.device),
            process_group=self._group,
            gradient_as_bucket_view=True,
            find_unused_parameters=_may_leave_weights_out(module),
        )
        self._wrapped.append(wrapped)
        return wrapped

    @contextmanager
    def accumulating(self, *, last: bool) -> Iterator[None]:
        """Let gradients be summed in the backward pass of the last micro-batch alone."""
        with ExitStack() as stack:
            if not last:
                for wrapped in self._wrapped:
                    stack.enter_context(wrapped.no_sync())
            yield


def _may_leave_weights_out(module: nn.Module) -> bool:
    # Without single-stream blocks nothing looks at what the last double-stream one makes of the text.
    return isinstance(module, MMDiT) and module.config.depth_single_blocks == 0
