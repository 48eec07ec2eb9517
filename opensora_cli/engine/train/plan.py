"""What a training run will do, worked out before anything is built."""

from dataclasses import dataclass
from pathlib import Path

from opensora_cli.core.exceptions import CheckpointError, OutputError, RequestError
from opensora_cli.engine.train.activations import ActivationPlan, plan_activations
from opensora_cli.engine.train.build import count_parameters, find_frozen_parts
from opensora_cli.engine.train.files import CHECKPOINT_FILE, EXPORTS, LOG_FILE
from opensora_cli.settings.train import TrainSettings

PLAN_SCHEMA = "osora.train-plan/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainPlan:
    """Everything that is decided before a run begins."""

    settings: TrainSettings
    parameters: int
    """Numbers that are trained."""
    resume: bool
    """Whether it goes on from the checkpoint in the output folder."""
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
            "exports": list(EXPORTS[self.settings.target]),
            "resume": self.resume,
            "weights": {name: str(path) for name, path in self.weights.items() if path is not None},
            "missing_weights": self.missing_weights,
            "activations": self.activations.to_json() if self.activations else None,
            "settings": self.settings.model_dump(mode="json"),
        }

    def lines(self) -> list[str]:
        """Return the plan for people."""
        settings = self.settings
        start = f", going on from {self.output / CHECKPOINT_FILE}" if self.resume else ""
        return [
            f"target      {settings.target}",
            f"parameters  {self.parameters:,}",
            f"steps       {settings.loop.steps}, {settings.loop.batch_size} {self._examples} each{start}",
            f"output      {self.output}: {', '.join(EXPORTS[settings.target])}",
            *([f"memory      {self.activations.line()}"] if self.activations else []),
            *(f"weights     {path}" for path in self.weights.values() if path is not None),
            *(f"missing     {name}" for name in self.missing_weights),
        ]

    @property
    def _examples(self) -> str:
        return "captions" if self.settings.target == "text" else "clips"


def plan_training(settings: TrainSettings, *, resume: bool = False, overwrite: bool = False) -> TrainPlan:
    """Return what `train` would do, after the checks that need neither weights nor data.

    Args:
        settings: the run.
        resume: go on from the checkpoint in the output folder.
        overwrite: begin anew although the folder holds an earlier run.

    Raises:
        RequestError: `resume` and `overwrite` contradict each other, or sizes do, or a buffer is too small.
        CheckpointError: there is no checkpoint to resume from.
        OutputError: the folder holds an earlier run, and neither `resume` nor `overwrite` says what to do with it.
    """
    _check_output(settings, resume=resume, overwrite=overwrite)
    return TrainPlan(
        settings=settings,
        parameters=count_parameters(settings),
        resume=resume,
        weights=find_frozen_parts(settings),
        activations=plan_activations(settings),
    )


def _check_output(settings: TrainSettings, *, resume: bool, overwrite: bool) -> None:
    output = Path(settings.output)
    if resume and overwrite:
        raise RequestError("--resume goes on from what --overwrite takes away: give one of them")
    if resume and not (output / CHECKPOINT_FILE).is_file():
        raise CheckpointError(f"{output} has no {CHECKPOINT_FILE} to resume from", hint="start without --resume")
    found = [name for name in (CHECKPOINT_FILE, LOG_FILE, *EXPORTS[settings.target]) if (output / name).exists()]
    if found and not (resume or overwrite):
        go_on = "go on with --resume, " if CHECKPOINT_FILE in found else ""
        raise OutputError(
            f"{output} holds an earlier run: {', '.join(found)}",
            hint=f"{go_on}begin anew with --overwrite, or give another folder: --set output=FOLDER",
        )
