"""Device memory of a generation, stage by stage, before anything is loaded.

Nothing is fitted: the real modules and the sampling loop run on outlines, and their allocations are counted. The
blocks of a stack are equal and run one after the other, so one represents all.

Counted are weights after offloading, inputs, outputs and intermediate results. These include the output and the sums
of fused attention, and the workspace of cuDNN's convolutions. Not counted are workspaces of other kernels (such as
matrix products of cuBLAS), the weight that is dequantized at a time, the CUDA context, and the rounding and
fragmentation of an allocator.
"""

from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING

import torch

from opensora_cli.core.conditions import reference_parts
from opensora_cli.engine.components.architectures import STREAMED_LAYERS, mmdit_config
from opensora_cli.engine.components.loras import lora_ranks
from opensora_cli.engine.components.parallelize import largest_share
from opensora_cli.engine.components.velocity import modulation_comes_first
from opensora_cli.engine.components.weights import Component
from opensora_cli.engine.estimate.autoencoder import decoding_need, encoding_need
from opensora_cli.engine.estimate.fake_tensors import Need, Work, fake_device, fake_module
from opensora_cli.engine.estimate.offload import AUTOENCODER, DECODE, DENOISE, ENCODE, TEXT, OffloadPlan, StageMemory
from opensora_cli.engine.estimate.transformer import sampling_need
from opensora_cli.engine.estimate.weights import transformer_bytes, transformer_on_cpu
from opensora_cli.memory.counting import TensorBytes
from opensora_cli.memory.host_weights import aligned, streaming_bytes
from opensora_cli.models.text.clip import ClipTextModel
from opensora_cli.models.text.sizes import ClipSizes, T5Sizes
from opensora_cli.models.text.t5 import T5Model, t5_linears
from opensora_cli.sampling.guidance import busiest
from opensora_cli.sampling.step_cache import one_of_each_phase
from opensora_cli.settings.devices import OffloadMode
from opensora_cli.settings.generate import GenerateSettings

if TYPE_CHECKING:
    from opensora_cli.engine.generate.plan import Plan

_TEXTS = 2
"""The prompt and the negative prompt."""


def estimate_generation(plan: "Plan", offload: OffloadPlan) -> tuple[StageMemory, ...]:
    """Return the device memory of each stage of a plan with this offload, in the order of execution.

    Repeated counts are cached, so that many offload plans for one video cost little more than one. Text encoders
    without a folder count like the released ones. Raises RequestError if sizes in the settings contradict each other.
    """
    vae, dtype, device_type, files = plan.settings.vae, plan.hardware.dtype, plan.hardware.device.type, plan.files
    vae_bytes, vae_mapped = plan.parameters[Component.VAE] * dtype.itemsize, 0
    if files is not None:
        vae_bytes, vae_mapped = files[Component.VAE].held(dtype)
    decoding = decoding_need(
        vae,
        plan.latent_shape,
        (plan.height, plan.width),
        dtype,
        device_type,
        chunk_frames=offload.chunk_frames,
        # On a CPU the host is the device itself.
        store_on_host=offload.store_on_host and device_type != "cpu",
    )
    decode = StageMemory(DECODE, vae_bytes, decoding.data, decoding.activations, vae_mapped)
    if plan.decodes_only:
        return (decode,)
    stages = [_text(plan, streamed=offload.stream_text)]
    frames = reference_frames(plan)
    encoded = (*frames, plan.settings.video.num_frames) if plan.start else frames
    if encoded:
        encoding = encoding_need(vae, encoded, (plan.height, plan.width), dtype, device_type)
        stages.append(StageMemory(ENCODE, vae_bytes, encoding.data, encoding.activations, vae_mapped))
    kept = ((AUTOENCODER, vae_bytes),) if frames and offload.mode is OffloadMode.NONE else ()
    return *stages, _denoise(plan, offload, kept), decode


def _text(plan: "Plan", *, streamed: bool) -> StageMemory:
    """Return the memory of the stage that encodes the prompts. Encoders without a folder have the released sizes.

    With `streamed` T5's layers move to the device one by one; otherwise ranks share them, if there are enough heads.
    """
    text, dtype, files, ranks = plan.settings.text, plan.hardware.dtype, plan.files, plan.mesh.size
    t5_sizes = T5Sizes.of(plan.weights.paths.get(Component.T5))
    clip_sizes = ClipSizes.of(plan.weights.paths.get(Component.CLIP))
    slots, whole, share = _t5_layers(t5_sizes, dtype.itemsize, ranks)
    held = streaming_bytes(slots, resident=STREAMED_LAYERS) if streamed else share
    own_bytes, mapped_bytes = plan.parameters[Component.T5] * dtype.itemsize - whole + held, 0
    clip_bytes, clip_mapped = plan.parameters[Component.CLIP] * dtype.itemsize, 0
    if files is not None:
        clip_bytes, clip_mapped = files[Component.CLIP].held(dtype)
        if streamed:
            mapped_bytes = files[Component.T5].mapped_bytes
        elif ranks == 1:
            own_bytes, mapped_bytes = files[Component.T5].held(dtype)
    t5_need = _text_need(t5_sizes, text.t5_max_length, dtype)
    # A longer length is refused when the encoder is loaded.
    clip_need = _text_need(clip_sizes, min(text.clip_max_length, clip_sizes.max_length), dtype)
    # Texts are encoded one by one, each by T5 and then by CLIP, and their embeddings are joined at the end. Earlier
    # results stay while the next text is encoded.
    one = t5_need.data + clip_need.data
    last = max(t5_need.activations, clip_need.data + clip_need.activations)
    peak = max((_TEXTS - 1) * one + t5_need.data + last, 2 * _TEXTS * one)
    return StageMemory(TEXT, own_bytes + clip_bytes, _TEXTS * one, peak - _TEXTS * one, mapped_bytes + clip_mapped)


