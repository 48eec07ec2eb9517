"""Search for the largest batch that fits: doubling until a batch does not fit, then bisection."""

from collections.abc import Callable
from dataclasses import replace

import torch

from opensora_cli.core.device import is_accelerator, release_memory
from opensora_cli.core.progress import Reporter
from opensora_cli.engine.components.configs import count_parameters
from opensora_cli.engine.components.hardware import Hardware
from opensora_cli.engine.components.weights import Component
from opensora_cli.engine.generate.plan import Plan
from opensora_cli.engine.mem_profile.measure import peak_bytes, unless_out_of_memory, why_not_measured
from opensora_cli.engine.mem_profile.measured_stages import random_transformer
from opensora_cli.engine.mem_profile.report import LargestBatch, mib
from opensora_cli.engine.train.activations import with_batch_size
from opensora_cli.engine.train.estimate import estimate_training, measure_training
from opensora_cli.models.mmdit.model import MMDiT
from opensora_cli.sampling.packing import position_ids
from opensora_cli.settings.enums import OffloadMode
from opensora_cli.settings.train import TrainSettings

MOST = 1024
"""Largest batch that is tried."""
_FAR_ABOVE = 1.25
"""Factor of the limit above which a predicted step is not run at all."""

PeakOf = Callable[[int], int]
"""Function from a batch to its bytes. Raises MemoryError or torch.OutOfMemoryError if the batch does not fit."""


def largest_batch(
    peak_of: PeakOf, *, of: str, limit_bytes: int, device: torch.device, reporter: Reporter, most: int = MOST
) -> LargestBatch:
    """Search for the largest batch that fits, up to `most`.

    `peak_of` tries a batch; its memory is released here when it fails. `of` describes the content of a batch.
    """
    tried: list[tuple[int, int | None]] = []

    with reporter.stage("batch", unit="attempts") as progress:

        def peak(size: int) -> int | None:
            found = unless_out_of_memory(lambda: peak_of(size))
            if found is not None and found > limit_bytes:
                found = None
            release_memory(device)
            tried.append((size, found))
            progress.advance()
            return found

        fits, fits_bytes, size = 0, 0, 1
        while size <= most and (found := peak(size)) is not None:
            fits, fits_bytes, size = size, found, size * 2
        too_large = size if size <= most else most + 1
        while too_large - fits > 1:
            middle = (fits + too_large) // 2
            found = peak(middle)
            if found is None:
                too_large = middle
            else:
                fits, fits_bytes = middle, found
    return LargestBatch(
        of=of,
        batch_size=fits,
        limit_bytes=limit_bytes,
        peak_bytes=fits_bytes,
        tried=tuple(tried),
        reached_most=fits == most,
    )


def training_batch(
    settings: TrainSettings, hardware: Hardware, *, limit: int | None, reporter: Reporter
) -> LargestBatch:
    """Search for the largest batch of a training, by counted bytes. The batch of the settings is ignored.

    The batch must fit into `limit` bytes, and into the free memory; None means no other limit.
    """
    limit_bytes = _usable_bytes(hardware, limit)

    def of_size(size: int) -> TrainSettings:
        return with_batch_size(settings, size)

    def peak_of(size: int) -> int:
        if estimate_training(of_size(size)).peak_bytes > _FAR_ABOVE * limit_bytes:
            raise MemoryError
        return measure_training(of_size(size), limit=limit_bytes).peak_bytes

    of = "clips"
    if (reason := _too_long(estimate_training(of_size(1)).peak_bytes, hardware)) is not None:
        return _not_searched(of, limit_bytes, reason)
    return largest_batch(peak_of, of=of, limit_bytes=limit_bytes, device=hardware.device, reporter=reporter)


def generation_batch(plan: Plan, *, limit: int | None, reporter: Reporter) -> LargestBatch:
    """Search for the most videos that the transformer evaluates at once: by allocation on CUDA, by counting on a CPU.

    The transformer is whole on the device. The limit is the one of `training_batch`.
    """
    hardware = plan.hardware
    limit_bytes = _usable_bytes(hardware, limit)
    weights = count_parameters(plan.settings, plan.weights)[Component.TRANSFORMER] * hardware.dtype.itemsize
    of = "videos in one evaluation of the transformer"
    if (reason := _too_long(weights, hardware)) is not None:
        return _not_searched(of, limit_bytes, reason)
    if weights > limit_bytes and not plan.offload.in_8_bits:
        return _not_searched(of, limit_bytes, f"the weights alone are {mib(weights)} of {mib(limit_bytes)}")
    whole = replace(plan, offload=replace(plan.offload, mode=OffloadMode.NONE, modulation_on_host=False))
    transformer = unless_out_of_memory(lambda: random_transformer(whole))
    if transformer is None:
        release_memory(hardware.device)
        return _not_searched(of, limit_bytes, "not even the weights fit")
    held = sum(weight.nbytes for weight in (*transformer.parameters(), *transformer.buffers()))

    def peak_of(size: int) -> int:
        return held + peak_bytes(
            lambda: evaluate(plan, transformer, batch=size), device=hardware.device, limit=limit_bytes - held
        )

    return largest_batch(
        peak_of,
        of=of,
        limit_bytes=limit_bytes,
        device=hardware.device,
        reporter=reporter,
    )


def _usable_bytes(hardware: Hardware, limit: int | None) -> int:
    """Return the limit of a batch in bytes. On a CPU it is below the free memory, since workspaces are not counted."""
    usable = hardware.free_bytes if is_accelerator(hardware.device) else hardware.free_bytes * 4 // 5
    return usable if limit is None else min(usable, limit)


def _too_long(needed: int, hardware: Hardware) -> str | None:
    reason = why_not_measured(needed, hardware)
    return reason if hardware.device.type == "cpu" else None


def _not_searched(of: str, limit_bytes: int, reason: str) -> LargestBatch:
    return LargestBatch(
        of=of, batch_size=0, limit_bytes=limit_bytes, peak_bytes=0, tried=(), reached_most=False, reason=reason
    )


@torch.inference_mode()
def evaluate(plan: Plan, transformer: MMDiT, *, batch: int) -> torch.Tensor:
    """Return the velocity (B, N, D) of a batch of empty videos."""
    settings, dtype, device = plan.settings, plan.hardware.dtype, plan.hardware.device
    _, frames, rows, columns = plan.latent_shape
    patch = settings.model.patch_size
    config = transformer.config
    tokens = plan.video_tokens

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    velocity: torch.Tensor = transformer(
        zeros(batch, tokens, config.in_channels),
        position_ids_BN3=position_ids(1, frames, rows // patch, columns // patch, device=device),
        timesteps_B=zeros(batch),
        prompt_embeds_BLC=zeros(batch, settings.text.t5_max_length, config.context_in_dim),
        pooled_prompt_embeds_BV=zeros(batch, config.vec_in_dim),
        conditioning_BNK=zeros(batch, tokens, config.conditioning_channels) if config.cond_embed else None,
        embedded_guidance_B=zeros(batch) if config.guidance_embed else None,
    )
    return velocity
