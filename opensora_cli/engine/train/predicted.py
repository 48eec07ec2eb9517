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

from opensora_cli.core.device import device_name, is_gpu, torch_dtype
from opensora_cli.core.device_names import GPU
from opensora_cli.engine.components.architectures import mmdit_config, transformer_on_meta
from opensora_cli.engine.encode.clips import frozen_dtype
from opensora_cli.engine.encode.inputs import find_frozen_parts
from opensora_cli.engine.estimate.autoencoder import encoding_work
from opensora_cli.engine.estimate.fake_tensors import Work
from opensora_cli.engine.estimate.generation import text_work
from opensora_cli.engine.estimate.predicted_time import (
    ATTENTION,
    COLLECTIVES,
    ENCODING,
    TEXT,
    UPDATE,
    Links,
    PredictedTime,
    Seconds,
    autoencoder_seconds,
    copied,
    exchange_seconds,
    kernel_seconds,
)
from opensora_cli.engine.estimate.transformer import evaluation_work
from opensora_cli.engine.train.build import count_parameters
from opensora_cli.engine.train.distribution import Distribution, mesh_shape, training_exchange
from opensora_cli.engine.train.memory import largest_batch_shape, layer_values, plan_activations, plan_frozen_weights
from opensora_cli.engine.train.objectives import find_objective
from opensora_cli.models.mmdit.config import MMDiTConfig
from opensora_cli.models.text.sizes import ClipSizes, T5Sizes
from opensora_cli.settings.devices import HostWeights
from opensora_cli.settings.hardware import GpuSettings, find_gpu
from opensora_cli.settings.train import TrainSettings
from opensora_cli.settings.train_sections import Checkpointing, Compute

ENCODE, PASSES, SHARING, STEP = "encode", "forward and backward", "sharing weights and gradients", "update"

_ATTENTION_BACKWARD = 2.5
_UPDATE_BYTES = 40
"""Bytes that AdamW reads and writes per trained parameter in fp32: weight and both moments twice, the gradient once,
and the gradient twice more for clipping."""
_FP32 = 4
_ON_CPU = ", updating weights on the CPU"


def predict_step(settings: TrainSettings, gpu: GpuSettings) -> PredictedTime | None:
    """Return the seconds of a step on GPUs of this kind if all micro-batches have the largest shape.

    The result is None for autoencoders, whose times are not predicted.
    """
    if not settings.trains_transformer:
        return None
    step = _Step(settings, gpu)
    shape, passes = step.shape, step.passes()
    stages = {
        ENCODE: step.encoding() * step.rounds,
        PASSES: passes * step.rounds,
        SHARING: step.sharing(computed=passes.total),
        STEP: step.update(),
    }
    clips = f"{shape.batch_size} clips of {shape.num_frames} frames, {shape.width}x{shape.height}"
    micro_batches = step.rounds * settings.parallel.data_ranks(settings.strategy)
    return PredictedTime.of_stages(
        {name: seconds for name, seconds in stages.items() if seconds},
        gpu,
        devices=settings.parallel.world_size,
        of=f"a step of {micro_batches} micro-batches, each {clips}",
        left_out="reading clips, checkpoints" + _ON_CPU * settings.optimizer.offload_states,
    )


