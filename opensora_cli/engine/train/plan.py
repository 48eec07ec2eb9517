"""The plan of a training run, before anything is built."""

from pathlib import Path

import torch
from pydantic import Field

from opensora_cli.checkpoint.formats.peft import require_peft
from opensora_cli.core.documents import Document
from opensora_cli.core.exceptions import HardwareError
from opensora_cli.core.formatting import first_few
from opensora_cli.core.progress import Reporter
from opensora_cli.core.threads import ThreadChoice, pick_threads
from opensora_cli.engine.components.attention import AttentionPlan
from opensora_cli.engine.components.configs import transformer_on_meta
from opensora_cli.engine.components.exchanges import describe_exchange
from opensora_cli.engine.train.activations import ActivationPlan, layer_values, plan_activations
from opensora_cli.engine.train.build import count_parameters, plan_attention
from opensora_cli.engine.train.early import (
    Resume,
    check_output,
    checkpoints_to_try,
    find_frozen_parts,
    require_first_adapter,
)
from opensora_cli.engine.train.files import exports
from opensora_cli.engine.train.fp8_linear import require_fp8
from opensora_cli.engine.train.frozen_weights import FrozenWeights, plan_frozen_weights
from opensora_cli.engine.train.lora import open_first_adapter
from opensora_cli.engine.train.rank_memory import RankMemory, estimate_ranks, rank_lines
from opensora_cli.engine.train.ranks import mesh_shape, training_device, training_exchange
from opensora_cli.engine.train.watching.logs import require_tensorboard
from opensora_cli.settings.train import TrainSettings, TrainTarget


class TrainPlan(Document):
    """Everything that is decided before a run begins."""

    SCHEMA = "osora.train-plan/1"

    target: TrainTarget
    parameters: int
    """Numbers that are trained."""
    steps: int
    output: Path
    """The folder of checkpoints, log and export."""
    exports: tuple[str, ...]
    resume: bool
    ranks: int
    weights: dict[str, Path]
    """Where the frozen parts are, by name."""
    missing_weights: tuple[str, ...]
    """Names of the frozen parts that were not found."""
    threads: ThreadChoice
    """That compute on the CPU; a resumed run keeps those of its checkpoint, unless others are named."""
    activations: ActivationPlan | None
    """What is held between forward and backward, and where; None: everything, on the device."""
    frozen_weights: FrozenWeights | None
    """How the blocks' weights beside an adapter are kept; None: on the device, as they are computed with."""
    exchange: str | None
    """How ranks that share tokens exchange them for heads; None: they do not."""
    memory: tuple[RankMemory, ...] = ()
    """Of each rank; empty where it was not estimated."""
    attention: AttentionPlan | None
    """What computes the transformer's attention; None: it is not what is trained."""
    settings: TrainSettings
    resume_from: Resume | None = Field(exclude=True)
    """None: the run starts at step 0."""
    overwrite: bool = Field(exclude=True)
    """Whether the records of an earlier run in the folder are removed."""

    @property
    def memory_lines(self) -> list[str]:
        """What is held where, for people."""
        return [plan.line() for plan in (self.activations, self.frozen_weights) if plan is not None]

    def lines(self) -> list[str]:
        """Return the plan for people."""
        settings, parallel = self.settings, self.settings.parallel
        is_transformer = self.target is TrainTarget.MMDIT
        start = ""
        if self.resume_from is not None:
            start = f", resumed from {checkpoints_to_try(self.output, self.resume_from)[0]}"
        return [
            f"target      {self.target}",
            f"parameters  {self.parameters:,}",
            f"steps       {self.steps}, {_examples(settings)} each{start}",
            *([f"devices     {parallel.describe(settings.strategy)}"] if self.ranks > 1 else []),
            *([f"exchange    {self.exchange}"] if self.exchange else []),
            f"threads     {self.threads.line()}",
            f"output      {self.output}: {', '.join(self.exports)}",
            *(f"memory      {line}" for line in self.memory_lines),
            *([f"attention   {self.attention.line()}"] if self.attention else []),
            *([f"cache       {cache}"] if (cache := settings.train_mmdit.cache) and is_transformer else []),
            *_watching_lines(settings),
            *(f"weights     {path}" for path in self.weights.values()),
            *(f"missing     {name}" for name in self.missing_weights),
            *(["", *rank_lines(self.memory)] if self.memory else []),
        ]


