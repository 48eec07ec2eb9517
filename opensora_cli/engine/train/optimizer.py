"""How gradients become updates: AdamW, and Muon for convolutions."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from opensora_cli.core.exceptions import RequestError
from opensora_cli.engine.train.offloaded_adamw import OffloadedAdamW
from opensora_cli.settings.train_loop import OptimizerName, OptimizerSettings


class KernelMuon(torch.optim.Muon):
    """Muon (Jordan et al. 2024) for convolutions too: a kernel is a matrix of outputs by inputs x taps.

    torch's own takes matrices only, so it is given flattened copies, which are filled and read back at each step. The
    rate is scaled for each matrix so that its update is as large as one of AdamW (Liu et al. 2025).
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


# Key of the full learning rate in each group of weights; `lr` is the scheduled one.
_FULL_RATE = "full_lr"


def build_optimizers(module: nn.Module, settings: OptimizerSettings) -> list[torch.optim.Optimizer]:
    """Return the optimizers that update every trained weight of `module`, which may be sharded, each once."""
    trained = [(name, weight) for name, weight in module.named_parameters() if weight.requires_grad]
    matrices: list[nn.Parameter] = []
    if settings.name is OptimizerName.MUON:
        # Orthogonalised updates suit matrices between hidden layers, not those at the model's inputs and outputs.
        matrices = [weight for name, weight in trained if weight.ndim >= 2 and "block" in name]
    inner = {id(weight) for weight in matrices}
    outer = [weight for _, weight in trained if id(weight) not in inner]
    optimizers: list[torch.optim.Optimizer] = [_adamw(outer, settings)] if outer else []
    if matrices:
        optimizers.append(
            KernelMuon(matrices, learning_rate=settings.muon_learning_rate, weight_decay=settings.weight_decay)
        )
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group[_FULL_RATE] = group["lr"]
    return optimizers


def _adamw(weights: list[nn.Parameter], settings: OptimizerSettings) -> torch.optim.Optimizer:
    # One call of torch updates a whole group, and sharded weights do not mix there with others.
    alike: dict[object, list[nn.Parameter]] = {}
    for weight in weights:
        alike.setdefault(weight.device_mesh if isinstance(weight, DTensor) else None, []).append(weight)
    groups: list[dict[str, object]] = [{"params": group} for group in alike.values()]
    rate, betas = settings.learning_rate, (settings.beta1, settings.beta2)
    if settings.offload_states:
        return OffloadedAdamW(groups, lr=rate, betas=betas, eps=settings.eps, weight_decay=settings.weight_decay)
    return torch.optim.AdamW(
        groups, lr=rate, betas=betas, eps=settings.eps, weight_decay=settings.weight_decay, fused=True
    )


def create_optimizer(model: nn.Module, optimizer_config: Mapping[str, object]) -> torch.optim.Optimizer:
    """Return AdamW for the weights of `model` that are trained.

    The keys of `optimizer_config` are `cls` (`AdamW` or `HybridAdam`, which mean the same; `CPUAdam` keeps its moments
    on the host), `lr`, `betas`, `eps`, `weight_decay`, and `adamw_mode`, which can only be true. Raises RequestError if
    there is another key, or a value breaks a rule.
    """
    config: dict[str, Any] = {"cls": "HybridAdam", "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    unknown = sorted(optimizer_config.keys() - config.keys() - {"adamw_mode"})
    if unknown:
        raise RequestError(f"optimizer_config has no {', '.join(unknown)}: use {', '.join(config)}")
    config.update(optimizer_config)
    if config["cls"] not in ("AdamW", "HybridAdam", "CPUAdam"):
        raise RequestError(f"optimizer_config.cls={config['cls']} must be AdamW, HybridAdam or CPUAdam")
    if not config.get("adamw_mode", True):
        raise RequestError("optimizer_config.adamw_mode=False is not supported: weight decay is AdamW's")
    try:
        beta1, beta2 = config["betas"]
        settings = OptimizerSettings.model_validate(
            {
                "learning_rate": config["lr"],
                "beta1": beta1,
                "beta2": beta2,
                "eps": config["eps"],
                "weight_decay": config["weight_decay"],
                "offload_states": config["cls"] == "CPUAdam",
            }
        )
    except (TypeError, ValidationError, ValueError) as error:
        raise RequestError(f"optimizer_config: {error}") from error
    (optimizer,) = build_optimizers(model, settings)
    return optimizer


def set_rates(optimizers: list[torch.optim.Optimizer], factor: float) -> None:
    """Set every learning rate to `factor` times the full one."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = factor * group[_FULL_RATE]


def kept_tensors(optimizer: torch.optim.Optimizer) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yield what an optimizer keeps from step to step, each tensor with the weight that it is for."""
    weights = optimizer.weights_of_copies() if isinstance(optimizer, KernelMuon) else {}
    yield from ((weight, copy) for copy, weight in weights.items())
    for group in optimizer.param_groups:
        for updated in group["params"]:
            state = optimizer.state.get(updated, {})
            yield from ((weights.get(updated, updated), value) for value in state.values() if isinstance(value, Tensor))
