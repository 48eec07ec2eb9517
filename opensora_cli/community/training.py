"""Functions for training: devices, conditions, averages, losses, optimizers, schedules."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from opensora_cli.community import own_piece, rank_and_count, unwrapped
from opensora_cli.core.conditions import ConditionMode, ReferencePart
from opensora_cli.core.device import use_device
from opensora_cli.core.exceptions import RequestError
from opensora_cli.core.ranks import find_context
from opensora_cli.engine.encode.clips import cut_part
from opensora_cli.engine.launch.rank import device_type, init_with_retry, rank_device
from opensora_cli.engine.train.objectives import mmdit
from opensora_cli.engine.train.optimizer import rate_factor, warmup_share
from opensora_cli.models.vae.autoencoder import Autoencoder
from opensora_cli.sampling.conditioning import condition_clip, fitting_modes, pick_mode
from opensora_cli.settings.train_sections import OptimizerSettings, ScheduleName


@dataclass(frozen=True, slots=True)
class Coordinator:
    """Position of this process among the ranks."""

    rank: int
    world_size: int

    def is_master(self) -> bool:
        """Return whether this is the rank that prints and writes."""
        return self.rank == 0


def setup_device() -> tuple[torch.device, Coordinator]:
    """Join the ranks that torchrun or Slurm has started, and return this rank's device. One process has no groups."""
    kind, context = device_type("auto"), find_context(os.environ)
    device = torch.device(kind) if context is None else rank_device(context, kind)
    use_device(device)
    if context is not None and not dist.is_initialized():
        init_with_retry(kind, context)
    return device, Coordinator(*rank_and_count())


def create_colossalai_plugin(plugin: str, dtype: str, grad_clip: float, **kwargs: object) -> NoReturn:
    """Raise RequestError with the settings that replace the keywords."""
    known = {"sp_size": "parallel.ulysses_degree", "tp_size": "parallel.tensor_parallel_degree"}
    settings = {"strategy": plugin, "precision.compute": dtype, "optimizer.max_grad_norm": grad_clip or 1e12}
    settings |= {name: kwargs[key] for key, name in known.items() if key in kwargs}
    flags = " ".join(f"--set {name}={value}" for name, value in settings.items())
    raise RequestError("create_colossalai_plugin does not exist in osora", hint=f"use osora train {flags}")


