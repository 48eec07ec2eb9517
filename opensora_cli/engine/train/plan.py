"""What a training run will do, worked out before anything is built."""

from dataclasses import dataclass
from pathlib import Path

from opensora_cli.checkpoint.formats.colossal import TRAINING_FILE, all_epoch_folders
from opensora_cli.core.exceptions import CheckpointError, OutputError, RequestError
from opensora_cli.core.listing import first_few
from opensora_cli.engine.train.activations import ActivationPlan, plan_activations
from opensora_cli.engine.train.build import count_parameters, find_frozen_parts
from opensora_cli.engine.train.files import LOG_FILE, exports, first_weights_of
from opensora_cli.engine.train.fp8_linear import require_fp8
from opensora_cli.engine.train.lora import require_peft
from opensora_cli.engine.train.ranks import training_device
from opensora_cli.engine.train.resuming import Resume, checkpoints_to_try
from opensora_cli.engine.train.watching.logs import require_tensorboard
from opensora_cli.settings.train import TrainSettings, TrainTarget

PLAN_SCHEMA = "osora.train-plan/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainPlan:
    """Everything that is decided before a run begins."""

    settings: TrainSettings
    parameters: int
    """Numbers that are trained."""
    resume: Resume | None
    """What it goes on from; None: it begins at the start."""
    overwrite: bool
    """Whether it begins anew although the folder holds an earlier run."""
    weights: dict[str, Path | None]
    """Where the frozen parts are; None: missing."""
    activations: ActivationPlan | None
    """What is held between forward and backward, and where; None: everything, on the device."""

    @property
    def output(self) -> Path:
        """The folder of checkpoint, log and export."""
        return Path(self.settings.output)

    @property
    def missing_weights(self) -> list[str]:
        """Names of the frozen parts that are not there."""
        return [name for name, path in self.weights.items() if path is None]

    def to_json(self) -> dict[str, object]:
        """Return the plan as a document of the schema `osora.train-plan/1`."""
        return {
            "schema": PLAN_SCHEMA,
            "target": self.settings.target.value,
            "parameters": self.parameters,
            "steps": self.settings.loop.steps,
            "output": str(self.output),
            "exports": list(exports(self.settings)),
            "resume": self.resume is not None,
            "ranks": self.settings.parallel.world_size,
            "weights": {name: str(path) for name, path in self.weights.items() if path is not None},
            "missing_weights": self.missing_weights,
            "activations": self.activations.to_json() if self.activations else None,
            "settings": self.settings.model_dump(mode="json"),
        }

    def lines(self) -> list[str]:
        """Return the plan for people."""
        settings, parallel = self.settings, self.settings.parallel
        is_transformer = settings.target is TrainTarget.MMDIT
        start = f", going on from {checkpoints_to_try(self.output, self.resume)[0]}" if self.resume else ""
        return [
            f"target      {settings.target}",
            f"parameters  {self.parameters:,}",
            f"steps       {settings.loop.steps}, {self._examples} each{start}",
            *([f"devices     {parallel.describe(settings.strategy)}"] if parallel.world_size > 1 else []),
            f"output      {self.output}: {', '.join(exports(settings))}",
            *([f"memory      {self.activations.line()}"] if self.activations else []),
            *([f"cache       {cache}"] if (cache := settings.train_mmdit.cache) and is_transformer else []),
            *self._watched,
            *(f"weights     {path}" for path in self.weights.values() if path is not None),
            *(f"missing     {name}" for name in self.missing_weights),
        ]

    @property
    def _watched(self) -> list[str]:
        validation, samples = self.settings.validation, self.settings.samples
        lines = []
        if validation.every is not None:
            clips = validation.table or "clips that are not trained on"
            lines.append(
                f"validation  every {validation.every} steps, on up to {validation.batches} batches of {clips}"
            )
        if samples.every is not None and self.settings.target is TrainTarget.MMDIT:
            lines.append(f"samples     every {samples.every} steps: {first_few(samples.prompts)}")
        return lines

    @property
    def _examples(self) -> str:
        settings = self.settings
        count = settings.loop.micro_batches or settings.parallel.data_ranks(settings.strategy)
        if settings.target is TrainTarget.TEXT:
            return f"{count * settings.text.batch_size} captions"
        if settings.data.table is None:
            return f"{count * settings.data.scenes.batch_size} clips"
        return f"{count} micro-batches"


def plan_training(settings: TrainSettings, *, resume: Resume | None = None, overwrite: bool = False) -> TrainPlan:
    """Return what `train` would do, after the checks that need neither weights nor data.

    Args:
        settings: the run.
        resume: the checkpoint to go on from; None: begin at the start.
        overwrite: begin anew although the folder holds an earlier run.

    Raises:
        RequestError: `resume` and `overwrite` contradict each other, or sizes do, or a buffer is too small.
        CheckpointError: there is no checkpoint to resume from, or no file of first weights.
        OutputError: the folder holds an earlier run, and neither `resume` nor `overwrite` says what to do with it.
        HardwareError: a library is missing, or the device lacks what is asked of it.
    """
    _check_output(settings, resume=resume, overwrite=overwrite)
    first_weights = first_weights_of(settings)
    if first_weights is not None and not first_weights.exists():
        raise CheckpointError(f"init={settings.init} does not exist", hint="name a file or folder of weights")
    if settings.lora.is_on:
        require_peft()
    if settings.watching.tensorboard:
        require_tensorboard()
    if settings.precision.fp8_linears and settings.parallel.world_size == 1:
        # Of several ranks each looks at its own device.
        require_fp8(training_device(settings))
    return TrainPlan(
        settings=settings,
        parameters=count_parameters(settings),
        resume=resume,
        overwrite=overwrite,
        weights=find_frozen_parts(settings),
        activations=plan_activations(settings),
    )


def _check_output(settings: TrainSettings, *, resume: Resume | None, overwrite: bool) -> None:
    output = Path(settings.output)
    if resume is not None and overwrite:
        raise RequestError("--resume goes on from what --overwrite takes away: give one of them")
    for name in (TRAINING_FILE, LOG_FILE):
        if (output / name).is_dir():
            raise OutputError(f"{output / name} is a folder, where a run keeps a file", hint="move it elsewhere")
    if resume is not None:
        checkpoints_to_try(output, resume)
        return
    checkpoints = [folder.name for folder in all_epoch_folders(output)[:1]] if output.is_dir() else []
    others = [name for name in (TRAINING_FILE, LOG_FILE, *exports(settings)) if (output / name).exists()]
    found = [*checkpoints, *others]
    if found and not overwrite:
        go_on = "go on with --resume, " if checkpoints else ""
        raise OutputError(
            f"{output} holds an earlier run: {', '.join(found)}",
            hint=f"{go_on}begin anew with --overwrite, or give another folder: --set output=FOLDER",
        )
