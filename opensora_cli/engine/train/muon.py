"""Muon for convolutions."""

import torch
from torch import nn


class KernelMuon(torch.optim.Muon):
    """Muon (Jordan et al. 2024) for convolutions too: a kernel is a matrix of outputs by inputs x taps.

    torch's own takes matrices only, so it is given flattened copies, which are filled and read back at each step.

    Args:
        weights: of two dimensions or more.
        learning_rate: scaled for each matrix so that its update is as large as one of AdamW (Liu et al. 2025).
        weight_decay: share of a weight that a step at rate 1 takes away.
    """

    def __init__(self, weights: list[nn.Parameter], *, learning_rate: float, weight_decay: float) -> None:
        self._weights = weights
        self._matrices = [nn.Parameter(weight.detach().flatten(1).clone()) for weight in weights]
        super().__init__(
            self._matrices, lr=learning_rate, weight_decay=weight_decay, momentum=0.95, adjust_lr_fn="match_rms_adamw"
        )

    def weights_of_copies(self) -> dict[nn.Parameter, nn.Parameter]:
        """Return the weight of each flattened copy."""
        return dict(zip(self._matrices, self._weights, strict=True))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the weights from their gradients; a weight without one stays as it is."""
        for weight, matrix in zip(self._weights, self._matrices, strict=True):
            matrix.copy_(weight.flatten(1))
            matrix.grad = None if weight.grad is None else weight.grad.flatten(1)
        super().step(closure)  # type: ignore[no-untyped-call]
        for weight, matrix in zip(self._weights, self._matrices, strict=True):
            weight.copy_(matrix.view(weight.shape))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of the weights and of their copies."""
        super().zero_grad(set_to_none)
        for weight in self._weights:
            weight.grad = None
