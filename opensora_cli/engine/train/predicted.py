"""Predicted time of a training step on GPUs that need not be in this machine, and the utilization that a run reaches.

A backward pass has twice the matmuls and traffic of its forward pass (with frozen weights, the same number of matmuls).
It has two and a half times the attention, whose scores flash attention computes again (Dao et al. 2022, arXiv
2205.14135). Gathered weights, reduced gradients, and copies of weights from page-locked host memory overlap with the
computation: the longer time counts.
"""

from collections.abc import Callable
from dataclasses import replace
from math import prod

import torch

from opensora_cli.core.device import device_name, is_gpu
from opensora_cli.core.device_names import GPU
from opensora_cli.core.dtypes import torch_dtype
from opensora_cli.engine.components.configs import mmdit_config, transformer_on_meta
from opensora_cli.engine.components.parallelize import exchanged_bytes
from opensora_cli.engine.encode.encoders import frozen_dtype
from opensora_cli.engine.encode.inputs import find_frozen_parts
from opensora_cli.engine.estimate.autoencoder import encoding_work
from opensora_cli.engine.estimate.links import Exchanged, Links
from opensora_cli.engine.estimate.predicted_time import (
    ATTENTION,
    COLLECTIVES,
    COPIES,
    ENCODING,
    TEXT,
    TRAFFIC,
    UPDATE,
    PredictedTime,
    Seconds,
    added,
    copied,
    kernel_seconds,
    times,
    total,
)
from opensora_cli.engine.estimate.text import text_work
from opensora_cli.engine.estimate.transformer import evaluation_work
from opensora_cli.engine.estimate.work import Work
from opensora_cli.engine.train.activations import ActivationPlan, largest_batch_shape, plan_activations
from opensora_cli.engine.train.build import count_parameters
from opensora_cli.engine.train.distribution import Distribution, mesh_shape, training_exchange
from opensora_cli.engine.train.frozen_weights import plan_frozen_weights
from opensora_cli.engine.train.objectives import find_objective
from opensora_cli.models.mmdit.config import MMDiTConfig
from opensora_cli.models.text.sizes import ClipSizes, T5Sizes
from opensora_cli.parallel.shares import MeshShape
from opensora_cli.settings.devices import Strategy
from opensora_cli.settings.enums import HostWeights
from opensora_cli.settings.hardware import GpuSettings, find_gpu
from opensora_cli.settings.train import TrainSettings
from opensora_cli.settings.train_loop import Checkpointing, Compute

ENCODE, PASSES, SHARING, STEP = "encode", "forward and backward", "sharing weights and gradients", "update"

_ATTENTION_BACKWARD = 2.5
_UPDATE_BYTES = 40
"""Bytes that AdamW reads and writes per trained parameter in fp32: weight and both moments twice, the gradient once,
and the gradient twice more for clipping."""
_FP32 = 4
_ON_CPU = ", updating weights on the CPU"
_DEQUANTIZED_BYTES = 3
"""Bytes to dequantize a weight: 8 bits are read, and 16 are written."""


def predict_step(settings: TrainSettings, gpu: GpuSettings) -> PredictedTime | None:
    """Return the seconds of a step on GPUs of this kind if all micro-batches have the largest shape.

    The result is None for autoencoders, whose times are not predicted.
    """
    if not settings.trains_transformer:
        return None
    shape = largest_batch_shape(settings)
    data_ranks = settings.parallel.data_ranks(settings.strategy)
    rounds = (settings.loop.micro_batches or data_ranks) // data_ranks
    passes = _passes(settings, gpu, plan_activations(settings))
    stages = {
        ENCODE: times(_encoding(settings, gpu), rounds),
        PASSES: times(passes, rounds),
        SHARING: _sharing(settings, gpu, computed=total(passes), rounds=rounds),
        STEP: _update(settings, gpu, rounds=rounds),
    }
    clips = f"{shape.batch_size} clips of {shape.num_frames} frames, {shape.width}x{shape.height}"
    return PredictedTime.of_stages(
        {name: seconds for name, seconds in stages.items() if seconds},
        gpu,
        devices=settings.parallel.world_size,
        of=f"a step of {rounds * data_ranks} micro-batches, each {clips}",
        left_out="reading clips, checkpoints" + _ON_CPU * settings.optimizer.offload_states,
    )


