"""Device memory of a generation, stage by stage, before anything is loaded.

Nothing is fitted: the real modules and the sampling loop run on fake tensors, and their allocations are counted. The
blocks of a stack are equal and run one after the other, so two represent all.

Counted are weights after offloading, inputs, outputs and intermediate results. These include the output and the sums
of fused attention, and the workspace of cuDNN's convolutions. Not counted are workspaces of other kernels (such as
matrix products of cuBLAS), the CUDA context, and the rounding and fragmentation of an allocator.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from opensora_cli.core.conditions import ConditionMode, ReferenceLengths, reference_parts
from opensora_cli.core.linear_products import LinearProducts
from opensora_cli.core.solvers import Solver
from opensora_cli.engine.components.attention import attention_stand_in
from opensora_cli.engine.components.autoencoders import new_autoencoder, vae_tiling
from opensora_cli.engine.components.configs import mmdit_config, with_depth
from opensora_cli.engine.components.loras import LoraRanks, add_fake_loras, in_first_block
from opensora_cli.engine.components.velocity import (
    GuidedVelocity,
    PromptEmbeds,
    modulation_comes_first,
    modulation_values,
)
from opensora_cli.engine.components.weights import Component
from opensora_cli.engine.estimate.decoder import FakeDecoder
from opensora_cli.engine.estimate.fake_tensors import HOST, Need, Repeated, fake_device, fake_module
from opensora_cli.engine.estimate.file_bytes import FileWeights
from opensora_cli.engine.estimate.offload import AUTOENCODER, DECODE, DENOISE, ENCODE, OffloadPlan, StageMemory
from opensora_cli.engine.estimate.remembered import remembered
from opensora_cli.engine.estimate.text import text_memory
from opensora_cli.engine.estimate.transformer import (
    FakeSequenceParallel,
    dequantized_bytes,
    fake_attention,
    fake_products,
    keep_largest_share,
    largest_modulation_bytes,
    transformer_bytes,
    transformer_on_cpu,
)
from opensora_cli.media.resize import to_uint8
from opensora_cli.memory.counting import TensorBytes
from opensora_cli.models.mmdit.config import MMDiTConfig
from opensora_cli.models.mmdit.model import MMDiT
from opensora_cli.models.vae.tiles import TileGrid, Tiling
from opensora_cli.parallel.all_to_all import ExchangePlan
from opensora_cli.parallel.mesh import MeshShape
from opensora_cli.sampling.conditioning import prepare_inference_condition
from opensora_cli.sampling.denoise import VelocityFn, denoise
from opensora_cli.sampling.guidance import Branch, GuidanceScales, branches_needed
from opensora_cli.sampling.packing import pack_conditioning, pack_latents, position_ids, unpack_latents
from opensora_cli.sampling.step_cache import CachedStep
from opensora_cli.settings.components import VAESettings
from opensora_cli.settings.enums import OffloadMode
from opensora_cli.settings.generate import GenerateSettings

_STEPS = 2
"""Steps to estimate: the second and later steps hold latents besides the noise."""

_FEW_CHUNKS, _OF_CHUNKS = 40, 10
"""Most chunks of tokens that are estimated one by one, and the chunks of a smaller clip for extrapolation."""
_FEW_TILES = 400
"""Most tiles of an autoencoder that are estimated one by one."""


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
    decoding = _shortened_decoding(vae, tiling, sizes.latent_shape, shown, dtype, device_type, chunks)
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
    denoising = _shortened_denoising(
        config, sizes, lengths[0], dtype, device_type, offload.chunk_tokens, grid.is_causal, offload.linear
    )
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
        encoding = _encoding(vae, tiling, sizes, frames, dtype, device_type)
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


def _shortened_denoising(
    config: MMDiTConfig,
    sizes: GenerationSizes,
    text_length: int,
    dtype: torch.dtype,
    device_type: str,
    chunk_tokens: int | None,
    causal: bool,
    linear: LinearProducts,
) -> Need:
    """Return the need of `_denoising`; the need of many chunks of tokens follows from smaller clips."""

    def need(rows: int, columns: int) -> Need:
        longer, shorter = max(rows, columns), min(rows, columns)
        few = max(_OF_CHUNKS * chunk // (frames * shorter), 1)
        if longer <= 2 * few:
            size = channels, frames, patch * rows, patch * columns
            smaller = replace(sizes, latent_shape=size)
            return _denoising(config, smaller, text_length, dtype, device_type, chunk_tokens, causal, linear)
        near, far = (need(few * number, shorter) for number in (1, 2))
        return _line(near, far, longer - few, of=few)

    (channels, frames, height, width), patch = sizes.latent_shape, config.patch_size
    chunk = chunk_tokens or frames * height * width
    if frames * (height // patch) * (width // patch) <= _FEW_CHUNKS * chunk:
        return _denoising(config, sizes, text_length, dtype, device_type, chunk_tokens, causal, linear)
    return need(height // patch, width // patch)


def _line(near: Need, far: Need, more: int, *, of: int) -> Need:
    """Extrapolate the need linearly: `more` units after `near`, where `far` is `of` units after `near`."""

    def at(low: int, high: int) -> int:
        return low + (high - low) * more // of

    return Need(at(near.data, far.data), at(near.activations, far.activations))


@remembered
def _denoising(
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
        attention = fake_attention(sizes.mesh, attention_stand_in(sizes.attention), exchange=sizes.exchange)
        transformer = fake_module(
            lambda: _on_rank(MMDiT(with_depth(config, 2), attention=attention), sizes),
            device=device,
            dtype=dtype,
        )
        fake_products(transformer, linear)
        transformer.set_sequence_chunk(chunk_tokens)
        transformer.double_blocks = _repeated(transformer.double_blocks)
        transformer.single_blocks = _repeated(transformer.single_blocks)
        shared = FakeSequenceParallel(transformer, sizes.mesh)
        with TensorBytes(device_type=device.type) as counter:
            embeds = PromptEmbeds(empty(2, text_length, config.context_in_dim), empty(2, config.vec_in_dim))
            references = [empty(channels, frames, rows, columns)] * 2
            # The same steps as in `sample_latents` of generation.
            noise_BCTHW = empty(1, channels, frames, rows, columns)
            mask_B1THW, given_BCTHW = prepare_inference_condition(
                noise_BCTHW, sizes.mode, [references], causal, lengths=sizes.lengths
            )
            velocity = GuidedVelocity(
                shared,
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


_Size = tuple[int, int, int]
"""Frames, height and width."""


def _of_few_tiles(need: Callable[[_Size], Need], size: _Size, grid: TileGrid, tiling: Tiling) -> Need:
    """Return `need(size)`. With many tiles, it grows by the same amount per tile, and follows from smaller clips."""
    if grid.count(size, tiling) <= _FEW_TILES:
        return need(size)

    def line(smaller: _Size, axis: int = 0) -> Need:
        if axis == len(smaller):
            return need(smaller)
        along, is_cut = (grid.space, tiling.spatial) if axis else (grid.time, tiling.temporal)
        more = -(-smaller[axis] // along.stride) - (along.size // along.stride + 3)
        if not is_cut or more < 2:
            return line(smaller, axis + 1)
        short = smaller[axis] - more * along.stride

        def at(length: int) -> Need:
            frames, height, width = (length if place == axis else side for place, side in enumerate(smaller))
            return line((frames, height, width), axis + 1)

        near, far = at(short), at(short + along.stride)
        return _line(near, far, more, of=1)

    return line(size)


def _shortened_decoding(
    settings: VAESettings,
    tiling: Tiling,
    latent_shape: tuple[int, int, int, int],
    shown: tuple[int, int],
    dtype: torch.dtype,
    device_type: str,
    chunks: tuple[int | None, bool],
) -> Need:
    """Return the need of `_decoding`. With many tiles, joining them may need more memory than the decoder."""
    channels, *axes = latent_shape
    size, (_, grid) = (axes[0], axes[1], axes[2]), settings.sizes.tile_grids()

    def needed(count: Callable[..., Need]) -> Need:
        return _of_few_tiles(
            lambda smaller: count(settings, tiling, (channels, *smaller), shown, dtype, device_type, chunks),
            size,
            grid,
            tiling,
        )

    decoding = needed(_decoding)
    if grid.count(size, tiling) <= _FEW_TILES:
        return decoding
    return Need(decoding.data, max(decoding.activations, needed(_joining).activations))


@remembered
def _decoding(
    settings: VAESettings,
    tiling: Tiling,
    latent_shape: tuple[int, int, int, int],
    shown: tuple[int, int],
    dtype: torch.dtype,
    device_type: str,
    chunks: tuple[int | None, bool],
) -> Need:
    return _decode(settings, tiling, latent_shape, shown, dtype, device_type, chunks, only_pixels=False)


@remembered
def _joining(
    settings: VAESettings,
    tiling: Tiling,
    latent_shape: tuple[int, int, int, int],
    shown: tuple[int, int],
    dtype: torch.dtype,
    device_type: str,
    chunks: tuple[int | None, bool],
) -> Need:
    return _decode(settings, tiling, latent_shape, shown, dtype, device_type, chunks, only_pixels=True)


def _decode(
    settings: VAESettings,
    tiling: Tiling,
    latent_shape: tuple[int, int, int, int],
    shown: tuple[int, int],
    dtype: torch.dtype,
    device_type: str,
    chunks: tuple[int | None, bool],
    *,
    only_pixels: bool,
) -> Need:
    (height, width), (chunk_frames, store_on_host) = shown, chunks
    with fake_device(device_type) as device:
        empty = partial(torch.empty, dtype=dtype, device=device)
        vae = fake_module(lambda: new_autoencoder(settings), device=device, dtype=dtype)
        counter = TensorBytes(device_type=device.type)
        store = HOST if store_on_host else device
        decoder = FakeDecoder(
            vae, counter, chunk_frames=chunk_frames, store=store, canvas=HOST, only_pixels=only_pixels
        )
        vae.decoder = cast(Any, decoder)
        with counter:
            latents_1CTHW = empty(1, *latent_shape)
            # The same steps as in `decode_latents` of generation.
            pieces_1CTHW = vae.decode_pieces(
                latents_1CTHW, tiling=tiling, chunk_frames=chunk_frames, store=store, canvas=HOST
            )
            deque(map(lambda piece_1CTHW: _shown(piece_1CTHW[0, :, :, :height, :width]), pieces_1CTHW), maxlen=0)
            need = Need.of(counter)
            del latents_1CTHW
            return need


def _shown(pixels_CTHW: Tensor) -> Tensor:
    """Allocate like `to_uint8`. All frames need the same, so one represents all."""
    channels, frames, height, width = pixels_CTHW.shape
    _others_THWC = torch.empty(frames - 1, height, width, channels, dtype=torch.uint8)
    return to_uint8(pixels_CTHW[:, :1])


@remembered
def _encoding(
    settings: VAESettings,
    tiling: Tiling,
    sizes: GenerationSizes,
    num_frames: tuple[int, ...],
    dtype: torch.dtype,
    device_type: str,
) -> Need:
    with fake_device(device_type) as device:
        empty = partial(torch.empty, dtype=dtype, device=device)
        vae = fake_module(lambda: new_autoencoder(settings), device=device, dtype=dtype)
        vae.encoder = cast(Any, Repeated(vae.encoder))
        with TensorBytes(device_type=device.type) as counter:
            latents: list[Tensor] = []
            for frames in num_frames:
                pixels_1CTHW = empty(1, 3, frames, sizes.height, sizes.width)
                latents.append(vae.encode(pixels_1CTHW, tiling=tiling)[0])
            need = Need.of(counter)
            latents.clear()
            return need


def _on_rank(transformer: MMDiT, sizes: GenerationSizes) -> MMDiT:
    if sizes.mesh.tensor > 1:
        keep_largest_share(transformer, sizes.mesh.tensor)
    # The first block represents all blocks of its stack: it gets the largest rank of each layer.
    ranks: dict[str, int] = {}
    for path, rank in sizes.loras:
        first = in_first_block(path)
        ranks[first] = max(ranks.get(first, 0), rank)
    add_fake_loras(transformer, ranks.items())
    return transformer


def _repeated(blocks: nn.ModuleList) -> nn.ModuleList:
    return nn.ModuleList([Repeated(blocks[0])] * len(blocks) if len(blocks) else [])
