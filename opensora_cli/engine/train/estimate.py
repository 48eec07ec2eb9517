"""Memory of a training step: measured in a real step, or estimated by the same step on fake tensors."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from opensora_cli.core.device import timed
from opensora_cli.core.documents import Document
from opensora_cli.core.progress import SilentReporter
from opensora_cli.data.batches import SampleRng
from opensora_cli.engine.components.architectures import on_meta
from opensora_cli.engine.encode.clips import frozen_dtype
from opensora_cli.engine.estimate.autoencoder import encoding_need
from opensora_cli.engine.estimate.fake_tensors import fake_device, give_fake_weights
from opensora_cli.engine.estimate.outlines import HOST
from opensora_cli.engine.launch.rank import device_type
from opensora_cli.engine.train.distribution import Distribution, local
from opensora_cli.engine.train.few_blocks import FewBlocks, with_few_blocks
from opensora_cli.engine.train.memory import (
    FrozenWeights,
    fake_slots,
    largest_batch_shape,
    plan_activations,
    plan_frozen_weights,
    stack_paths,
    streamed_weights,
    waiting_weights,
)
from opensora_cli.engine.train.objectives import find_objective
from opensora_cli.engine.train.optimizer import zero_state
from opensora_cli.engine.train.parallelize import checkpoint_blocks
from opensora_cli.engine.train.stand_ins import (
    BUFFERS,
    GRADIENTS,
    ExchangeOwners,
    FakeDistribution,
    fake_rank,
    largest_batches,
)
from opensora_cli.engine.train.trainer import MODEL, Clock, Losses, Task, Trainer
from opensora_cli.memory.checkpointing import blocks_of
from opensora_cli.memory.counting import TensorBytes
from opensora_cli.memory.eight_bit import store_in_fp8
from opensora_cli.memory.monitor import ModuleTimes, Spread
from opensora_cli.models.vae.autoencoder import COLORS, Autoencoder
from opensora_cli.models.vae.config import Tiling
from opensora_cli.settings.train import TrainSettings

STEP = "training step"
WEIGHTS, AVERAGE, OPTIMIZER, FROZEN = "weights", "average", "optimizer", "frozen parts"
OFFLOADED = "offloaded"
"""Offloaded activations in host memory."""
ACTIVATIONS = "activations"
"""All other tensors: activations saved for the backward pass, and temporary results."""
_KINDS = (WEIGHTS, GRADIENTS, OPTIMIZER, AVERAGE, FROZEN, BUFFERS, OFFLOADED)
_MICRO_BATCHES = 2
"""Number of micro-batches per update: in the second forward pass gradients exist; more change nothing."""


class RankMemory(Document):
    """Memory of the first rank in steps with the largest micro-batch. No rank has a larger share."""

    at_peak: dict[str, int]
    """Bytes at the peak by kind; activations include temporary results, and buffers gathered weights."""
    peak_bytes: int
    """Peak on a CPU, where offloaded memory also counts."""
    device_peak_bytes: int
    """Peak on a GPU, without offloaded weights, averages, moments and activations."""
    mapped_bytes: int
    """Frozen weights, which a CPU maps from their files; a part of `peak_bytes`."""

    def needed_bytes(self, *, on_gpu: bool) -> int:
        """Return the memory that must be free on a GPU, or on a CPU, which maps frozen weights from their files."""
        return self.device_peak_bytes if on_gpu else self.peak_bytes - self.mapped_bytes

    def lines(self) -> list[str]:
        """Return a table in MiB."""
        rows = [*((kind, size) for kind, size in self.at_peak.items() if size), ("peak", self.peak_bytes)]
        if self.device_peak_bytes != self.peak_bytes:
            rows.append(("on a GPU", self.device_peak_bytes))
        return [f"{'memory':12}{'MiB a rank':>13}", *(f"{title:12}{size / 2**20:>13,.1f}" for title, size in rows)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingMemory:
    """Memory of a training step on one rank."""

    rank: RankMemory
    activations_by_module: dict[str, int]
    """Activations at the peak from forward passes, by the name of the module; the backward pass has no names."""
    by_weight: dict[str, tuple[int, int]]
    """Name -> number of parameters and bytes of a weight. A block that represents others includes theirs."""
    held_for_backward: int
    """Bytes of activations at the end of the last step's forward pass, without offloaded ones."""
    counter: TensorBytes
    """Timeline of all tensors."""
    times: Mapping[str, Spread] = field(default_factory=dict)
    """Times of `STEP`, and of each block of the model."""


