"""Plan of a training run, before anything is built."""

from pathlib import Path
from typing import NamedTuple

import torch
from pydantic import Field

from opensora_cli.checkpoint.formats.peft import require_peft
from opensora_cli.core.device import has_gpu
from opensora_cli.core.device_names import GPU, type_of_ranks
from opensora_cli.core.documents import Document
from opensora_cli.core.exceptions import HardwareError, RequestError
from opensora_cli.core.formatting import first_few, format_bytes
from opensora_cli.core.limits import ThreadChoice, pick_threads, read_private_memory
from opensora_cli.core.progress import Reporter
from opensora_cli.engine.components.architectures import transformer_on_meta
from opensora_cli.engine.components.attention import AttentionPlan
from opensora_cli.engine.components.hardware import OutOfMemoryError, pick_hardware
from opensora_cli.engine.estimate.offload import HostMemory, verdict_line
from opensora_cli.engine.estimate.predicted_time import PredictedTime
from opensora_cli.engine.launch.rank import device_type
from opensora_cli.engine.train.build import count_parameters, plan_attention
from opensora_cli.engine.train.distribution import training_device, training_exchange
from opensora_cli.engine.train.early import find_checkpoint, find_frozen_weights
from opensora_cli.engine.train.estimate import RankMemory, estimate_training
from opensora_cli.engine.train.lora import open_first_adapter
from opensora_cli.engine.train.memory import (
    ActivationPlan,
    FrozenWeights,
    layer_values,
    plan_activations,
    plan_frozen_weights,
)
from opensora_cli.engine.train.metrics import require_tensorboard
from opensora_cli.engine.train.predicted import predict_step
from opensora_cli.settings.devices import DType, HostWeights
from opensora_cli.settings.hardware import PlannedMachine, find_gpu
from opensora_cli.settings.train import TrainSettings
from opensora_cli.settings.train_sections import WeightOffload

_LAYERS = 1000
"""Number of layers that surely exceeds a step; the released transformer saves the values of 300 for backward."""
_COPIES = 8
"""Number of copies of the trained weights that surely exceeds gradients, buckets, averages and moments."""


class TrainPlan(Document):
    """Plan of a training run: all decisions before it begins."""

    SCHEMA = "osora.train-plan/7"

    verdict: str | None = None
    """Whether a rank fits, its memory, and the predicted time of all steps. None means not estimated."""
    parameters: int
    """Number of trained parameters."""
    resume: bool
    weights: dict[str, Path]
    """Paths of the frozen parts, by name."""
    missing_weights: tuple[str, ...]
    """Names of the frozen parts that were not found."""
    threads: ThreadChoice
    """CPU threads. A resumed run keeps the number of its checkpoint, unless a user names another."""
    activations: ActivationPlan | None
    """Plan for activations between forward and backward. None means that all of them stay on the device."""
    frozen_weights: FrozenWeights | None
    """Storage of frozen blocks in adapter training. None means on the device, in the compute dtype."""
    memory: RankMemory | None = None
    """Memory of a rank; None if it was not estimated."""
    attention: AttentionPlan | None
    """Attention backend of the transformer. None means that another part is trained."""
    host: HostMemory | None = None
    """Host memory of a machine. None means not estimated."""
    free_bytes: int | None = None
    """Free memory for a rank, on its GPU or on the CPU. None means unknown."""
    fits: bool | None = None
    """Whether a rank fits in the free memory. None means unknown."""
    predicted: PredictedTime | None = None
    """Predicted seconds of a step. None means no prediction: on a CPU, and if the GPUs' speed is not known."""
    settings: TrainSettings
    resume_from: Path | bool = Field(exclude=True)
    """Checkpoint to resume from; True means the newest, and False that the run starts at step 0."""
    overwrite: bool = Field(exclude=True)
    """Whether the records of an earlier run in the folder are removed."""

    @property
    def memory_lines(self) -> list[str]:
        """Lines about the storage of activations and frozen weights."""
        return [plan.line() for plan in (self.activations, self.frozen_weights) if plan is not None]

    def lines(self) -> list[str]:
        """Return the plan as lines of text."""
        settings, validation, samples = self.settings, self.settings.validation, self.settings.samples
        prompts = first_few(samples.prompts)
        clips = f"{validation.batches} batches of {validation.table or 'held-out clips'}"
        count = settings.loop.micro_batches or settings.parallel.data_ranks(settings.strategy)
        output, ranks = Path(settings.output), settings.parallel.world_size
        steps = f"{settings.loop.steps}, {count} micro-batch{'' if count == 1 else 'es'} each"
        if self.resume_from:
            steps += f", resumed from {find_checkpoint(output, self.resume_from)}"
        rows: list[tuple[str, object]] = [
            ("target", settings.target),
            ("parameters", f"{self.parameters:,}"),
            ("steps", steps),
            ("devices", ranks > 1 and settings.parallel.describe(settings.strategy)),
            ("threads", self.threads.line()),
            ("output", f"{output}: {', '.join(settings.exports)}"),
            *(("memory", line) for line in self.memory_lines),
            ("attention", self.attention and self.attention.line()),
            ("cache", settings.clip_cache),
            ("validation", validation.every and f"every {validation.every} steps, on up to {clips}"),
            ("samples", settings.trains_transformer and samples.every and f"every {samples.every} steps: {prompts}"),
            *(("weights", path) for path in self.weights.values()),
            *(("missing", name) for name in self.missing_weights),
        ]
        return [
            *([self.verdict] if self.verdict else []),
            *(f"{name:12}{text}" for name, text in rows if text),
            *(["", *self.memory.lines()] if self.memory else []),
            *([f"host        {self.host.line()}"] if self.host and self.host.pinned_bytes else []),
            *(self.predicted.lines() if self.predicted is not None else []),
        ]

    def raise_for_problems(self) -> None:
        """Raise HardwareError if a rank needs more memory than is free."""
        if self.fits is False:
            assert self.verdict is not None
            raise HardwareError(
                f"a rank does not fit in memory ({self.verdict.partition(': ')[2]})",
                hint="more devices share more, smaller batches (data.buckets) and an adapter (lora.rank) need less",
            )