def plan_training(settings: TrainSettings, *, resume: Resume | None = None, overwrite: bool = False) -> TrainPlan:
    """Return what `train` would do, after the checks that need neither weights nor data.

    Raises:
        RequestError: `resume` and `overwrite` contradict each other, or sizes do, or a buffer is too small, or `lora`
            describes another adapter than its `init`.
        CheckpointError: there is no checkpoint to resume from, or the first adapter is missing or broken.
        OutputError: the folder holds an earlier run, and neither `resume` nor `overwrite` is given.
        HardwareError: a library is missing, or the device lacks a requested feature.
    """
    check_output(settings, resume=resume, overwrite=overwrite)
    exchange, shape = training_exchange(settings), mesh_shape(settings.strategy, settings.parallel)
    require_first_adapter(settings)
    if settings.lora.is_on:
        require_peft()
        if settings.lora.init is not None:
            open_first_adapter(transformer_on_meta(settings.model), settings.lora)
    if settings.watching.tensorboard:
        require_tensorboard()
    if settings.precision.fp8_linears and settings.parallel.world_size == 1:
        # Each of several ranks checks its own device.
        require_fp8(training_device(settings))
    frozen = find_frozen_parts(settings)
    return TrainPlan(
        target=settings.target,
        parameters=count_parameters(settings),
        steps=settings.loop.steps,
        output=Path(settings.output),
        exports=exports(settings),
        resume=resume is not None,
        ranks=settings.parallel.world_size,
        weights={name: path for name, path in frozen.items() if path is not None},
        missing_weights=tuple(name for name, path in frozen.items() if path is None),
        threads=pick_threads(
            asked=settings.threads, values=layer_values(settings), ranks=settings.parallel.ranks_per_node
        ),
        activations=plan_activations(settings),
        frozen_weights=plan_frozen_weights(settings),
        attention=_attention(settings) if settings.target is TrainTarget.MMDIT else None,
        exchange=describe_exchange(settings.parallel, exchange, shape) if shape.ulysses > 1 else None,
        settings=settings,
        resume_from=resume,
        overwrite=overwrite,
    )


def with_memory(plan: TrainPlan, *, reporter: Reporter) -> TrainPlan:
    """Return the plan with the memory of each rank, or warn why it is not estimated.

    It raises what else `estimate_ranks` raises.
    """
    try:
        return plan.model_copy(update={"memory": estimate_ranks(plan.settings, reporter=reporter)})
    except HardwareError as error:
        reporter.warn(error.message)
        return plan


def _attention(settings: TrainSettings) -> AttentionPlan:
    if settings.parallel.world_size == 1:
        return plan_attention(settings, device=training_device(settings))
    # Each of several ranks tries its own device.
    device = torch.device("cpu" if settings.device == "cpu" else "cuda")
    return plan_attention(settings, device=device, tries_device=False)


def _watching_lines(settings: TrainSettings) -> list[str]:
    validation, samples = settings.validation, settings.samples
    lines = []
    if validation.every is not None:
        clips = validation.table or "clips that are not trained on"
        lines.append(f"validation  every {validation.every} steps, on up to {validation.batches} batches of {clips}")
    if samples.every is not None and settings.target is TrainTarget.MMDIT:
        lines.append(f"samples     every {samples.every} steps: {first_few(samples.prompts)}")
    return lines


def _examples(settings: TrainSettings) -> str:
    count = settings.loop.micro_batches or settings.parallel.data_ranks(settings.strategy)
    if settings.target is TrainTarget.TEXT:
        return f"{count * settings.text.batch_size} captions"
    if settings.data.table is None:
        return f"{count * settings.data.scenes.batch_size} clips"
    return f"{count} micro-batches"
