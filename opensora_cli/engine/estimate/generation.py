"""Device memory of a generation, stage by stage, before anything is loaded.

Nothing is fitted: the real modules and the sampling loop run on outlines, and their allocations are counted. The
blocks of a stack are equal and run one after the other, so one represents all.

Counted are weights after offloading, inputs, outputs and intermediate results. These include the output and the sums
of fused attention, and the workspace of cuDNN's convolutions. Not counted are workspaces of other kernels (such as
matrix products of cuBLAS), the CUDA context, and the rounding and fragmentation of an allocator.
"""

from typing import TYPE_CHECKING

from opensora_cli.core.choices import LinearProducts
from opensora_cli.core.conditions import reference_parts
from opensora_cli.engine.components.architectures import mmdit_config
from opensora_cli.engine.components.loras import lora_ranks
from opensora_cli.engine.components.velocity import modulation_comes_first
from opensora_cli.engine.components.weights import Component
from opensora_cli.engine.estimate.autoencoder import decoding_need, encoding_need
from opensora_cli.engine.estimate.offload import AUTOENCODER, DECODE, DENOISE, ENCODE, OffloadPlan, StageMemory
from opensora_cli.engine.estimate.text import text_memory
from opensora_cli.engine.estimate.transformer import Sampling, sampling_need
from opensora_cli.engine.estimate.weights import (
    dequantized_bytes,
    largest_modulation_bytes,
    transformer_bytes,
    transformer_on_cpu,
)
from opensora_cli.sampling.guidance import busiest
from opensora_cli.sampling.step_cache import one_of_each_phase
from opensora_cli.settings.devices import OffloadMode
from opensora_cli.settings.generate import GenerateSettings

if TYPE_CHECKING:
    from opensora_cli.engine.generate.plan import Plan


def estimate_generation(plan: "Plan", offload: OffloadPlan) -> tuple[StageMemory, ...]:
    """Return the device memory of each stage of a plan with this offload, in the order of execution.

    Repeated counts are cached, so that many offload plans for one video cost little more than one. Text encoders
    without a folder count like the released ones. Raises RequestError if sizes in the settings contradict each other.
    """
    vae, dtype, device_type, files = plan.settings.vae, plan.hardware.dtype, plan.hardware.device.type, plan.files
    weights = {component: count * dtype.itemsize for component, count in plan.parameters.items()}
    vae_mapped = 0
    if files is not None:
        weights[Component.VAE], vae_mapped = files[Component.VAE].total.held()
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
    decode = StageMemory(DECODE, weights[Component.VAE], decoding.data, decoding.activations, vae_mapped)
    if plan.decodes_only:
        return (decode,)
    stages = [text_memory(plan, streamed=offload.stream_text)]
    frames = reference_frames(plan)
    encoded = (*frames, plan.settings.video.num_frames) if plan.start else frames
    if encoded:
        encoding = encoding_need(vae, encoded, (plan.height, plan.width), dtype, device_type)
        stages.append(StageMemory(ENCODE, weights[Component.VAE], encoding.data, encoding.activations, vae_mapped))
    kept = ((AUTOENCODER, weights[Component.VAE]),) if frames and offload.mode is OffloadMode.NONE else ()
    return *stages, _denoise(plan, offload, weights[Component.TRANSFORMER], kept), decode


def _denoise(plan: "Plan", offload: OffloadPlan, whole: int, kept: tuple[tuple[str, int], ...]) -> StageMemory:
    """Return the memory of denoising with `whole` bytes of the transformer's weights, beside the `kept` models."""
    settings, dtype, device_type = plan.settings, plan.hardware.dtype, plan.hardware.device.type
    config, tensor, loras = mmdit_config(settings.model), plan.mesh.tensor, lora_ranks(plan.loras)
    need = sampling_need(
        Sampling(
            config=config,
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
            exchange=plan.exchange,
            dtype=dtype,
            device_type=device_type,
        )
    )
    mapped = 0
    if plan.files is None:
        own = transformer_bytes(config, whole, dtype, offload, tensor=tensor, loras=loras)
    else:
        files = plan.files[Component.TRANSFORMER]
        own, mapped = transformer_on_cpu(config, files, dtype, offload, tensor=tensor, loras=loras)
    workspace, computed = dequantized_bytes(config, dtype, offload, tensor=tensor), need.activations
    # If products are in 8 bits, modulation alone is dequantized, before a block computes anything else.
    computed = computed + workspace if offload.linear is LinearProducts.EXACT else max(computed, workspace)
    if offload.modulation_on_host and device_type != "cpu":
        # Its weights come one layer after the other, before anything else is computed.
        computed = max(computed, largest_modulation_bytes(config, dtype))
    return StageMemory(DENOISE, own + sum(size for _, size in kept), need.data, computed, mapped, kept)


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
