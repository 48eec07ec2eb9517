"""Predicted time of a plan on any GPUs, from its operations and bytes.

One after the other run the kernels of a GPU and the exchanges of Ulysses and of tensor parallelism. Beside kernels run
the passes of ring attention (beside attention alone) and copies of blocks from page-locked memory: of these, what takes
longer than what they run beside counts.
"""

from dataclasses import replace

from opensora_cli.core.exceptions import HardwareError, RequestError
from opensora_cli.core.linear_products import LinearProducts
from opensora_cli.engine.components.autoencoders import count_decoder_tiles
from opensora_cli.engine.components.configs import mmdit_config
from opensora_cli.engine.components.weights import Component
from opensora_cli.engine.estimate.generation import reference_frames
from opensora_cli.engine.estimate.generation_work import decoding_work, encoding_work, evaluation_work, text_work
from opensora_cli.engine.estimate.links import Exchanged, Links
from opensora_cli.engine.estimate.offload import DECODE, DENOISE, ENCODE, OffloadPlan
from opensora_cli.engine.estimate.offload import TEXT as TEXT_STAGE
from opensora_cli.engine.estimate.predicted_time import (
    ATTENTION,
    COLLECTIVES,
    COPIES,
    DECODING,
    ENCODING,
    TEXT,
    PredictedTime,
    Seconds,
    added,
    autoencoder_seconds,
    copied,
    kernel_seconds,
    times,
    total,
)
from opensora_cli.engine.estimate.transformer import bytes_of_blocks, modulation_bytes, streamed_bytes
from opensora_cli.engine.generate.plan import SEGMENT, VIDEO, Chain, Plan
from opensora_cli.models.text.sizes import ClipSizes, T5Sizes
from opensora_cli.parallel.shares import shares
from opensora_cli.settings.enums import HostWeights
from opensora_cli.settings.hardware import GpuSettings

LOAD = "load"
_LEFT_OUT = "reading files, writing the video"


def predict_time(chain: Chain, gpu: GpuSettings) -> PredictedTime:
    """Return the predicted seconds of every stage of a chain on GPUs of this kind."""
    clips = chain.num_samples
    return PredictedTime.of_stages(
        _stages(chain, gpu),
        gpu,
        devices=chain.video.mesh.size,
        of="for 1 sample" if clips == 1 else f"for {clips} samples",
        left_out=_LEFT_OUT,
    )