def _passes(settings: TrainSettings, gpu: GpuSettings, plan: ActivationPlan | None) -> Seconds:
    """Return the seconds of a forward and a backward pass of a rank, including recomputation."""
    config, dtype = mmdit_config(settings.model), torch_dtype(settings.precision.compute)
    forward = _forward(settings, config)
    products = 1 if settings.lora.is_on else 2
    backward = Work(
        product_flops=products * forward.product_flops,
        attention_flops=_ATTENTION_BACKWARD * forward.attention_flops,
        product_bytes=products * forward.product_bytes,
        traffic_bytes=2 * forward.traffic_bytes,
        kernels=2 * forward.kernels,
    )
    # In backward, gradients of keys and values in fp32 are sent in addition to keys and values.
    passes = [(config, forward, 1.0), (config, backward, 3.0)]
    computes_again = plan is not None and any(plan.checkpointed_blocks.values())
    if plan is not None and computes_again:
        double, single = plan.checkpointed_blocks.values()
        checkpointed = config.replace({"depth": double, "depth_single_blocks": single})
        again = _forward(settings, checkpointed)
        if plan.checkpointing is Checkpointing.SELECTIVE:
            again = replace(again, attention_flops=0.0)
        passes.append((checkpointed, again, 1.0))
    more = find_objective(settings).evaluations(settings)
    passes.append((config, forward * more, more))
    found: Seconds = {}
    for blocks, work, keys_and_values in passes:
        seconds = kernel_seconds(work, gpu, dtype)
        exchanged = _exchanged(settings, gpu, blocks)
        waited = exchanged.seconds(attention=seconds[ATTENTION], keys_and_values=keys_and_values)
        found = added(found, seconds, {COLLECTIVES: waited})
    computed, weights = total(found), plan_frozen_weights(settings)
    if plan is not None and plan.host_bytes:
        found = added(found, {COPIES: copied(gpu, 2 * plan.host_bytes, pinned=True)})
    if weights is not None and weights.fp8_storage:
        # Weights are dequantized in each forward pass of a block, and reused in its backward pass.
        dequantized = (1 + computes_again + more) * _DEQUANTIZED_BYTES * _all_numbers(settings)
        found = added(found, {TRAFFIC: gpu.memory_rate.seconds(dequantized)})
    if weights is not None and weights.host_weights is not None:
        # Weights are copied once for each forward pass, and again for backward.
        pinned = weights.host_weights is HostWeights.PINNED
        waited = copied(gpu, (2 + more) * weights.host_bytes, pinned=pinned)
        found = added(found, {COPIES: max(0.0, waited - computed) if pinned else waited})
    return found


def _forward(settings: TrainSettings, config: MMDiTConfig) -> Work:
    shape, dtype = largest_batch_shape(settings), torch_dtype(settings.precision.compute)
    tokens, captions = prod(shape.token_grid(settings)), settings.text.t5_max_length
    work = evaluation_work(config, tokens, captions, dtype, _of_clip(settings), training_exchange(settings))
    return work * shape.batch_size


def _of_clip(settings: TrainSettings) -> MeshShape:
    """Return the mesh of the ranks that share clips."""
    return replace(mesh_shape(settings.strategy, settings.parallel), replicate=1, shard=1)


def _exchanged(settings: TrainSettings, gpu: GpuSettings, config: MMDiTConfig) -> Exchanged:
    shape, mesh = largest_batch_shape(settings), _of_clip(settings)
    video_tokens = shape.batch_size * prod(shape.token_grid(settings))
    text_tokens = shape.batch_size * settings.text.t5_max_length
    itemsize = torch_dtype(settings.precision.compute).itemsize
    return Exchanged(
        config=config,
        mesh=mesh,
        links=Links(gpu, settings.parallel.ranks_per_node),
        video_tokens=video_tokens,
        text_tokens=text_tokens,
        itemsize=itemsize,
        for_heads=exchanged_bytes(
            training_exchange(settings),
            mesh,
            config,
            video_tokens=video_tokens,
            text_tokens=text_tokens,
            itemsize=itemsize,
        )
        if mesh.ulysses > 1
        else {},
    )


def _sharing(settings: TrainSettings, gpu: GpuSettings, *, computed: float, rounds: int) -> Seconds:
    """Return how long an update waits for weights and gradients, whose transfers overlap with `computed` seconds."""
    strategy, mesh = settings.strategy, mesh_shape(settings.strategy, settings.parallel)
    trained = count_parameters(settings) / mesh.tensor
    held = _all_numbers(settings) / mesh.tensor if settings.lora.is_on else trained
    sharing = mesh.shard * mesh.ring * mesh.ulysses if strategy.shards else 1
    gathers, scatters = _exchanges(strategy, rounds)
    more = rounds * find_objective(settings).evaluations(settings) if strategy.gathers_twice else 0.0
    gathered = (gathers + more) * held * torch_dtype(settings.precision.compute).itemsize
    scattered = scatters * trained * _FP32
    # Copies of the weights then sum their gradients.
    summed = 2 * (mesh.replicate - 1) / mesh.replicate * scattered / sharing
    links = Links(gpu, settings.parallel.ranks_per_node)
    travel = links.ring_seconds((sharing - 1) / sharing * (gathered + scattered), sharing * mesh.tensor)
    travel += links.ring_seconds(summed, mesh.size)
    return {COLLECTIVES: max(0.0, travel - computed)}