def prepare_visual_condition_causal(
    x: Tensor, condition_config: Mapping[str, float], model_ae: Autoencoder, *, rng: np.random.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Encode clips and their given frames; see `prepare_visual_condition_uncausal`."""
    return prepare_visual_condition_uncausal(x, condition_config, model_ae, rng=rng)


@torch.no_grad()
def prepare_visual_condition_uncausal(
    x: Tensor,
    condition_config: Mapping[str, float],
    model_ae: Autoencoder,
    pad: bool = False,
    *,
    rng: np.random.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Encode clips (B,C,T,H,W) in [-1, 1], and the given frames of a condition mode that is sampled for each clip.

    Returns the latents (B,C,T,H,W), and the mask and reference latents (B,1+C,T,H,W) for `packing.pack_latents`. Raises
    RequestError if a mode is unknown, or the autoencoder cannot encode the clips.

    Args:
        condition_config: weight of each condition mode by name. Modes that would give a whole clip are not used.
        pad: without a causal autoencoder, repeat a given picture until it fills a latent frame, in place of others.
        rng: random number generator; None means one that torch's generator seeds.
    """
    rng = rng or np.random.default_rng(int(torch.randint(2**31, ())))
    causal, ratio = model_ae.grid.is_causal, model_ae.grid.time_compression_ratio
    num_latent_frames = model_ae.grid.latent_frames(x.shape[2])
    modes = fitting_modes(condition_config, num_latent_frames=num_latent_frames, causal=causal)
    latents, conditions = [], []
    for pixels_CTHW in x:
        mode = pick_mode(modes, rng)
        clip_TCHW = pixels_CTHW.transpose(0, 1)
        if pad and mode.gives_pictures and not causal:
            clip_TCHW = _hold_pictures(clip_TCHW, mode, extra=ratio - 1)

        def encode_part(part: ReferencePart, clip_TCHW: Tensor = clip_TCHW) -> Tensor:
            return model_ae.encode(cut_part(clip_TCHW, part).transpose(0, 1)[None])[0]

        latents_CTHW = model_ae.encode(clip_TCHW.transpose(0, 1)[None])[0]
        condition = condition_clip(latents_CTHW, mode, encode_part, causal=causal, temporal_compression=ratio)
        latents.append(latents_CTHW)
        conditions.append(torch.cat(condition))
    return torch.stack(latents), torch.stack(conditions)


def _hold_pictures(clip_TX: Tensor, mode: ConditionMode, *, extra: int) -> Tensor:
    """Return a clip of the same length in which the given pictures of `mode` are repeated for `extra` more frames."""
    room = extra * (mode.at_head + mode.at_tail)
    kept_TX = clip_TX[: len(clip_TX) - room] if mode.at_head else clip_TX[room:]
    head, tail = [kept_TX[:1]] * (extra * mode.at_head), [kept_TX[-1:]] * (extra * mode.at_tail)
    return torch.cat([*head, kept_TX, *tail])


@torch.no_grad()
def update_ema(
    ema_model: nn.Module, model: nn.Module, optimizer: object = None, decay: float = 0.9999, sharded: bool = True
) -> None:
    """Update the averages of trained weights: ema = decay * ema + (1 - decay) * weight.

    Averages that `model_sharding` has cut are updated from this rank's pieces. `optimizer` and `sharded` are ignored.
    """
    averages = dict(ema_model.named_parameters())
    for name, weight in unwrapped(model).named_parameters():
        if weight.requires_grad:
            own = weight if weight.shape == averages[name].shape else own_piece(weight)
            averages[name].lerp_(own.to(averages[name]), 1.0 - decay)


def get_batch_loss(model_pred: Tensor, v_t: Tensor, masks: Tensor | None = None) -> Tensor:
    """Return the mean squared error of (B,N,D) in fp32; `masks` (B,T,H,W) are 1 where latents are given."""
    return mmdit.get_batch_loss(model_pred, v_t, masks)


def set_lr(optimizer: torch.optim.Optimizer, lr_scheduler: Any, lr: float, initial_lr: float | None = None) -> None:
    """Set the full rate of an optimizer and its schedule, if any, and the initial rate of a warm-up."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] = lr
    if lr_scheduler is not None:
        lr_scheduler.base_lrs = [lr] * len(optimizer.param_groups)
        lr_scheduler.initial_lr = getattr(lr_scheduler, "initial_lr", 0.0) if initial_lr is None else initial_lr


def set_warmup_steps(lr_scheduler: Any, warmup_steps: int) -> None:
    """Set the number of steps of a warm-up."""
    lr_scheduler.warmup_steps = warmup_steps


def set_eps(optimizer: torch.optim.Optimizer, eps: float | None = None) -> None:
    """Set epsilon, which is added to the denominator of each update; None means no change."""
    for group in optimizer.param_groups if eps is not None else ():
        group["eps"] = eps


def create_optimizer(model: nn.Module, optimizer_config: Mapping[str, Any]) -> torch.optim.Optimizer:
    """Return AdamW for the trained weights of `model`, with the keywords of `HybridAdam` in `optimizer_config`.

    Its `cls` is `AdamW` or `HybridAdam`, which mean the same. Raises RequestError for another class.
    """
    config = {"cls": "HybridAdam", **optimizer_config}
    if (kind := config.pop("cls")) not in ("AdamW", "HybridAdam"):
        raise RequestError(f"optimizer_config.cls={kind} must be AdamW or HybridAdam")
    return HybridAdam([weight for weight in model.parameters() if weight.requires_grad], **config)


class HybridAdam(torch.optim.AdamW):
    """AdamW under ColossalAI's name; `bias_correction` and `adamw_mode` can only be true."""

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adamw_mode: bool = True,
    ) -> None:
        if not bias_correction or not adamw_mode:
            raise RequestError("HybridAdam is AdamW: bias_correction and adamw_mode can only be true")
        super().__init__(model_params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)


class LinearWarmupLR(LRScheduler):
    """Schedule with a linear warm-up to each group's full rate. `last_epoch` is the number of steps done minus 1."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, initial_lr: float = 0, warmup_steps: int = 0, last_epoch: int = -1
    ) -> None:
        self.initial_lr = initial_lr
        self.warmup_steps = warmup_steps
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | torch.Tensor]:
        """Return the rates of the coming step."""
        share = warmup_share(self.last_epoch, self.warmup_steps)
        return [self.initial_lr + (full - self.initial_lr) * share for full in self.base_lrs]


class _CosineWarmupLR(LinearWarmupLR):
    """Schedule with a linear warm-up from 0, and then half a cosine down to 0 at `total_steps`."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, total_steps: int, warmup_steps: int) -> None:
        # The attributes are saved, and plain numbers can be loaded safely.
        self.total_steps = total_steps
        super().__init__(optimizer, warmup_steps=warmup_steps)

    def get_lr(self) -> list[float | torch.Tensor]:
        """Return the rates of the coming step."""
        settings = OptimizerSettings(schedule=ScheduleName.COSINE, warmup_steps=self.warmup_steps)
        factor = rate_factor(settings, self.last_epoch, steps=self.total_steps)
        return [full * factor for full in self.base_lrs]


def create_lr_scheduler(
    optimizer: torch.optim.Optimizer,
    num_steps_per_epoch: int,
    epochs: int = 1000,
    warmup_steps: int | None = None,
    use_cosine_scheduler: bool = False,
    initial_lr: float = 1e-6,
) -> LRScheduler | None:
    """Return the schedule of an optimizer's rates; None without warm-up and cosine.

    With `use_cosine_scheduler` the warm-up rises from 0, and the rate then falls along half a cosine, to 0 after
    `num_steps_per_epoch` x `epochs` steps. Otherwise the warm-up rises from `initial_lr`.
    """
    if use_cosine_scheduler:
        return _CosineWarmupLR(optimizer, total_steps=num_steps_per_epoch * epochs, warmup_steps=warmup_steps or 0)
    if warmup_steps is None:
        return None
    return LinearWarmupLR(optimizer, initial_lr=initial_lr, warmup_steps=warmup_steps)