def estimate_training(settings: TrainSettings, *, rank: int = 0) -> TrainingMemory:
    """Return the result of `measure_training` on one of the ranks from fake tensors: without computing, and with a few
    MB of memory.

    Raises RequestError if sizes contradict each other, and RuntimeError in a process that is a rank itself.
    """
    few, times = with_few_blocks(settings)
    with on_meta():
        task, frozen = find_objective(few).stand_in(few)
    for module in frozen:
        if isinstance(module, Autoencoder):
            _encode_alone(module, few)
    with fake_rank(few, rank) as distribution, fake_device("cpu", grad=True):
        for module in (*_trained(task), *frozen):
            give_fake_weights(module, device=HOST)
        return _steps(few, task, frozen, distribution, weights=plan_frozen_weights(settings), times=times)


def _encode_alone(module: Autoencoder, settings: TrainSettings) -> None:
    """Let a frozen autoencoder on fake tensors encode without computing: a clip takes what outlines of it take."""
    shape, device = largest_batch_shape(settings), device_type(settings.device_name)
    dtype = frozen_dtype(settings.train_mmdit, torch.device(device))
    need = encoding_need(settings.vae, (shape.num_frames,), (shape.height, shape.width), dtype, device)
    pixels = COLORS * shape.num_frames * shape.height * shape.width

    def encode(pixels_BCTHW: Tensor, *, tiling: Tiling) -> Tensor:
        pixels_BCTHW.new_empty(round(need.activations * pixels_BCTHW.numel() / pixels), dtype=torch.uint8)
        batch, _, frames, height, width = pixels_BCTHW.shape
        grid = module.grid
        latent_shape = grid.latent_channels, grid.latent_frames(frames), *grid.latent_size(height, width)
        return pixels_BCTHW.new_empty(batch, *latent_shape)

    module.encode = encode  # type: ignore[assignment, method-assign]


