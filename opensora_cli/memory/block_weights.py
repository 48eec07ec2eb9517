"""The weights of one block of a model, laid out one after the other in one run of memory."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

ALIGNMENT = 512
"""Bytes at a multiple of which every weight begins: as where torch places tensors on CUDA, so that kernels are the same
ones."""


class BlockWeights:
    """Those parameters of a block that wait on the CPU, and where each goes in one run of bytes.

    A parameter that several modules of the block share is there once, and each lies row by row. Parameters on another
    device are left out: these are shared with what is outside the blocks, and have been brought where they are needed.

    Args:
        block: the module.
    """

    def __init__(self, block: nn.Module) -> None:
        self._users: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for module in block.modules():
            for name, weight in module._parameters.items():
                if weight is not None and weight.device.type in ("cpu", "meta"):
                    self._users.setdefault(weight, []).append((module, name))
        sizes = (-(-weight.nbytes // ALIGNMENT) * ALIGNMENT for weight in self._users)
        *self._offsets, self.nbytes = accumulate(sizes, initial=0)

    @property
    def host(self) -> list[nn.Parameter]:
        """The parameters on the CPU, in the order of the run."""
        return list(self._users)

    def views(self, run: Tensor) -> list[Tensor]:
        """Return the tensors that a run of bytes holds, shaped as the parameters.

        Args:
            run: (nbytes or more,) uint8, on any device.
        """
        return [
            run[offset : offset + weight.nbytes].view(weight.dtype).view(weight.shape)
            for offset, weight in zip(self._offsets, self._users, strict=True)
        ]

    def lend(self, tensors: Sequence[Tensor]) -> None:
        """Have the block compute with other tensors, in the order of `host`, until `take_back`."""
        for users, tensor in zip(self._users.values(), tensors, strict=True):
            _give(nn.Parameter(tensor, requires_grad=False), users)

    def take_back(self) -> None:
        """Have the block hold its own parameters again."""
        for weight, users in self._users.items():
            _give(weight, users)

    @torch.no_grad()
    def move_to(self, run: Tensor, shared: dict[nn.Parameter, nn.Parameter]) -> None:
        """Copy the parameters to a run of bytes on the CPU, and have the block hold these copies from now on.

        Args:
            run: (nbytes or more,) uint8.
            shared: parameters that several blocks have -> what they hold instead, which is itself until one has moved.
        """
        users: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for (weight, own), view in zip(self._users.items(), self.views(run), strict=True):
            view.copy_(weight)
            new = shared.get(weight, weight)
            if new is weight:
                new = nn.Parameter(view, requires_grad=weight.requires_grad)
            if weight in shared:
                shared[weight] = new
            users[new] = own
            _give(new, own)
        self._users = users


def slot_bytes(block: nn.Module) -> int:
    """Return how many bytes the weights of a block need in one run of memory; the block may be on the meta device."""
    return BlockWeights(block).nbytes


def _give(weight: nn.Parameter, users: Sequence[tuple[nn.Module, str]]) -> None:
    for module, name in users:
        module._parameters[name] = weight
