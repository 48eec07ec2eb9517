"""Predict the time of a plan on any GPUs, from its operations and bytes.

Kernels of a GPU and the exchanges of Ulysses and tensor parallelism run one after the other. The passes of ring
attention overlap with attention, and copies of blocks from pinned memory overlap with all kernels. Only their
additional time counts.
"""

from dataclasses import replace

from opensora_cli.core.choices import LinearProducts
from opensora_cli.core.device import is_gpu
from opensora_cli.core.exceptions import HardwareError, RequestError
from opensora_cli.engine.components.architectures import count_decoder_tiles, mmdit_config
from opensora_cli.engine.components.weights import Component
from opensora_cli.engine.estimate.autoencoder import decoding_work, encoding_work
from opensora_cli.engine.estimate.generation import reference_frames, text_work
from opensora_cli.engine.estimate.offload import DECODE, DENOISE, ENCODE, TEXT, OffloadPlan
from opensora_cli.engine.estimate.predicted_time import (
    ATTENTION,
    COLLECTIVES,
    DECODING,
    ENCODING,
    Links,
    PredictedTime,
    Seconds,
    autoencoder_seconds,
    copied,
    exchange_seconds,
    kernel_seconds,
)
from opensora_cli.engine.estimate.transformer import evaluation_work
from opensora_cli.engine.estimate.weights import bytes_of_blocks, streamed_bytes
from opensora_cli.engine.generate.chain import Chain
from opensora_cli.engine.generate.plan import SEGMENT, VIDEO, Plan
from opensora_cli.models.text.sizes import ClipSizes, T5Sizes
from opensora_cli.parallel.shares import shares
from opensora_cli.settings.devices import HostWeights
from opensora_cli.settings.hardware import GpuSettings, PlannedMachine, find_gpu

LOAD = "load"


def predict_time(chain: Chain, gpu: GpuSettings) -> PredictedTime:
    """Return the predicted seconds of every stage of a chain on GPUs of this kind."""
    samples, stages = chain.settings.num_samples, dict[str, Seconds]()
    for role, plan in chain.by_role.items():
        count = sum(job.role == role for job in chain.jobs)
        own = {LOAD: loading(plan, gpu)}
        if not plan.decodes_only:
            evaluations = plan.evaluations_after(0, ranks=plan.mesh.guidance)
            sampled = evaluation(plan, gpu) * (evaluations * count * samples)
            own |= {TEXT: text(plan, gpu), ENCODE: encoding(plan, gpu) * count, DENOISE: sampled}
        own[DECODE] = decoding(plan, gpu) * (count * samples)
        for name, seconds in own.items():
            # Segments use the models and the prompts of the video.
            if seconds and not (role == SEGMENT and name in (LOAD, TEXT)):
                stages[name if role == VIDEO else f"{role} {name}"] = seconds
    return PredictedTime.of_stages(
        stages,
        gpu,
        devices=chain.video.mesh.size,
        of="for 1 sample" if samples == 1 else f"for {samples} samples",
        left_out="reading files, writing the video",
    )


def predict_known_time(chain: Chain, machine: PlannedMachine | None) -> PredictedTime | None:
    """Return the predicted time on `machine`, or on this machine; None on a CPU, and if the GPU's speed is unknown."""
    if machine is not None:
        return predict_time(chain, machine.gpu) if machine.has_speed else None
    hardware = chain.video.hardware
    gpu = find_gpu(hardware.device_name) if is_gpu(hardware.device) else None
    return None if gpu is None else predict_time(chain, gpu)


def loading(plan: Plan, gpu: GpuSettings) -> Seconds:
    """Return the seconds in which weights are copied to the GPU once, from mapped files in the page cache."""
    dtype, config, offload = plan.hardware.dtype, mmdit_config(plan.settings.model), plan.offload
    sizes = {name: count * dtype.itemsize for name, count in plan.parameters.items() if name in plan.components}
    if Component.TRANSFORMER in sizes:
        plain = OffloadPlan(modulation_on_host=offload.modulation_on_host)
        saved = sum(bytes_of_blocks(config, dtype, plain)) - sum(bytes_of_blocks(config, dtype, offload))
        # Streamed weights count with the evaluations.
        later = streamed_bytes(config, dtype, offload, tensor=1)
        sizes[Component.TRANSFORMER] = max(0, sizes[Component.TRANSFORMER] - saved - later)
    return copied(gpu, sum(sizes.values()), pinned=False)


