"""`osora train`: from settings to a run that is started, resumed or begun anew, and to exported weights."""

from dataclasses import dataclass
from pathlib import Path

from opensora_cli.core.files import write_json_atomic
from opensora_cli.core.progress import Reporter, SilentReporter
from opensora_cli.engine.train.activations import saved_activations
from opensora_cli.engine.train.build import build_task
from opensora_cli.engine.train.files import CHECKPOINT_FILE, EXPORTS, LOG_FILE, SETTINGS_FILE
from opensora_cli.engine.train.loop import Trainer
from opensora_cli.engine.train.plan import plan_training
from opensora_cli.settings.train import TrainSettings, TrainTarget

RESULT_SCHEMA = "osora.train/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """What a finished run left."""

    target: TrainTarget
    output: Path
    exports: tuple[Path, ...]
    steps: int
    resumed_from: int | None
    """Step; None for a run from the start."""
    parameters: int

    def to_json(self) -> dict[str, object]:
        """Return the result as a document of the schema `osora.train/1`."""
        return {
            "schema": RESULT_SCHEMA,
            "target": self.target.value,
            "output": str(self.output),
            "exports": [str(path) for path in self.exports],
            "steps": self.steps,
            "resumed_from": self.resumed_from,
            "parameters": self.parameters,
        }

    def lines(self) -> list[str]:
        """Return the path of everything that was exported."""
        return [str(path) for path in self.exports]


def train(
    settings: TrainSettings, *, resume: bool = False, overwrite: bool = False, reporter: Reporter | None = None
) -> TrainResult:
    """Train what `settings.target` names, and export it to `settings.output`.

    The settings are written there, too, as `settings.json`.

    Args:
        settings: the run.
        resume: go on from the checkpoint in the output folder. Autoencoder and text encoders then become what an
            uninterrupted run would have made of them, on one thread bit for bit; for the transformer see `MMDiTTask`.
        overwrite: begin anew although the folder holds an earlier run.
        reporter: shown progress and warnings; None: nobody.

    Raises:
        RequestError: the request contradicts itself.
        CheckpointError: frozen weights or the checkpoint are missing or broken.
        OutputError: the folder holds an earlier run, and neither `resume` nor `overwrite` says what to do with it, or
            it cannot be written.
        HardwareError: the host has no memory for offloaded activations.
        OsoraError: the loss was not finite several steps in a row.
        KeyboardInterrupt: its argument says how to go on.
    """
    reporter = reporter or SilentReporter()
    plan = plan_training(settings, resume=resume, overwrite=overwrite)
    task = build_task(settings, reporter=reporter)
    trainer = Trainer(task, loop=settings.loop, optimizer=settings.optimizer, output=plan.output, reporter=reporter)
    if resume:
        trainer.resume()
    first_step = trainer.step
    # Not where the task is built: the average of the weights, a copy, has no activations to keep.
    with saved_activations(task.module, plan.activations):
        write_json_atomic(plan.output / SETTINGS_FILE, settings.model_dump(mode="json"))
        if overwrite:
            for name in (CHECKPOINT_FILE, LOG_FILE):
                (plan.output / name).unlink(missing_ok=True)
        reporter.note(f"{settings.target}: {plan.parameters:,} parameters, steps {first_step} to {settings.loop.steps}")
        if plan.activations:
            reporter.note(f"memory: {plan.activations.line()}")
        trainer.run()
    return TrainResult(
        target=settings.target,
        output=plan.output,
        exports=tuple(plan.output / name for name in EXPORTS[settings.target]),
        steps=trainer.step,
        resumed_from=first_step if resume else None,
        parameters=plan.parameters,
    )