class _Step:
    """Step of a rank on a kind of GPU, whose methods return the seconds of its parts."""

    def __init__(self, settings: TrainSettings, gpu: GpuSettings) -> None:
        self.settings, self.gpu = settings, gpu
        self.config, self.dtype = mmdit_config(settings.model), torch_dtype(settings.precision.compute)
        self.shape, self.text_tokens = largest_batch_shape(settings), settings.text.t5_max_length
        self.tokens = prod(self.shape.token_grid(settings))
        data_ranks = settings.parallel.data_ranks(settings.strategy)
        self.rounds = (settings.loop.micro_batches or data_ranks) // data_ranks
        """Number of micro-batches of a rank in an update."""
        self.mesh, self.exchange = mesh_shape(settings.strategy, settings.parallel), training_exchange(settings)
        self.mesh_of_clip = replace(self.mesh, replicate=1, shard=1)
        self.links = Links(gpu, settings.parallel.ranks_per_node)
        self.more = find_objective(settings).evaluations(settings)
        self.trained = count_parameters(settings)
        self.numbers = sum(weight.numel() for weight in transformer_on_meta(settings.model).parameters())
        """Number of parameters of the transformer, trained or not."""
        strategy = settings.strategy
        self.sharing_ranks = self.mesh.shard * self.mesh.ring * self.mesh.ulysses if strategy.shards else 1
        self.gathers = 2 * self.rounds if strategy.gathers_twice else 1
        """Number of times that an update gathers weights."""
        self.scatters = 1 if strategy.reduces_once else self.rounds
        """Number of times that an update reduces gradients."""

    def passes(self) -> Seconds:
        """Return the seconds of a forward and a backward pass, including recomputation."""
        settings, gpu, plan = self.settings, self.gpu, plan_activations(self.settings)
        forward, products = self._forward(self.config), 1 if settings.lora.is_on else 2
        backward = Work(
            product_flops=products * forward.product_flops,
            attention_flops=_ATTENTION_BACKWARD * forward.attention_flops,
            product_bytes=products * forward.product_bytes,
            traffic_bytes=2 * forward.traffic_bytes,
            kernels=2 * forward.kernels,
        )
        # In backward, gradients of keys and values in fp32 are sent in addition to keys and values.
        passes = [(self.config, forward, 1.0), (self.config, backward, 3.0)]
        if plan is not None and any(plan.checkpointed_blocks.values()):
            double, single = plan.checkpointed_blocks.values()
            checkpointed = self.config.replace({"depth": double, "depth_single_blocks": single})
            again = self._forward(checkpointed)
            if plan.checkpointing is Checkpointing.SELECTIVE:
                again = replace(again, attention_flops=0.0)
            passes.append((checkpointed, again, 1.0))
        passes.append((self.config, forward * self.more, self.more))
        found = sum((self._pass(*each) for each in passes), Seconds())
        computed, weights = found.total, plan_frozen_weights(settings)
        if plan is not None and plan.checkpointing is Checkpointing.OFFLOAD:
            # The output layer is checkpointed, too.
            inputs = (sum(plan.checkpointed_blocks.values()) + 1) * layer_values(settings) * self.dtype.itemsize
            found += copied(gpu, 2 * inputs / (self.mesh.ring * self.mesh.ulysses), pinned=True)
        if weights is not None and weights.host_weights is not None:
            # Weights are copied once for each forward pass, and again for backward.
            pinned = weights.host_weights is HostWeights.PINNED
            found += copied(gpu, (2 + self.more) * weights.host_bytes, pinned=pinned, behind=computed)
        return found

    def _forward(self, config: MMDiTConfig) -> Work:
        size = self.tokens, self.text_tokens
        return evaluation_work(config, *size, self.dtype, self.mesh_of_clip) * self.shape.batch_size

    def _pass(self, config: MMDiTConfig, work: Work, keys_and_values: float) -> Seconds:
        seconds = kernel_seconds(work, self.gpu, self.dtype)
        waited = exchange_seconds(
            config,
            self.mesh_of_clip,
            self.exchange,
            self.links,
            video_tokens=self.shape.batch_size * self.tokens,
            text_tokens=self.shape.batch_size * self.text_tokens,
            itemsize=self.dtype.itemsize,
            attention=seconds[ATTENTION],
            keys_and_values=keys_and_values,
        )
        return seconds + {COLLECTIVES: waited}

    def sharing(self, *, computed: float) -> Seconds:
        """Return the seconds that an update waits for weights and gradients beyond `computed` seconds."""
        mesh, sharing, trained = self.mesh, self.sharing_ranks, self.trained / self.mesh.tensor
        held = self.numbers / mesh.tensor if self.settings.lora.is_on else trained
        more = self.rounds * self.more if self.settings.strategy.gathers_twice else 0.0
        gathered = (self.gathers + more) * held * self.dtype.itemsize
        scattered = self.scatters * trained * _FP32
        # Copies of the weights then sum their gradients.
        summed = 2 * (mesh.replicate - 1) / mesh.replicate * scattered / sharing
        travel = self.links.ring_seconds((sharing - 1) / sharing * (gathered + scattered), sharing * mesh.tensor)
        travel += self.links.ring_seconds(summed, mesh.size)
        return Seconds({COLLECTIVES: max(0.0, travel - computed)})

    def encoding(self) -> Seconds:
        """Return the seconds in which a rank encodes the clips and captions of a micro-batch; empty with a cache."""
        settings, shape, gpu = self.settings, self.shape, self.gpu
        if settings.train_mmdit.cache is not None:
            return Seconds()
        dtype = frozen_dtype(settings.train_mmdit, torch.device(GPU))
        files, parts = settings.train_mmdit.files, find_frozen_parts(settings)
        clip = encoding_work(settings.vae, shape.num_frames, shape.height, shape.width, dtype)
        sizes = T5Sizes.of(parts[files.t5]), ClipSizes.of(parts[files.clip])
        lengths = self.text_tokens, settings.text.clip_max_length
        captions = text_work(*sizes, lengths, dtype.itemsize, prompts=shape.batch_size)
        encoding = autoencoder_seconds(clip * shape.batch_size, gpu, dtype)
        return Seconds({ENCODING: encoding, TEXT: kernel_seconds(captions, gpu, dtype).total})

    def update(self) -> Seconds:
        """Return the seconds in which a rank updates its weights or, with states on the host, copies them."""
        own = self.trained / (self.sharing_ranks * self.mesh.tensor if self.settings.strategy.shards else 1)
        if self.settings.optimizer.offload_states:
            return copied(self.gpu, _FP32 * (self.gathers + self.scatters) * own, pinned=True)
        return Seconds({UPDATE: self.gpu.memory_rate.seconds(_UPDATE_BYTES * own)})


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
