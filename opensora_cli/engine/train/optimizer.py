"""How gradients become updates: AdamW, and Muon for convolutions."""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from opensora_cli.core.exceptions import RequestError
from opensora_cli.engine.train.offloaded_adamw import OffloadedAdamW
from opensora_cli.engine.train.precision import multiplies_bf16
from opensora_cli.settings.train_loop import OptimizerName, OptimizerSettings

_MOMENTUM = 0.95
# Of the quintic iteration (Jordan et al. 2024): it grows small singular values fastest, and ends within 0.7 to 1.2.
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_NEWTON_SCHULZ_STEPS = 5
_SMALLEST_NORM = 1e-7
_TOGETHER = 2**22
"""Values of matrices that are orthogonalised together: many small products cost far more than their arithmetic."""


class KernelMuon(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) for matrices and kernels of convolutions.

    A kernel is a matrix of outputs by inputs x taps. The rate is scaled for each matrix so that its update is as large
    as one of AdamW (Liu et al. 2025, https://arxiv.org/abs/2502.16982). torch's own takes matrices alone, and
    multiplies in bfloat16 on CPUs too, of which many do that twenty times slower than in float32.
    """

    def __init__(self, weights: list[nn.Parameter], *, learning_rate: float, weight_decay: float) -> None:
        super().__init__(weights, {"lr": learning_rate, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the weights from their gradients; a weight without one stays as it is."""
        for group in self.param_groups:
            for weights in _alike([weight for weight in group["params"] if weight.grad is not None]):
                self._update(weights, rate=group["lr"], decay=group["weight_decay"])

    def _update(self, weights: list[Tensor], *, rate: float, decay: float) -> None:
        for weight in weights:
            if not self.state[weight]:
                self.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
        momenta = [self.state[weight]["momentum_buffer"] for weight in weights]
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        torch._foreach_lerp_(momenta, gradients, 1 - _MOMENTUM)
        # Nesterov's: one step ahead.
        matrices = [ahead.flatten(1) for ahead in torch._foreach_lerp(gradients, momenta, _MOMENTUM)]
        if len(matrices) == 1:
            directions = [orthogonalized(matrices[0])]
        else:
            directions = list(orthogonalized(torch.stack(matrices)).unbind())
        torch._foreach_mul_(weights, 1 - rate * decay)
        updates = [direction.view(weight.shape) for direction, weight in zip(directions, weights, strict=True)]
        torch._foreach_add_(weights, updates, alpha=-0.2 * rate * math.sqrt(max(matrices[0].shape)))


def _alike(weights: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield weights that are orthogonalised together: small ones of one shape."""
    alike: dict[object, list[Tensor]] = {}
    for weight in weights:
        alike.setdefault((weight.shape, weight.dtype, weight.device), []).append(weight)
    for group in alike.values():
        count = max(1, _TOGETHER // group[0].numel())
        yield from (group[start : start + count] for start in range(0, len(group), count))


def orthogonalized(matrix: Tensor) -> Tensor:
    """Return U·S'·Vᵀ of a matrix U·S·Vᵀ, with all of S' near 1, by Newton-Schulz iterations; or a batch of them.

    They are in bfloat16, but in float32 on a CPU that has no products of it.
    """
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    wide = (matrix.mT if is_tall else matrix).to(torch.bfloat16 if multiplies_bf16(matrix.device) else torch.float32)
    wide = wide / torch.linalg.matrix_norm(wide, keepdim=True).clamp(min=_SMALLEST_NORM)
    product = torch.addmm if matrix.ndim == 2 else torch.baddbmm
    a, b, c = _NEWTON_SCHULZ
    for _ in range(_NEWTON_SCHULZ_STEPS):
        gram = wide @ wide.mT
        wide = product(wide, product(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.mT if is_tall else wide


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
    for group in optimizer.param_groups:
        for weight in group["params"]:
            state = optimizer.state.get(weight, {})
            yield from ((weight, value) for value in state.values() if isinstance(value, Tensor))