def plan_training(
    settings: TrainSettings,
    *,
    resume: Path | bool = False,
    overwrite: bool = False,
    machine: PlannedMachine | None = None,
) -> TrainPlan:
    """Return the plan for `train`, after the checks that need torch, and neither weights nor data.

    `machine` describes GPUs to plan for, which need not be in this machine.

    Raises:
        RequestError: Sizes contradict each other, or `lora` describes another adapter than its `init`.
        CheckpointError: The first adapter is missing or broken.
        HardwareError: A library is missing, or the device lacks a requested feature.
    """
    if machine is not None:
        settings = settings_on(settings, machine)
    training_exchange(settings)  # refuses an exchange that these ranks cannot make
    if settings.lora.is_on:
        require_peft()
        if settings.lora.init is not None:
            open_first_adapter(transformer_on_meta(settings.model), settings.lora)
    if settings.watching.tensorboard:
        require_tensorboard()
    if settings.optimizer.offload_states and settings.parallel.world_size == 1:
        raise RequestError(
            "optimizer.offload_states=true needs several ranks, which divide the states, and there is one",
            hint="use --gpus N, or train an adapter: lora.rank=16 and memory.offload=blocks",
        )
    frozen = find_frozen_weights(settings)
    return TrainPlan(
        parameters=count_parameters(settings),
        resume=bool(resume),
        weights={name: path for name, path in frozen.items() if path is not None},
        missing_weights=tuple(name for name, path in frozen.items() if path is None),
        threads=pick_threads(
            asked=settings.threads, values=layer_values(settings), ranks=settings.parallel.ranks_per_node
        ),
        activations=plan_activations(settings),
        frozen_weights=plan_frozen_weights(settings),
        attention=_attention(settings, machine),
        settings=settings,
        resume_from=resume,
        overwrite=overwrite,
    )


def with_memory(plan: TrainPlan, *, reporter: Reporter, machine: PlannedMachine | None = None) -> TrainPlan:
    """Return the plan with the memory of a rank and the verdict, or warn why memory is not estimated.

    The verdict is about the GPUs of `machine`, or else about this machine. Raises the errors of `estimate_rank` other
    than HardwareError.
    """
    try:
        memory = estimate_rank(plan.settings, reporter=reporter)
    except HardwareError as error:
        reporter.warn(error.message)
        return plan
    return plan.model_copy(update={"memory": memory, **judge(plan.settings, memory, machine=machine)._asdict()})


def estimate_rank(settings: TrainSettings, *, rank: int = 0, reporter: Reporter) -> RankMemory:
    """Return the memory of a rank; see `estimate_training`."""
    with reporter.stage("estimate memory"):
        return estimate_training(settings, rank=rank).rank


class Judged(NamedTuple):
    """Fields of a plan that follow from the memory of a rank."""

    verdict: str
    host: HostMemory
    free_bytes: int | None
    fits: bool | None
    predicted: PredictedTime | None


