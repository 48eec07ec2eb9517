"""Updates of the weights: AdamW, Muon for convolutions, learning rate schedules, and averages of the weights."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from opensora_cli.core.device import multiplies_bf16
from opensora_cli.engine.train.distribution import Distribution, local
from opensora_cli.settings.train_sections import OptimizerName, OptimizerSettings, ScheduleName

_MOMENTUM = 0.95
# Coefficients of the quintic iteration (Jordan et al. 2024). It increases small singular values fastest; results are
# between 0.7 and 1.2.
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_NEWTON_SCHULZ_STEPS = 5
_SMALLEST_NORM = 1e-7


class KernelMuon(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) for matrices and kernels of convolutions.

    A kernel is a matrix of outputs by inputs x taps. The rate is scaled for each matrix so that its update is as large
    as one of AdamW (Liu et al. 2025, arXiv 2502.16982). torch's own Muon takes only matrices, and multiplies in
    bfloat16 on CPUs.
    """

    def __init__(self, weights: list[nn.Parameter], *, learning_rate: float, weight_decay: float) -> None:
        super().__init__(weights, {"lr": learning_rate, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the weights from their gradients; a weight without a gradient stays unchanged."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                if not self.state[weight]:
                    self.state[weight] = zero_state(self, weight)
                momentum = self.state[weight]["momentum_buffer"].lerp_(weight.grad, 1 - _MOMENTUM)
                # Nesterov momentum looks one step ahead.
                matrix = weight.grad.lerp(momentum, _MOMENTUM).flatten(1)
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                scale = 0.2 * group["lr"] * math.sqrt(max(matrix.shape))
                weight.add_(orthogonalized(matrix).view(weight.shape), alpha=-scale)


def orthogonalized(matrix: Tensor) -> Tensor:
    """Return U·S'·Vᵀ for a matrix U·S·Vᵀ, with all of S' near 1, by Newton-Schulz iterations."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    wide = (matrix.mT if is_tall else matrix).to(torch.bfloat16 if multiplies_bf16(matrix.device) else torch.float32)
    wide = wide / torch.linalg.matrix_norm(wide).clamp(min=_SMALLEST_NORM)
    a, b, c = _NEWTON_SCHULZ
    for _ in range(_NEWTON_SCHULZ_STEPS):
        gram = wide @ wide.mT
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.mT if is_tall else wide


def build_optimizers(weights: Mapping[str, nn.Parameter], settings: OptimizerSettings) -> list[torch.optim.Optimizer]:
    """Return the optimizers that update every one of these named weights, which may be sharded, once."""
    # Orthogonalized updates suit matrices between hidden layers, not matrices at the model's inputs and outputs.
    is_inner = {
        name: settings.name is OptimizerName.MUON and weight.ndim >= 2 and "block" in name
        for name, weight in weights.items()
    }
    matrices = [weight for name, weight in weights.items() if is_inner[name]]
    outer = [weight for name, weight in weights.items() if not is_inner[name]]
    rate, decay, optimizers = settings.learning_rate, settings.weight_decay, list[torch.optim.Optimizer]()
    if outer:
        betas = settings.beta1, settings.beta2
        optimizers.append(
            torch.optim.AdamW(outer, lr=rate, betas=betas, eps=settings.eps, weight_decay=decay, fused=True)
        )
    if matrices:
        optimizers.append(KernelMuon(matrices, learning_rate=settings.muon_learning_rate, weight_decay=decay))
    return optimizers


def zero_state(optimizer: torch.optim.Optimizer, weight: nn.Parameter) -> dict[str, Tensor]:
    """Return the state of a weight, by name, before the optimizer's first update of it."""
    if isinstance(optimizer, KernelMuon):
        return {"momentum_buffer": torch.zeros_like(weight)}
    # AdamW keeps its number of updates on the weight's device.
    moments = {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}
    return {"step": torch.zeros((), device=weight.device), **moments}


def rate_factor(settings: OptimizerSettings, update: int, *, steps: int) -> float:
    """Return the share of the full rate, 0 to 1, after `update` of `steps` updates, including skipped ones.

    The schedule is a linear warm-up, a plateau and a decay to 0, whose first update has the full rate. It has no state,
    so that a resumed run may change it.
    """
    is_cosine = settings.schedule is ScheduleName.COSINE
    up = warmup_share(update, settings.warmup_steps)
    decay_steps = max(steps - settings.warmup_steps, 0) if is_cosine else settings.decay_steps
    left = max(steps - update, 0)
    if left >= decay_steps:
        return up
    share = left / decay_steps
    return min(up, (1 - math.cos(math.pi * share)) / 2 if is_cosine else share)


def warmup_share(update: int, warmup_steps: int) -> float:
    """Return the progress of a linear warm-up: 1 / (warmup_steps + 1) at update 0, 1 at `warmup_steps`."""
    return min((update + 1) / (warmup_steps + 1), 1.0)


class Learner:
    """Weights of a role, by name in the sharded module, with their optimizers and schedule."""

    def __init__(
        self,
        weights: Mapping[str, nn.Parameter],
        settings: OptimizerSettings,
        *,
        steps: int,
        distribution: Distribution,
    ) -> None:
        self.weights = weights
        self.optimizers = build_optimizers(weights, settings)
        self._groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        self._full_rates = [group["lr"] for group in self._groups]
        self._settings, self._steps, self._distribution = settings, steps, distribution

    @property
    def learning_rate(self) -> float:
        """Learning rate of the last update in the first group of weights."""
        return float(self._groups[0]["lr"])

    def trained(self) -> Iterator[tuple[str, nn.Parameter, torch.optim.Optimizer]]:
        """Yield the name, weight and optimizer of each trained parameter, in the order of the module."""
        owners = {
            id(weight): each for each in self.optimizers for group in each.param_groups for weight in group["params"]
        }
        yield from ((name, weight, owners[id(weight)]) for name, weight in self.weights.items())

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def clip(self) -> Tensor:
        """Clip the gradients, and return their norm over all ranks before clipping."""
        return self._distribution.clip_grad_norm(self.weights, self._settings.max_grad_norm)

    def set_rates(self, step: int) -> None:
        factor = rate_factor(self._settings, step, steps=self._steps)
        for group, rate in zip(self._groups, self._full_rates, strict=True):
            group["lr"] = factor * rate

    def update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


@torch.no_grad()
def update_ema(averaged: Mapping[str, Tensor], model: nn.Module, *, decay: float) -> None:
    """Update a result of `averaged_copy` in place: average = decay * average + (1 - decay) * weight."""
    current = module_state(model)
    ours = [local(average) for average in averaged.values()]
    theirs = [local(current[name]).to(average.dtype) for name, average in averaged.items()]
    torch._foreach_lerp_(ours, theirs, 1.0 - decay)


@torch.no_grad()
def averaged_copy(model: nn.Module, *, trained_only: bool = False) -> dict[str, Tensor]:
    """Return a copy of the weights to start an average from, by name, sharded like the model."""
    state = module_state(model, trained_only=trained_only)
    return {name: value.clone() for name, value in state.items() if value.is_floating_point()}


@contextmanager
def swapped_in(averaged: Mapping[str, Tensor], model: nn.Module) -> Iterator[None]:
    @torch.no_grad()
    def exchange() -> None:
        state = module_state(model)
        for name, average in averaged.items():
            ours, theirs = local(average), local(state[name])
            held = theirs.clone()
            theirs.copy_(ours)
            ours.copy_(held)

    exchange()
    try:
        yield
    finally:
        exchange()


def module_state(module: nn.Module, *, trained_only: bool = False) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name; a tensor in two places of the module appears once."""
    state: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in module.state_dict(keep_vars=True).items():
        if id(value) not in seen and (value.requires_grad or not trained_only):
            seen.add(id(value))
            state[name] = value.detach()
    return state