def text(plan: Plan, gpu: GpuSettings) -> Seconds:
    """Return the seconds in which the prompt and the negative prompt are encoded; ranks share T5."""
    paths, lengths, dtype = plan.weights.paths, plan.settings.text, plan.hardware.dtype
    t5, clip = T5Sizes.of(paths.get(Component.T5)), ClipSizes.of(paths.get(Component.CLIP))
    work = text_work(t5, clip, (lengths.t5_max_length, lengths.clip_max_length), dtype.itemsize)
    sharing = plan.mesh.size if plan.mesh.size <= t5.num_heads and not plan.offload.stream_text else 1
    return Seconds({TEXT: kernel_seconds(work, gpu, dtype).total / sharing})


def encoding(plan: Plan, gpu: GpuSettings) -> Seconds:
    """Return the seconds in which the first rank encodes references and a draft; empty without them."""
    drafted = (plan.num_frames,) if plan.start else ()
    dtype, size = plan.hardware.dtype, (plan.height, plan.width)
    works = (encoding_work(plan.settings.vae, frames, *size, dtype) for frames in (*reference_frames(plan), *drafted))
    seconds = sum(autoencoder_seconds(work, gpu, dtype) for work in works)
    return Seconds({ENCODING: seconds} if seconds else {})


def evaluation(plan: Plan, gpu: GpuSettings) -> Seconds:
    """Return the seconds of one evaluation of the transformer, for one clip and one branch of guidance."""
    settings, dtype, config = plan.settings, plan.hardware.dtype, mmdit_config(plan.settings.model)
    linear, text_tokens = settings.precision.linear, settings.text.t5_max_length
    on_clip = replace(plan.mesh, guidance=1)
    work = evaluation_work(config, plan.video_tokens, text_tokens, dtype, on_clip, linear)
    found = kernel_seconds(work, gpu, dtype, eight_bit_tflops=_eight_bit_tflops(gpu, linear))
    computed = found.total
    found[COLLECTIVES] = exchange_seconds(
        config,
        plan.mesh,
        plan.exchange,
        Links(gpu, settings.parallel.ranks_per_node),
        video_tokens=plan.video_tokens,
        text_tokens=text_tokens,
        itemsize=dtype.itemsize,
        attention=found[ATTENTION],
    )
    if streamed := streamed_bytes(config, dtype, plan.offload, tensor=plan.mesh.tensor):
        found += copied(gpu, streamed, pinned=plan.offload.host_weights is HostWeights.PINNED, behind=computed)
    return found


def _eight_bit_tflops(gpu: GpuSettings, linear: LinearProducts) -> float | None:
    if linear is LinearProducts.FP8 and gpu.fp8_tflops is None:
        raise HardwareError(f"precision.linear=fp8 needs a GPU with fp8_tflops, and {gpu.name} has none")
    if linear is LinearProducts.INT8 and gpu.int8_tops is None:
        raise RequestError(f"precision.linear=int8 needs int8_tops in the file of {gpu.name} to predict its time")
    return {LinearProducts.FP8: gpu.fp8_tflops, LinearProducts.INT8: gpu.int8_tops}.get(linear)


def decoding(plan: Plan, gpu: GpuSettings) -> Seconds:
    """Return the seconds in which one clip is decoded; ranks decode different tiles."""
    dtype, vae = plan.hardware.dtype, plan.settings.vae
    whole = autoencoder_seconds(decoding_work(vae, plan.latent_shape, dtype), gpu, dtype)
    tiles = count_decoder_tiles(plan.latent_shape, vae)
    return Seconds({DECODING: whole * shares(tiles, plan.mesh.size)[0] / tiles})
