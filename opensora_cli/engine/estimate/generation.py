"""Device memory of a generation, stage by stage, before anything is loaded.

Nothing is fitted: the real modules and the sampling loop run on outlines, and their allocations are counted. The
blocks of a stack are equal and run one after the other, so one represents all.

Counted are weights after offloading, inputs, outputs and intermediate results. These include the output and the sums
of fused attention, and the workspace of cuDNN's convolutions. Not counted are workspaces of other kernels (such as
matrix products of cuBLAS), the CUDA context, and the rounding and fragmentation of an allocator.
"""

from collections.abc import Mapping
from pathlib import Path

import torch

from opensora_cli.core.choices import LinearProducts
from opensora_cli.core.conditions import reference_parts
from opensora_cli.engine.components.configs import mmdit_config
from opensora_cli.engine.components.velocity import modulation_comes_first
from opensora_cli.engine.components.weights import Component
from opensora_cli.engine.estimate.autoencoder import decoding_need, encoding_need
from opensora_cli.engine.estimate.offload import AUTOENCODER, DECODE, DENOISE, ENCODE, OffloadPlan, StageMemory
from opensora_cli.engine.estimate.text import text_memory
from opensora_cli.engine.estimate.transformer import GenerationSizes, SamplingOptions, sampling_need
from opensora_cli.engine.estimate.weights import (
    FileWeights,
    dequantized_bytes,
    largest_modulation_bytes,
    transformer_bytes,
    transformer_on_cpu,
)
from opensora_cli.settings.enums import OffloadMode
from opensora_cli.settings.generate import GenerateSettings


def estimate_generation(
    settings: GenerateSettings,
    *,
    sizes: GenerationSizes,
    dtype: torch.dtype,
    device_type: str,
    offload: OffloadPlan,
    parameters: Mapping[Component, int],
    text_folders: Mapping[Component, Path] | None = None,
    files: Mapping[Component, FileWeights] | None = None,
) -> tuple[StageMemory, ...]:
    """Return the device memory of each stage, in the order of execution.

    Repeated counts are cached, so that many offload plans for one video cost little more than one. `parameters` are
    counts, see `configs.count_parameters`, and `dtype` is the dtype of weights and activations. Text encoders that
    `text_folders` lacks count like the released ones. `files` are the mapped files that a CPU computes with; None means
    no mapped files. Raises RequestError if sizes in `settings` contradict each other.
    """
    weights = {component: count * dtype.itemsize for component, count in parameters.items()}
    vae = settings.vae
    decoding = decoding_need(
        vae,
        sizes.latent_shape,
        (sizes.height, sizes.width),
        dtype,
        device_type,
        chunk_frames=offload.chunk_frames,
        # On a CPU the host is the device itself.
        store_on_host=offload.store_on_host and device_type != "cpu",
    )
    vae_mapped = 0
    if files is not None:
        weights[Component.VAE], vae_mapped = files[Component.VAE].total.held()
    decode = StageMemory(DECODE, weights[Component.VAE], decoding.data, decoding.activations, vae_mapped)
    if settings.from_latents is not None:
        return (decode,)

    lengths = settings.text.t5_max_length, settings.text.clip_max_length
    folders = tuple((text_folders or {}).get(component) for component in (Component.T5, Component.CLIP))
    text = text_memory(
        weights, lengths, folders, dtype, streamed=offload.stream_text, ranks=sizes.mesh.size, files=files
    )
    config = mmdit_config(settings.model)
    options = SamplingOptions(
        config=config,
        text_length=lengths[0],
        causal=settings.vae.grid.is_causal,
        num_times=settings.sampling.num_inference_steps + 1 if computes_modulation_first(settings) else 0,
        chunk_tokens=offload.chunk_tokens,
        linear=offload.linear,
        dtype=dtype,
        device_type=device_type,
    )
    denoising = sampling_need(sizes, options)
    workspace = dequantized_bytes(config, dtype, offload, tensor=sizes.mesh.tensor)
    frames = reference_frames(settings, sizes)
    kept = ((AUTOENCODER, weights[Component.VAE]),) if frames and offload.mode is OffloadMode.NONE else ()
    tensor, loras, mapped = sizes.mesh.tensor, sizes.loras, 0
    if files is None:
        own = transformer_bytes(config, weights[Component.TRANSFORMER], dtype, offload, tensor=tensor, loras=loras)
    else:
        own, mapped = transformer_on_cpu(
            config, files[Component.TRANSFORMER], dtype, offload, tensor=tensor, loras=loras
        )
    own += sum(size for _, size in kept)
    computed = denoising.activations + workspace
    if offload.linear is not LinearProducts.EXACT:
        # Modulation alone is dequantized, before a block computes anything else.
        computed = max(denoising.activations, workspace)
    if offload.modulation_on_host and device_type != "cpu":
        # Its weights come one layer after the other, before anything else is computed.
        computed = max(computed, largest_modulation_bytes(config, dtype))
    denoise = StageMemory(DENOISE, own, denoising.data, computed, mapped, kept)
    stages = [text, denoise, decode]
    if sizes.has_draft:
        frames = (*frames, settings.video.num_frames)
    if frames:
        encoding = encoding_need(vae, frames, (sizes.height, sizes.width), dtype, device_type)
        stages.insert(1, StageMemory(ENCODE, weights[Component.VAE], encoding.data, encoding.activations, vae_mapped))
    return tuple(stages)


def computes_modulation_first(settings: GenerateSettings) -> bool:
    """Return whether modulation of all steps is computed before the first step. Compiled blocks do not do this."""
    num_times = settings.sampling.num_inference_steps + 1
    return not settings.compile and modulation_comes_first(num_times, mmdit_config(settings.model))


def reference_frames(settings: GenerateSettings, sizes: GenerationSizes) -> tuple[int, ...]:
    """Return the number of encoded frames of each reference."""
    grid = settings.vae.grid
    parts = reference_parts(
        sizes.mode,
        causal=grid.is_causal,
        temporal_compression=grid.time_compression_ratio,
        lengths=sizes.lengths,
    )
    return tuple(part.num_frames for part in parts)