def _encoding(settings: TrainSettings, gpu: GpuSettings) -> Seconds:
    """Return how long a rank encodes the clips and captions of a micro-batch; empty with a cache."""
    if settings.train_mmdit.cache is not None:
        return {}
    shape, dtype = largest_batch_shape(settings), frozen_dtype(settings.train_mmdit, torch.device(GPU))
    parts, files, lengths = find_frozen_parts(settings), settings.train_mmdit.files, settings.text
    of_clip = encoding_work(settings.vae, shape.num_frames, shape.height, shape.width, dtype)
    of_captions = text_work(
        T5Sizes.of(parts[files.t5]),
        ClipSizes.of(parts[files.clip]),
        (lengths.t5_max_length, lengths.clip_max_length),
        dtype.itemsize,
        prompts=shape.batch_size,
    )
    return {
        ENCODING: shape.batch_size * total(kernel_seconds(of_clip, gpu, dtype)),
        TEXT: total(kernel_seconds(of_captions, gpu, dtype)),
    }


def _exchanges(strategy: Strategy, rounds: int) -> tuple[int, int]:
    """Return how often an update gathers weights, and how often it reduces gradients."""
    return 2 * rounds if strategy.gathers_twice else 1, 1 if strategy.reduces_once else rounds


def _update(settings: TrainSettings, gpu: GpuSettings, *, rounds: int) -> Seconds:
    """Return how long a rank updates its weights, or with states on the host, how long their copies take."""
    if settings.optimizer.offload_states:
        passes = sum(_exchanges(settings.strategy, rounds))
        return {COPIES: copied(gpu, _FP32 * passes * _own_numbers(settings), pinned=True)}
    return {UPDATE: gpu.memory_rate.seconds(_UPDATE_BYTES * _own_numbers(settings))}


def _all_numbers(settings: TrainSettings) -> int:
    """Return the number of parameters of a transformer, trained or not."""
    return sum(weight.numel() for weight in transformer_on_meta(settings.model).parameters())


def _own_numbers(settings: TrainSettings) -> float:
    """Return the number of trained parameters that a rank updates."""
    mesh = mesh_shape(settings.strategy, settings.parallel)
    sharing = mesh.shard * mesh.ring * mesh.ulysses * mesh.tensor if settings.strategy.shards else 1
    return count_parameters(settings) / sharing


def open_mfu(settings: TrainSettings, distribution: Distribution) -> Callable[[int, int, float], float] | None:
    """Return a function of samples, tokens and seconds that returns the model FLOPs utilization (MFU).

    The result is None if the peak is unknown: on a CPU, in fp32, and on a GPU that `configs/hardware` lacks.
    """
    if not settings.trains_transformer:
        return None
    peak = settings.watching.peak_tflops
    if peak is None and is_gpu(distribution.device) and settings.precision.compute is Compute.BF16:
        gpu = find_gpu(device_name(distribution.device))
        peak = None if gpu is None else gpu.bf16_tflops
    if peak is None:
        return None
    all_devices = peak * 1e12 * distribution.ranks
    config, text_tokens, is_frozen = mmdit_config(settings.model), settings.text.t5_max_length, settings.lora.is_on

    def mfu(samples: int, tokens: int, seconds: float) -> float:
        # Clips of different sizes count as if they had the same size, which slightly underestimates the FLOPs.
        flops = samples * training_flops(config, tokens // samples, text_tokens, is_frozen=is_frozen)
        return flops / (seconds * all_devices)

    return mfu


def training_flops(config: MMDiTConfig, latent_tokens: int, text_tokens: int, *, is_frozen: bool = False) -> float:
    """Return the FLOPs of forward and backward of one clip.

    Each matmul has two gradients (Kaplan et al. 2020, arXiv 2001.08361), or one if only an adapter is trained, whose
    own operations, a few percent, do not count. Recomputed activations count once (Chowdhery et al. 2022, arXiv
    2204.02311, appendix B).
    """
    work = evaluation_work(config, latent_tokens, text_tokens, torch.bfloat16)
    return (2 if is_frozen else 3) * work.product_flops + 3 * work.attention_flops
