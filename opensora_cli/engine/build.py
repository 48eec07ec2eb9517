"""From a plan to loaded components. Each is made without weights and filled from its mapped file, tensor by tensor."""

import gc
from collections.abc import Callable

import torch

from opensora_cli.checkpoint.load import load_into_module
from opensora_cli.checkpoint.opening import open_checkpoint
from opensora_cli.engine.configs import mmdit_config, transformer_on_meta, vae_on_meta
from opensora_cli.engine.plan import ExecutionPlan
from opensora_cli.engine.weights import Component
from opensora_cli.models.mmdit import MMDiT
from opensora_cli.models.mmdit.layout import Rotary, converter, find_rotary
from opensora_cli.models.text.encoders import ClipEncoder, T5Encoder
from opensora_cli.models.vae.hunyuan import HunyuanVAE

Advance = Callable[[int], None]
"""Called with the bytes of each tensor as it is loaded."""


def load_t5(plan: ExecutionPlan) -> T5Encoder:
    """Return the T5 encoder.

    Raises:
        CheckpointError: its folder is missing, incomplete or broken.
    """
    return T5Encoder.from_folder(
        plan.weights.path(Component.T5),
        max_length=plan.settings.text.t5_max_length,
        device=plan.hardware.device,
        dtype=plan.hardware.dtype,
    )


def load_clip(plan: ExecutionPlan) -> ClipEncoder:
    """Return the CLIP encoder.

    Raises:
        CheckpointError: its folder is missing, incomplete or broken.
        RequestError: `text.clip_max_length` is over what the model can read.
    """
    return ClipEncoder.from_folder(
        plan.weights.path(Component.CLIP),
        max_length=plan.settings.text.clip_max_length,
        device=plan.hardware.device,
        dtype=plan.hardware.dtype,
    )


def load_transformer(plan: ExecutionPlan, *, advance: Advance | None = None) -> MMDiT:
    """Return the transformer; a file in another published layout is converted.

    Raises:
        CheckpointError: the file is missing or broken, or its keys or shapes do not fit the settings.
    """
    settings, path = plan.settings.model, plan.weights.path(Component.TRANSFORMER)
    transformer = transformer_on_meta(settings)
    checkpoint = open_checkpoint(path)
    rotary = find_rotary(checkpoint.entries, checkpoint.metadata)
    load_into_module(
        transformer,
        path,
        device=plan.hardware.device,
        dtype=plan.hardware.dtype,
        convert=converter(mmdit_config(settings), interleaved=rotary is Rotary.INTERLEAVED),
        advance=advance,
    )
    return transformer.requires_grad_(False).eval()


def load_vae(plan: ExecutionPlan, *, advance: Advance | None = None) -> HunyuanVAE:
    """Return the autoencoder.

    Raises:
        CheckpointError: the file is missing or broken, or its keys or shapes do not fit the settings.
    """
    vae = vae_on_meta(plan.settings.vae)
    load_into_module(
        vae,
        plan.weights.path(Component.VAE),
        device=plan.hardware.device,
        dtype=plan.hardware.dtype,
        advance=advance,
    )
    return vae.requires_grad_(False).eval()


def release_memory(device: torch.device) -> None:
    """Give back the memory of components that nothing refers to any more, so that the next stage can have it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