def _t5_layers(sizes: T5Sizes, itemsize: int, ranks: int) -> tuple[list[int], int, int]:
    """Return the bytes of each T5 layer in a slot, of all layers outside slots, and of a rank's share of all."""
    weights = sizes.layer_weights
    slots = [sum(aligned(count * itemsize) for count in weights.values())] * sizes.num_layers
    slots[0] += aligned(sizes.position_biases * itemsize)
    whole = (sizes.num_layers * sum(weights.values()) + sizes.position_biases) * itemsize
    if ranks > sizes.num_heads:
        return slots, whole, whole
    elsewhere = sum(weights[linear.path] * (1 - largest_share(linear, ranks)) for linear in t5_linears(sizes))
    return slots, whole, whole - int(sizes.num_layers * elsewhere * itemsize)


@lru_cache(maxsize=64)
def _text_need(sizes: T5Sizes | ClipSizes, length: int, dtype: torch.dtype) -> Need:
    """Return the need of an encoder for a text of `length` tokens.

    Two layers represent all, because every layer frees what it allocates except its result.
    """
    few = replace(sizes, num_layers=min(sizes.num_layers, 2))
    with fake_device("cpu") as device:
        encoder = fake_module(
            lambda: T5Model(few) if isinstance(few, T5Sizes) else ClipTextModel(few), device=device, dtype=dtype
        )
        with TensorBytes() as counter:
            ids_1L = torch.empty((1, length), dtype=torch.int64, device=device)
            embeds = encoder(ids_1L)
            del ids_1L
            need = Need.of(counter)
            del embeds
            return need


def _denoise(plan: "Plan", offload: OffloadPlan, kept: tuple[tuple[str, int], ...]) -> StageMemory:
    """Return the memory of denoising beside the `kept` models."""
    settings, dtype, device_type = plan.settings, plan.hardware.dtype, plan.hardware.device.type
    config, tensor, loras = mmdit_config(settings.model), plan.mesh.tensor, lora_ranks(plan.loras)
    need = sampling_need(
        config,
        latent_shape=plan.latent_shape,
        text_length=settings.text.t5_max_length,
        mode=plan.mode,
        lengths=plan.settings.condition.lengths,
        causal=settings.vae.grid.is_causal,
        scales=busiest(plan.scales),
        solver=settings.sampling.solver,
        cached=one_of_each_phase(plan.scales) if settings.sampling.step_cache else (),
        num_times=settings.sampling.num_inference_steps + 1 if computes_modulation_first(settings) else 0,
        chunk_tokens=offload.chunk_tokens,
        linear=offload.linear,
        loras=loras,
        attention="sdpa" if plan.attention is None else plan.attention.backend,
        mesh=plan.mesh,
        dtype=dtype,
        device_type=device_type,
    )
    mapped = 0
    if plan.files is None:
        own = transformer_bytes(config, dtype, offload, tensor=tensor, loras=loras)
    else:
        files = plan.files[Component.TRANSFORMER]
        own, mapped = transformer_on_cpu(config, files, dtype, offload, tensor=tensor, loras=loras)
    return StageMemory(DENOISE, own + sum(size for _, size in kept), need.data, need.activations, mapped, kept)


def computes_modulation_first(settings: GenerateSettings) -> bool:
    """Return whether modulation of all steps is computed before the first step. Compiled blocks do not do this."""
    num_times = settings.sampling.num_inference_steps + 1
    return not settings.compile and modulation_comes_first(num_times, mmdit_config(settings.model))


def reference_frames(plan: "Plan") -> tuple[int, ...]:
    """Return the number of encoded frames of each reference."""
    grid = plan.settings.vae.grid
    parts = reference_parts(
        plan.mode,
        causal=grid.is_causal,
        temporal_compression=grid.time_compression_ratio,
        lengths=plan.settings.condition.lengths,
    )
    return tuple(part.num_frames for part in parts)


def text_work(t5: T5Sizes, clip: ClipSizes, lengths: tuple[int, int], itemsize: int, *, prompts: int = 2) -> Work:
    """Return the work of encoding prompts of `lengths` tokens in T5 and CLIP, by arithmetic like their memory.

    The weights are read once for each prompt.
    """
    weights = t5.num_layers * sum(t5.layer_weights.values()), clip.parameters
    tokens = lengths[0], min(lengths[1], clip.max_length)
    widths = t5.num_layers * t5.num_heads * t5.d_kv, clip.num_layers * clip.hidden_size
    return Work(
        product_flops=prompts * 2 * sum(map(prod, zip(weights, tokens, strict=True))),
        attention_flops=prompts * sum(4 * length**2 * width for length, width in zip(tokens, widths, strict=True)),
        product_bytes=prompts * sum(weights) * itemsize,
    )