def judge(settings: TrainSettings, memory: RankMemory, *, machine: PlannedMachine | None = None) -> Judged:
    """Return whether a rank fits on this machine, or on `machine` with its `settings_on`, and the time of a step."""
    on_gpu = device_type(settings.device_name) != "cpu"
    weights, pinned, page_cache = plan_frozen_weights(settings), 0, memory.mapped_bytes
    free, gpu = None, None
    if on_gpu:
        pinned = memory.peak_bytes - memory.device_peak_bytes
        if weights is not None and weights.host_weights is HostWeights.MAPPED:
            page_cache += weights.host_bytes
        elif weights is not None:
            pinned += weights.host_bytes
    if machine is not None:
        free, gpu = machine.gpu.free_bytes, machine.gpu if machine.has_speed else None
    elif not on_gpu:
        free = _free_bytes(settings)
    elif has_gpu():
        hardware = pick_hardware(settings.device_name, "float32")
        free, gpu = hardware.free_bytes, find_gpu(hardware.device_name)
    host = HostMemory(pinned_bytes=settings.parallel.ranks_per_node * pinned, page_cache_bytes=page_cache)
    predicted = None if gpu is None else predict_step(settings, gpu)
    needed = memory.needed_bytes(on_gpu=on_gpu)
    seconds = None if predicted is None else settings.loop.steps * predicted.seconds
    verdict = verdict_line(needed=needed, usable=free, on_gpu=on_gpu, host=host, seconds=seconds)
    return Judged(verdict, host, free, None if free is None else needed <= free, predicted)


def _free_bytes(settings: TrainSettings) -> int:
    """Return the memory that is free for one of the ranks on the CPU of a machine."""
    return read_private_memory().free_bytes // settings.parallel.ranks_per_node


def refuse_lack_of_memory(settings: TrainSettings, *, rank: int, reporter: Reporter) -> None:
    """Raise OutOfMemoryError if this machine lacks the memory for a run on a CPU.

    The kernel kills a process that exceeds the memory without a message; on a GPU, a failed allocation is an error.
    Call this before a rank joins the others. Nothing is estimated if memory is plentiful. Raises RequestError if sizes
    contradict each other.
    """
    if device_type(settings.device_name) != "cpu":
        return
    free = _free_bytes(settings)
    if free >= 4 * (_LAYERS * layer_values(settings) + _COPIES * count_parameters(settings)):
        return
    try:
        with torch.random.fork_rng(devices=[]):
            memory = estimate_rank(settings, rank=rank, reporter=reporter)
    except HardwareError as error:
        reporter.warn(error.message)
        return
    if (needed := memory.needed_bytes(on_gpu=False)) > free:
        raise OutOfMemoryError(
            f"a step needs {format_bytes(needed)} of memory on each rank, and {format_bytes(free)} are free",
            hint="use smaller batches (data.buckets), or memory.checkpointing=full; --dry-run "
            "prints the memory of a rank",
        )


def settings_on(settings: TrainSettings, machine: PlannedMachine) -> TrainSettings:
    """Return the settings of a run on `machine`; some depend on its device and its host memory.

    Raises RequestError if they ask for other devices, and HardwareError if its GPUs lack a feature.
    """
    parallel = settings.parallel
    machine.require(device=settings.device, ranks=parallel.world_size, ranks_per_node=parallel.ranks_per_node)
    chosen, memory = settings.train_mmdit.frozen_dtype, settings.memory
    there = settings.replace(
        {"device": GPU, "train_mmdit.frozen_dtype": DType.BFLOAT16 if chosen is DType.AUTO else chosen}
    )
    if memory.offload is WeightOffload.NONE or memory.host_weights is not None:
        return there
    mapped = there.replace({"memory.host_weights": HostWeights.MAPPED})
    weights = plan_frozen_weights(mapped)
    copies = 0 if weights is None else weights.host_bytes * parallel.ranks_per_node
    return there.replace({"memory.host_weights": HostWeights.PINNED}) if copies < machine.gpu.host_memory else mapped


def _attention(settings: TrainSettings, machine: PlannedMachine | None) -> AttentionPlan | None:
    if machine is None and settings.parallel.world_size == 1:
        return plan_attention(settings, device=training_device(settings))
    # Each of several ranks checks its own device.
    device = torch.device(type_of_ranks(settings.device) if machine is None else GPU)
    return plan_attention(settings, device=device, tries_device=False)
