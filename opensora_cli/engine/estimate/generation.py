"""Device memory of a generation, stage by stage, before anything is loaded.

Nothing is fitted: the real modules and the sampling loop run on outlines, and their allocations are counted. The
blocks of a stack are equal and run one after the other, so one represents all.

Counted are weights after offloading, inputs, outputs and intermediate results. These include the output and the sums
of fused attention, and the workspace of cuDNN's convolutions. Not counted are workspaces of other kernels (such as
matrix products of cuBLAS), the CUDA context, and the rounding and fragmentation of an allocator.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path

import torch
from torch import Tensor

from opensora_cli.core.conditions import ConditionMode, ReferenceLengths, reference_parts
from opensora_cli.core.linear_products import LinearProducts
from opensora_cli.core.solvers import Solver
from opensora_cli.engine.components.autoencoders import vae_tiling
from opensora_cli.engine.components.configs import mmdit_config
from opensora_cli.engine.components.loras import LoraRanks
from opensora_cli.engine.components.velocity import (
    GuidedVelocity,
    PromptEmbeds,
    modulation_comes_first,
    modulation_values,
)
from opensora_cli.engine.components.weights import Component
from opensora_cli.engine.estimate.fake_tensors import Counts, Need, Repeated, Size, extrapolated, fake_device
from opensora_cli.engine.estimate.file_bytes import FileWeights
from opensora_cli.engine.estimate.offload import AUTOENCODER, DECODE, DENOISE, ENCODE, OffloadPlan, StageMemory
from opensora_cli.engine.estimate.text import text_memory
from opensora_cli.engine.estimate.tiles import DATA, decoding_need, encoding_need
from opensora_cli.engine.estimate.transformer import (
    FakeSequenceParallel,
    dequantized_bytes,
    fake_transformer,
    largest_modulation_bytes,
    transformer_bytes,
    transformer_on_cpu,
)
from opensora_cli.memory.counting import TensorBytes
from opensora_cli.models.mmdit.config import MMDiTConfig
from opensora_cli.parallel.shares import ExchangePlan, MeshShape
from opensora_cli.sampling.conditioning import prepare_inference_condition
from opensora_cli.sampling.denoise import VelocityFn, denoise
from opensora_cli.sampling.guidance import Branch, GuidanceScales, branches_needed
from opensora_cli.sampling.packing import pack_conditioning, pack_latents, position_ids, unpack_latents
from opensora_cli.sampling.step_cache import CachedStep
from opensora_cli.settings.enums import OffloadMode
from opensora_cli.settings.generate import GenerateSettings

_STEPS = 2
"""Steps to estimate: the second and later steps hold latents besides the noise."""
_FEW_CHUNKS = 5
"""Chunks of tokens of the smaller clips from which many chunks are extrapolated."""
_ACTIVATIONS = "activations"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSizes:
    """Sizes of a video that a plan has decided."""

    height: int
    width: int
    latent_shape: tuple[int, int, int, int]
    """(C, T, H, W) of one sample."""
    mode: ConditionMode
    lengths: ReferenceLengths
    scales: GuidanceScales
    """Guidance scales of a step with the most branches."""
    solver: Solver = Solver.EULER
    cached: tuple[GuidanceScales, ...] = ()
    """Guidance scales of one step of each phase, with a step cache."""
    mesh: MeshShape = field(default_factory=MeshShape)
    """Mesh of the ranks."""
    exchange: ExchangePlan = field(default_factory=ExchangePlan)
    loras: LoraRanks = ()
    attention: str = "sdpa"
    """Attention backend."""
    has_draft: bool = False
    """Whether a whole video is encoded as the start."""


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
    vae, tiling = settings.vae, vae_tiling(settings.vae)
    # On a CPU the host is the device itself.
    chunks = offload.chunk_frames, offload.store_on_host and device_type != "cpu"
    shown = sizes.height, sizes.width
    decoding = decoding_need(vae, tiling, sizes.latent_shape, shown, dtype, device_type, chunks)
    vae_mapped = 0
    if files is not None:
        weights[Component.VAE], vae_mapped = files[Component.VAE].total.private, files[Component.VAE].total.mapped
    decode = StageMemory(DECODE, weights[Component.VAE], decoding.data, decoding.activations, vae_mapped)
    if settings.from_latents is not None:
        return (decode,)

    lengths = settings.text.t5_max_length, settings.text.clip_max_length
    folders = tuple((text_folders or {}).get(component) for component in (Component.T5, Component.CLIP))
    text = text_memory(
        weights, lengths, folders, dtype, streamed=offload.stream_text, ranks=sizes.mesh.size, files=files
    )
    config = mmdit_config(settings.model)
    grid = settings.vae.grid

    def sample(of: GenerationSizes) -> Need:
        chunk, causal = offload.chunk_tokens, grid.is_causal
        return _sampling(config, of, lengths[0], dtype, device_type, chunk, causal, offload.linear)

    denoising = _denoising(sample, sizes, config.patch_size, offload.chunk_tokens)
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
    data = denoising.data
    if computes_modulation_first(settings):
        num_times = settings.sampling.num_inference_steps + 1
        data += dtype.itemsize * modulation_values(num_times, config)
    denoise = StageMemory(DENOISE, own, data, computed, mapped, kept)
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


def _denoising(
    sample: Callable[[GenerationSizes], Need], sizes: GenerationSizes, patch: int, chunk_tokens: int | None
) -> Need:
    """Return the need of sampling; that of many chunks of tokens follows from smaller clips."""
    channels, frames, height, width = sizes.latent_shape
    tokens, ranks = height * width // patch**2, sizes.mesh.ring * sizes.mesh.ulysses
    # The last chunk of the smaller clips is as long as that of the whole.
    step = tokens if chunk_tokens is None else max(round(_FEW_CHUNKS * chunk_tokens * ranks / frames), 1)

    def count(size: Size) -> Counts:
        need = sample(replace(sizes, latent_shape=(channels, frames, patch, patch * size[0])))
        return {DATA: need.data, _ACTIVATIONS: need.activations}

    found = extrapolated(count, (tokens,), steps=(step,), few=(step,))
    return Need(found[DATA], found[_ACTIVATIONS])


@lru_cache(maxsize=256)
def _sampling(
    config: MMDiTConfig,
    sizes: GenerationSizes,
    text_length: int,
    dtype: torch.dtype,
    device_type: str,
    chunk_tokens: int | None,
    causal: bool,
    linear: LinearProducts,
) -> Need:
    channels, frames, rows, columns = sizes.latent_shape
    patch = config.patch_size
    with fake_device(device_type) as device:
        empty = partial(torch.empty, dtype=dtype, device=device)
        transformer = fake_transformer(
            config,
            device=device,
            dtype=dtype,
            mesh=sizes.mesh,
            exchange=sizes.exchange,
            linear=linear,
            attention=sizes.attention,
            loras=sizes.loras,
        )
        transformer.set_sequence_chunk(chunk_tokens)
        # Blocks run one after the other, so that one of each kind represents all.
        for blocks in (transformer.double_blocks, transformer.single_blocks):
            for index, block in enumerate(blocks):
                blocks[index] = Repeated(block)
        with TensorBytes(device_type=device.type) as counter:
            embeds = PromptEmbeds(empty(2, text_length, config.context_in_dim), empty(2, config.vec_in_dim))
            references = [empty(channels, frames, rows, columns)] * 2
            # The same steps as in `sample_latents` of generation.
            noise_BCTHW = empty(1, channels, frames, rows, columns)
            mask_B1THW, given_BCTHW = prepare_inference_condition(
                noise_BCTHW, sizes.mode, [references], causal, lengths=sizes.lengths
            )
            velocity = GuidedVelocity(
                FakeSequenceParallel(transformer, sizes.mesh),
                embeds,
                conditioning_BNK=pack_conditioning(mask_B1THW, given_BCTHW, patch) if config.cond_embed else None,
                position_ids_1N3=position_ids(1, frames, rows // patch, columns // patch, device=device),
                embedded_guidance=1.0 if config.guidance_embed else None,
            )
            del references
            packed_BND = pack_latents(noise_BCTHW, patch)
            scales = [*sizes.cached, *_STEPS * [sizes.scales]]
            denoised_BND = denoise(
                _share_of_branches(velocity, sizes.mesh.guidance),
                packed_BND,
                timesteps=[1.0 - step / len(scales) for step in range(len(scales) + 1)],
                scales=scales,
                solver=sizes.solver,
                cache=[CachedStep(branches_needed(each), is_reused=False) for each in scales] if sizes.cached else None,
            )
            latents_BCTHW = unpack_latents(
                denoised_BND, num_latent_frames=frames, height=rows, width=columns, patch_size=patch
            )
            need = Need.of(counter)
            del latents_BCTHW
            return need


def _share_of_branches(velocity: VelocityFn, ranks: int) -> VelocityFn:
    """Return a velocity that allocates like `SharedBranches` on the rank with the most branches."""
    if ranks == 1:
        return velocity

    def shared(
        packed_latents_1ND: Tensor, t: float, branches: tuple[Branch, ...], /, cached: CachedStep | None = None
    ) -> dict[Branch, Tensor]:
        own = velocity(packed_latents_1ND, t, branches[::ranks], cached)
        return {branch: own[branch] if branch in own else torch.empty_like(packed_latents_1ND) for branch in branches}

    return shared
