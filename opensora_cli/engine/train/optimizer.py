"""How gradients become updates: the learning rate over time, and the optimizers."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from opensora_cli.settings.train import OptimizerName, OptimizerSettings

# A learning rate on the plateau, kept in each group of weights while `lr` is that of the moment.
_PLATEAU = "full_lr"


def rate_factor(step: int, *, steps: int, warmup_steps: int, decay_steps: int) -> float:
    """Return the share of the full learning rate at `step`: up linearly, level, and down to zero linearly.

    Args:
        step: from 0 to `steps` - 1.
        steps: in all.
        warmup_steps: first steps, of which the last has the full rate.
        decay_steps: last steps, of which the first has the full rate; zero itself would be one step after the last.
    """
    up = (step + 1) / warmup_steps if step < warmup_steps else 1.0
    down = (steps - step) / decay_steps if step >= steps - decay_steps else 1.0
    return min(up, down)


def build_optimizers(module: nn.Module, settings: OptimizerSettings) -> list[torch.optim.Optimizer]:
    """Return the optimizers that together update every weight of `module` that is trained, each once."""
    trained = [(name, weight) for name, weight in module.named_parameters() if weight.requires_grad]
    matrices: list[nn.Parameter] = []
    if settings.name is OptimizerName.MUON:
        # Orthogonalised updates suit matrices between hidden layers, not those at the model's inputs and outputs.
        matrices = [weight for name, weight in trained if weight.ndim >= 2 and "block" in name]
    inner = {id(weight) for weight in matrices}
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(
            [weight for _, weight in trained if id(weight) not in inner],
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )
    ]
    if matrices:
        optimizers.append(
            KernelMuon(matrices, learning_rate=settings.muon_learning_rate, weight_decay=settings.weight_decay)
        )
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group[_PLATEAU] = group["lr"]
    return optimizers


def set_rates(optimizers: list[torch.optim.Optimizer], factor: float) -> None:
    """Set every learning rate to `factor` times that of the plateau."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = factor * group[_PLATEAU]


def load_moments(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Take the moments out of a saved state; rates, decays and the like stay as the settings of this run have them.

    Raises:
        ValueError, KeyError: the state is of other weights.
    """
    chosen = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    optimizer.load_state_dict(saved)
    for group, values in zip(optimizer.param_groups, chosen, strict=True):
        group.update(values)


def kept_tensors(optimizer: torch.optim.Optimizer) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yield what an optimizer keeps from step to step, each tensor with the weight that it is for."""
    weights = optimizer.weights_of_copies() if isinstance(optimizer, KernelMuon) else {}
    yield from ((weight, copy) for copy, weight in weights.items())
    for group in optimizer.param_groups:
        for updated in group["params"]:
            state = optimizer.state.get(updated, {})
            yield from ((weights.get(updated, updated), value) for value in state.values() if isinstance(value, Tensor))


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