def _stages(chain: Chain, gpu: GpuSettings) -> dict[str, Seconds]:
    found: dict[str, Seconds] = {}
    for role, plan in dict(chain.jobs).items():
        clips = chain.num_samples * sum(job.role == role for job in chain.jobs)
        prefix = "" if role == VIDEO else f"{role} "
        own = {} if role == SEGMENT else {LOAD: loading(plan, gpu)}
        if not plan.decodes_only:
            if role != SEGMENT:
                own[TEXT_STAGE] = text(plan, gpu)
            encoded = encoding(plan, gpu)
            if encoded:
                own[ENCODE] = encoded if role != SEGMENT else times(encoded, clips // chain.num_samples)
            evaluated = times(evaluation(plan, gpu), clips * plan.evaluations_on_a_rank)
            own[DENOISE] = added(evaluated, times(modulation(plan, gpu), clips))
        own[DECODE] = times(decoding(plan, gpu), clips)
        found |= {f"{prefix}{name}": seconds for name, seconds in own.items()}
    return found


def loading(plan: Plan, gpu: GpuSettings) -> Seconds:
    """Return how long weights take to come to the GPU once, from mapped files that are in the page cache."""
    itemsize = plan.hardware.dtype.itemsize
    sizes = {name: count * itemsize for name, count in plan.fitting.parameters.items() if name in plan.components}
    config = mmdit_config(plan.settings.model)
    if Component.TRANSFORMER in sizes:
        if plan.offload.in_8_bits:
            before, after = (
                sum(bytes_of_blocks(config, plan.hardware.dtype, offload))
                for offload in (OffloadPlan(modulation_on_host=plan.offload.modulation_on_host), plan.offload)
            )
            sizes[Component.TRANSFORMER] += after - before
        # Those that are streamed, or come before the first step, count where they are used.
        streamed = streamed_bytes(config, plan.hardware.dtype, plan.offload, tensor=1)
        if plan.offload.modulation_on_host:
            streamed += modulation_bytes(config, plan.hardware.dtype)
        sizes[Component.TRANSFORMER] = max(0, sizes[Component.TRANSFORMER] - streamed)
    return {COPIES: copied(gpu, sum(sizes.values()), pinned=False)}


def modulation(plan: Plan, gpu: GpuSettings) -> Seconds:
    """Return how long its weights take to come from the host, once for each sample."""
    if not plan.offload.modulation_on_host:
        return {}
    size = modulation_bytes(mmdit_config(plan.settings.model), plan.hardware.dtype)
    if plan.offload.fp8_storage:
        size //= plan.hardware.dtype.itemsize
    return {COPIES: copied(gpu, size, pinned=False)}


def text(plan: Plan, gpu: GpuSettings) -> Seconds:
    """Return how long the prompt and the negative prompt take, of which ranks share T5."""
    paths, lengths = plan.weights.paths, plan.settings.text
    t5, clip = T5Sizes.of(paths.get(Component.T5)), ClipSizes.of(paths.get(Component.CLIP))
    dtype = plan.hardware.dtype
    work = text_work(t5, clip, (lengths.t5_max_length, lengths.clip_max_length), dtype.itemsize)
    sharing = plan.mesh.size if plan.mesh.size <= t5.num_heads and not plan.offload.stream_text else 1
    return {TEXT: total(kernel_seconds(work, gpu, dtype)) / sharing}


def encoding(plan: Plan, gpu: GpuSettings) -> Seconds:
    """Return how long the first rank takes to encode what is given, and a draft."""
    sizes = plan.fitting.sizes
    lengths = reference_frames(plan.settings, sizes) + ((plan.num_frames,) if sizes.has_draft else ())
    dtype, size = plan.hardware.dtype, (plan.height, plan.width)
    works = (encoding_work(plan.settings.vae, frames, *size, dtype) for frames in lengths)
    seconds = sum(autoencoder_seconds(work, gpu, dtype) for work in works)
    return {ENCODING: seconds} if seconds else {}


def evaluation(plan: Plan, gpu: GpuSettings) -> Seconds:
    """Return how long the transformer takes for one clip and one branch of guidance."""
    settings, dtype = plan.settings, plan.hardware.dtype
    config = mmdit_config(settings.model)
    of_clip = replace(plan.mesh, guidance=1)
    linear, text_tokens = settings.precision.linear, settings.text.t5_max_length
    work = evaluation_work(config, plan.video_tokens, text_tokens, dtype, of_clip, plan.exchange, linear)
    found = kernel_seconds(work, gpu, dtype, eight_bit_tflops=_eight_bit_tflops(gpu, linear))
    computed = total(found)
    found[COLLECTIVES] = _exchanged(plan, gpu, attention=found[ATTENTION])
    streamed = streamed_bytes(config, dtype, plan.offload, tensor=plan.mesh.tensor)
    if streamed:
        pinned = plan.offload.host_weights is HostWeights.PINNED
        waited = copied(gpu, streamed, pinned=pinned)
        found[COPIES] = max(0.0, waited - computed) if pinned else waited
    return found


def _eight_bit_tflops(gpu: GpuSettings, linear: LinearProducts) -> float | None:
    if linear is LinearProducts.FP8 and gpu.fp8_tflops is None:
        raise HardwareError(
            f"precision.linear=fp8 needs products that {gpu.name} does not have: its fp8_tflops are none",
            hint="use --set precision.linear=int8",
        )
    if linear is LinearProducts.INT8 and gpu.int8_tops is None:
        raise RequestError(
            f"the time that precision.linear=int8 takes is not known: the file of {gpu.name} has no int8_tops",
            hint="write the peak of its data sheet there, of dense products",
        )
    return {LinearProducts.FP8: gpu.fp8_tflops, LinearProducts.INT8: gpu.int8_tops}.get(linear)


def decoding(plan: Plan, gpu: GpuSettings, *, shared: bool = True) -> Seconds:
    """Return how long one clip takes to decode; with `shared`, ranks have tiles of their own."""
    dtype, vae = plan.hardware.dtype, plan.settings.vae
    whole = autoencoder_seconds(decoding_work(vae, plan.latent_shape, dtype), gpu, dtype)
    tiles = count_decoder_tiles(plan.latent_shape, vae)
    share = shares(tiles, plan.mesh.size)[0] / tiles if shared else 1.0
    return {DECODING: whole * share}


def _exchanged(plan: Plan, gpu: GpuSettings, *, attention: float) -> float:
    """Return how long a rank waits for others in an evaluation, whose attention takes so many seconds."""
    planned = plan.planned_exchange
    exchanged = Exchanged(
        config=mmdit_config(plan.settings.model),
        mesh=plan.mesh,
        links=Links(gpu, plan.settings.parallel.ranks_per_node),
        video_tokens=plan.video_tokens,
        text_tokens=plan.settings.text.t5_max_length,
        itemsize=plan.hardware.dtype.itemsize,
        for_heads={} if planned is None else planned.bytes_per_evaluation,
    )
    return exchanged.seconds(attention=attention) + exchanged.between_branches()
