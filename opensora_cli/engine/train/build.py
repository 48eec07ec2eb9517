"""Construction of a task and its micro-batches from settings."""

from typing import Any

import torch

from opensora_cli.checkpoint.load import fill_module
from opensora_cli.checkpoint.opening import open_checkpoint
from opensora_cli.core.progress import Reporter
from opensora_cli.data.source import ClipSource
from opensora_cli.engine.components.attention import AttentionPlan, AttentionUse, choose_attention
from opensora_cli.engine.components.autoencoders import autoencoder_on_meta
from opensora_cli.engine.components.compiled import compile_blocks
from opensora_cli.engine.components.configs import transformer_on_meta
from opensora_cli.engine.encode.clip_cache import ClipCache
from opensora_cli.engine.encode.datasets import open_table
from opensora_cli.engine.encode.fill_cache import prepare_cache, require_same_settings
from opensora_cli.engine.encode.loading import ClipBatches
from opensora_cli.engine.train.distribution import Distribution
from opensora_cli.engine.train.files import first_weights_of
from opensora_cli.engine.train.lora import add_lora
from opensora_cli.engine.train.objectives.mmdit import TokenWeights, build_mmdit_task
from opensora_cli.engine.train.objectives.task import BatchSource, Task
from opensora_cli.engine.train.objectives.vae import build_vae_task, freeze_encoder
from opensora_cli.engine.train.precision import DTYPES
from opensora_cli.engine.train.transformer import empty_transformer, fill_parts, new_transformer
from opensora_cli.models.attention import attention_backend
from opensora_cli.settings.train import TrainSettings, TrainTarget


def build_task(
    settings: TrainSettings,
    *,
    distribution: Distribution,
    clips: ClipCache | None = None,
    token_weights: TokenWeights | None = None,
    reporter: Reporter,
) -> Task[Any]:
    """Return the task for `settings.target`, ready for training: this rank's part, on its device.

    Weights without a file are random from `loop.seed`, the same on all ranks. `token_weights` is for the
    transformer.

    Raises:
        RequestError: Sizes contradict each other.
        CheckpointError: Frozen parts (all are named) or the first weights are missing or broken.
        HardwareError: The device has no kernels for the task, or kernels of the chosen attention do not work there.
    """
    # Layers take their first weights from torch's global generator, whose state is the caller's.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.loop.seed)
        task = _build(settings, distribution=distribution, clips=clips, token_weights=token_weights, reporter=reporter)
    task.forward = distribution.shard(task.module)
    if settings.target is TrainTarget.MMDIT and distribution.divides:
        fill_parts(task.module, settings, distribution=distribution)
    if task.adversary is not None:
        task.adversary.forward = distribution.shard(task.adversary.module)
    return task


def plan_attention(settings: TrainSettings, *, device: torch.device, tries_device: bool = True) -> AttentionPlan:
    """Return the attention backend for training the transformer, including gradients; see `choose_attention`.

    Raises the errors of `choose_attention`.
    """
    use = AttentionUse(
        device=device,
        dtype=DTYPES[settings.precision.compute],
        head_dim=settings.model.hidden_size // settings.model.num_heads,
        gradients=True,
        in_parts=(settings.parallel.ring_degree or 1) > 1,
    )
    return choose_attention(
        settings.train_mmdit.attention, use, setting="train_mmdit.attention", tries_device=tries_device
    )


def open_clips_cache(
    settings: TrainSettings, *, distribution: Distribution, reporter: Reporter, source: ClipSource | None = None
) -> ClipCache | None:
    """Return the complete cache of encoded clips for a run, or None. Raises the errors of `prepare_cache`."""
    if settings.target is not TrainTarget.MMDIT:
        return None
    return prepare_cache(
        settings,
        device=distribution.device,
        rank=distribution.rank,
        ranks=distribution.ranks,
        barrier=distribution.barrier,
        reporter=reporter,
        source=source,
    )


def build_batches(
    settings: TrainSettings,
    *,
    distribution: Distribution,
    clips: ClipCache | None = None,
    reporter: Reporter,
    source: ClipSource | None = None,
) -> BatchSource[Any]:
    """Return this rank's micro-batches. Raises the errors of `ClipBatches`."""
    return ClipBatches(
        settings,
        data_rank=distribution.data_rank,
        data_ranks=distribution.data_ranks,
        reporter=reporter,
        load=clips.clip if clips is not None else None,
        source=source,
    )


def refuse_before_ranks(settings: TrainSettings) -> None:
    """Raise errors before the ranks start for unreadable tables and for a cache of another run.

    The ranks themselves find differences that only the hashes of the frozen parts show. Raises the errors of
    `open_table` and `require_same_settings`.
    """
    for each in [settings, *([settings.held_out] if settings.validation.every is not None else [])]:
        open_table(each, fixed_starts=False)
    if settings.target is TrainTarget.MMDIT and settings.train_mmdit.cache is not None:
        require_same_settings(settings, device=torch.device("cpu" if settings.device == "cpu" else "cuda"))


def count_parameters(settings: TrainSettings) -> int:
    """Return the number of trained parameters, without allocating them.
    Raises RequestError if sizes contradict each other, and HardwareError if an adapter needs a missing library.
    """
    match settings.target:
        case TrainTarget.VAE:
            autoencoder = autoencoder_on_meta(settings.vae)
            if settings.train_vae.decoder_only:
                freeze_encoder(autoencoder)
            module: torch.nn.Module = autoencoder
        case TrainTarget.MMDIT:
            transformer = transformer_on_meta(settings.model)
            if settings.lora.is_on:
                add_lora(transformer, settings.lora, seed=settings.loop.seed)
            module = transformer
    return sum(weight.numel() for weight in module.parameters() if weight.requires_grad)


def _build(
    settings: TrainSettings,
    *,
    distribution: Distribution,
    clips: ClipCache | None,
    token_weights: TokenWeights | None,
    reporter: Reporter,
) -> Task[Any]:
    device = distribution.device
    match settings.target:
        case TrainTarget.VAE:
            vae_task = build_vae_task(settings, device=device, reporter=reporter)
            if (path := first_weights_of(settings)) is not None:
                fill_module(vae_task.module, open_checkpoint(path))
            # A distribution moves trained weights, but not a frozen encoder.
            vae_task.module.to(device)
            return vae_task
        case TrainTarget.MMDIT:
            # Whole weights on every rank would exceed the host's memory.
            transformer = (
                empty_transformer(settings) if distribution.divides else new_transformer(settings, device=device)
            )
            transformer.set_attention(attention_backend(plan_attention(settings, device=device).backend))
            if settings.compile:
                compile_blocks(transformer, warn=reporter.warn)
            return build_mmdit_task(settings, transformer, device=device, clips=clips, token_weights=token_weights)