def measure_training(
    settings: TrainSettings, *, distribution: Distribution | None = None, runs: int = 0
) -> TrainingMemory:
    """Do the `measured_steps` of the objective with random weights, and return their memory on this rank.

    Then `runs` more steps are timed. Times of blocks include only the first forward pass, not the recomputation of
    checkpointed blocks in backward.

    Micro-batches are black clips of the largest shape. Frozen parts encode them, unless the run has a cache of clips.
    Without `distribution`, this process runs alone, even if the settings have several ranks.

    Raises RequestError if sizes contradict each other, and HardwareError if the host has no memory for offloaded
    activations.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.loop.seed)
        task, frozen = find_objective(settings).stand_in(settings)
    distribution = distribution or Distribution(torch.device("cpu"))
    return _steps(settings, task, frozen, distribution, weights=plan_frozen_weights(settings), runs=runs)


def _steps(
    settings: TrainSettings,
    task: Task,
    frozen: list[nn.Module],
    distribution: Distribution,
    *,
    weights: FrozenWeights | None,
    runs: int = 0,
    times: Mapping[str, int] | None = None,
) -> TrainingMemory:
    """Do the steps. On fake tensors, the transformer's first step is skipped, and the moments are allocated before.

    `times` maps the path of a block to the number of blocks that it represents. None means real tensors.
    """
    is_fake = times is not None
    if weights is not None and weights.fp8_storage:
        for path in stack_paths(settings):
            store_in_fp8(task.module.get_submodule(path), frozen=True)
    if distribution.ranks > 1:
        task.shard(distribution)
    counter = TensorBytes(follow_sizes=distribution.divides)
    trainer = _trainer(settings, task, distribution)
    steps = find_objective(settings).measured_steps(settings)
    if is_fake and settings.trains_transformer:
        for learner in trainer.learners.values():
            for _, weight, optimizer in learner.trained():
                optimizer.state[weight] = zero_state(optimizer, weight)
                if isinstance(optimizer, torch.optim.AdamW):
                    # Its fused update makes no tensors, and takes DTensor many seconds.
                    optimizer.step = lambda: None  # type: ignore[assignment, method-assign, misc]
        steps = steps[-1:]
    # Copies between fake tensors would take no memory.
    streamed = (
        nullcontext(fake_slots(weights))
        if is_fake
        else streamed_weights(task.module, weights, settings, device=HOST, reporter=SilentReporter())
    )
    with streamed as slots:
        with counter, ExchangeOwners(counter):
            counter.add(list((trainer.ema or {}).values()), AVERAGE)
            waiting = {id(weight) for weight in waiting_weights(task.module, weights, settings)}
            for module in _trained(task):
                held = (*module.parameters(), *module.buffers())
                counter.add([tensor for tensor in held if id(tensor) not in waiting], WEIGHTS)
            counter.add(slots, WEIGHTS)
            for module in frozen:
                counter.add(module, FROZEN)
            for _, tensor, kind in _states(trainer):
                counter.add(tensor, kind)
            _mark_forward(task, counter)
            few_blocks = FewBlocks(counter, task.module, times or {}, partial(_kept_all_the_time, trainer))
            plan = plan_activations(settings)
            checkpoint_blocks(task.module, plan, on_copy=partial(counter.add, owner=OFFLOADED))
            with counter.watch(task.module, "model"), few_blocks.watch():
                for step in steps:
                    trainer.step = step
                    trainer.do_step()
                    counter.add(_gradients(_trained(task)), GRADIENTS)
                    for _, tensor, kind in _states(trainer):
                        counter.add(tensor, kind)
            memory = _memory(settings, few_blocks.counted(), task.module, times or {})
        if not runs:
            return memory
        seconds, blocks = [], ModuleTimes(distribution.device)
        with blocks.watch(blocks_of(task.module, "model")):
            for _ in range(runs):
                trainer.step = steps[-1]
                seconds.append(timed(trainer.do_step, distribution.device))
    return replace(memory, times={STEP: Spread.of(seconds), **blocks.spreads()})


def _trainer(settings: TrainSettings, task: Task, distribution: Distribution) -> Trainer:
    data_ranks = settings.parallel.data_ranks(settings.strategy)
    on_a_rank = min((settings.loop.micro_batches or data_ranks) // data_ranks, _MICRO_BATCHES)
    return Trainer(
        task,
        largest_batches(settings),
        loop=settings.loop.replace({"micro_batches": on_a_rank * distribution.data_ranks}),
        optimizer=settings.optimizer,
        compute=settings.precision.compute,
        distribution=distribution,
        clock=Clock(),
        trained_only=settings.lora.is_on,
    )


def _memory(
    settings: TrainSettings, counter: TensorBytes, module: nn.Module, times: Mapping[str, int]
) -> TrainingMemory:
    at_peak = counter.peak_by_owner()
    kinds = {name: at_peak.pop(name, 0) for name in _KINDS}
    # Sharded gradients are on the host, too. They count, as do gradients of a block that are being copied.
    on_host = {OFFLOADED, *([WEIGHTS, AVERAGE, OPTIMIZER] if settings.optimizer.offload_states else [])}
    rank = RankMemory(
        at_peak={**kinds, ACTIVATIONS: sum(at_peak.values())},
        peak_bytes=counter.peak_bytes,
        device_peak_bytes=counter.most_of(lambda owner: owner not in on_host),
        mapped_bytes=kinds[FROZEN] + (kinds[WEIGHTS] if settings.lora.is_on else 0),
    )
    by_weight = {}
    for name, weight in module.named_parameters():
        count = next((count for path, count in times.items() if name.startswith(f"{path}.")), 1)
        by_weight[name] = count * local(weight).numel(), count * local(weight).nbytes
    before_backward = counter.owners_at(counter.marks[-1]).items()
    return TrainingMemory(
        rank=rank,
        activations_by_module={name: size for name, size in at_peak.items() if name},
        by_weight=by_weight,
        held_for_backward=sum(size for name, size in before_backward if name not in _KINDS),
        counter=counter,
    )


def _mark_forward(task: Task, counter: TensorBytes) -> None:
    """Let a task mark the end of each forward pass of the model on the timeline."""
    plain = task.losses

    def losses(batch: Any, rng: SampleRng) -> Losses:
        # Gradients of the previous micro-batches.
        counter.add(_gradients([task.module]), GRADIENTS)
        for found in plain(batch, rng):
            if found[0] == MODEL:
                counter.mark("forward")
            yield found

    task.losses = losses  # type: ignore[method-assign]


def _trained(task: Task) -> list[nn.Module]:
    return [task.module, *task.other_modules().values()]


def _gradients(modules: Sequence[nn.Module]) -> list[Tensor]:
    weights = (weight for module in modules for weight in module.parameters())
    return [weight.grad for weight in weights if weight.grad is not None]


def _states(trainer: Trainer) -> Iterator[tuple[nn.Parameter, Tensor, str]]:
    """Yield states of optimizers and buckets of gradients, each with its weight and its kind."""
    for learner in trainer.learners.values():
        for _, weight, optimizer in learner.trained():
            yield from ((weight, tensor, OPTIMIZER) for tensor in optimizer.state[weight].values())
    if isinstance(trainer.distribution, FakeDistribution):
        yield from ((weight, tensor, GRADIENTS) for weight, tensor in trainer.distribution.buckets.items())


def _kept_all_the_time(trainer: Trainer, block: str) -> Iterator[Tensor]:
    """Yield the weights of a block, and their persistent tensors: averages, optimizer state and buckets."""
    module = trainer.task.module.get_submodule(block)
    weights = set(map(id, module.parameters()))
    yield from (*module.buffers(), *module.parameters())
    yield from (tensor for name, tensor in (trainer.ema or {}).items() if name.startswith(f"{block}."))
    yield from (tensor for weight, tensor, _ in _states(trainer) if id(weight) in weights)
