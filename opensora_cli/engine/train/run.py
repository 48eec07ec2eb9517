"""`osora train`: from settings to a run that is started, resumed or begun anew, and to exported weights."""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from opensora_cli.checkpoint.formats.colossal import (
    RUNNING_STATES_FILE,
    SETTINGS_FILE,
    TRAINING_FILE,
    all_epoch_folders,
)
from opensora_cli.checkpoint.shared_folder import remove_checkpoint, remove_unfinished
from opensora_cli.core.exceptions import OutputError, RequestError, TrainingError
from opensora_cli.core.files import write_json_atomic
from opensora_cli.core.folder_lock import locked_folder
from opensora_cli.core.progress import Reporter, SilentReporter
from opensora_cli.core.rank_link import beat
from opensora_cli.core.ranks import RankContext
from opensora_cli.engine.launch.rank import WatchedReporter, agreed
from opensora_cli.engine.train.activations import saved_activations
from opensora_cli.engine.train.build import build_batches, build_task, open_clips_cache
from opensora_cli.engine.train.checkpoints import DONE, CheckpointWriter
from opensora_cli.engine.train.files import exports
from opensora_cli.engine.train.interrupts import noticed
from opensora_cli.engine.train.plan import TrainPlan, plan_training
from opensora_cli.engine.train.precision import Precision
from opensora_cli.engine.train.ranks import joined_ranks, start_ranks, training_device
from opensora_cli.engine.train.resuming import Resume, choose_checkpoint, put_aside_newer
from opensora_cli.engine.train.samples import SampleVideos, open_samples
from opensora_cli.engine.train.state import restore, whole_weights
from opensora_cli.engine.train.strategy.distribution import Distribution
from opensora_cli.engine.train.trainer import Trainer, Validation
from opensora_cli.engine.train.validation import open_validation
from opensora_cli.engine.train.watching.watching import forget_all, forget_later, open_watching
from opensora_cli.settings.train import TrainSettings, TrainTarget

RESULT_SCHEMA = "osora.train/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """What a finished run left."""

    target: TrainTarget
    output: Path
    exports: tuple[Path, ...]
    checkpoint: Path
    """The last one."""
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
            "checkpoint": str(self.checkpoint),
            "steps": self.steps,
            "resumed_from": self.resumed_from,
            "parameters": self.parameters,
        }

    def lines(self) -> list[str]:
        """Return the path of everything that was exported."""
        return [str(path) for path in self.exports]


def train(
    settings: TrainSettings,
    *,
    resume: Resume | None = None,
    overwrite: bool = False,
    reporter: Reporter | None = None,
    context: RankContext | None = None,
    rank_flags: Sequence[str] = (),
) -> TrainResult | None:
    """Train what `settings.target` names, and export it to `settings.output`; on several devices in several processes.

    The settings are written there, too, as `settings.json`. A run that goes on from a checkpoint becomes what an
    uninterrupted one would have become: bit for bit with as many ranks, within rounding with another number.

    Args:
        settings: the run.
        resume: the checkpoint to go on from; None: begin at the start.
        overwrite: begin anew although the folder holds an earlier run.
        reporter: shown progress and warnings; None: nobody.
        context: which of several ranks this process is; None: it runs alone, or starts the ranks.
        rank_flags: of the command line of ranks that are started here.

    Returns:
        The result; None where ranks were started, of which the first has told it.

    Raises:
        RequestError: the request contradicts itself.
        CheckpointError: frozen weights or the checkpoint are missing or broken.
        FileProblem: the data are.
        OutputError: the folder holds an earlier run, and neither `resume` nor `overwrite` says what to do with it, or
            another run is at work in it, or it cannot be written.
        HardwareError: there is no such device, or no memory for offloaded activations.
        TrainingError: the loss was not finite several steps in a row, or weights are not.
        RankFailure: a rank failed.
        KeyboardInterrupt: its argument says how to go on.
    """
    reporter = reporter or SilentReporter()
    if context is not None:
        with joined_ranks(settings, context) as (agreed_settings, distribution):
            watched = WatchedReporter(reporter)
            plan = plan_training(agreed_settings, resume=resume, overwrite=overwrite)
            return _Run(plan, distribution, watched).go()
    plan = plan_training(settings, resume=resume, overwrite=overwrite)
    if settings.parallel.world_size > 1:
        start_ranks(settings, flags=rank_flags)
        return None
    return _Run(plan, Distribution(training_device(settings)), reporter).go()


class _Run:
    """One process's part of a run.

    Args:
        plan: of the run; the same on all ranks.
        distribution: of the ranks.
        reporter: shown progress and warnings.
    """

    def __init__(self, plan: TrainPlan, distribution: Distribution, reporter: Reporter) -> None:
        self._plan = plan
        self._distribution = distribution
        self._reporter = reporter
        self._settings = plan.settings
        self._output = plan.output
        self._writer = CheckpointWriter(plan.output, plan.settings.checkpoints, reporter=reporter)
        self._saved: Path | None = None
        self._saved_step: int | None = None
        self._watching = open_watching(plan.settings, distribution=distribution, output=plan.output, reporter=reporter)
        self._samples: SampleVideos | None = None
        self._validation: Validation | None = None
        self._validation_loss: float | None = None
        """Of the weights as they are now."""
        self._done: list[str] = []
        """At this step, beside training."""

    def go(self) -> TrainResult:
        """Do all of it."""
        try:
            return self._go()
        except TrainingError as error:
            # Only now is it known whether the last checkpoint was written to its end.
            has_checkpoint = self._output.is_dir() and bool(all_epoch_folders(self._output))
            way = "--resume from the last checkpoint" if has_checkpoint else "begin anew with --overwrite"
            raise TrainingError(error.message, hint=f"{way}, and {error.hint}") from error

    def _go(self) -> TrainResult:
        with ExitStack() as stack:
            self._enter_output(stack)
            folder = self._find_checkpoint()
            # Steps set torch's global generator; the caller's own use of it goes on undisturbed.
            device = self._distribution.device
            stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
            trainer = self._build(stack)
            if folder is not None:
                self._resume(trainer, folder)
            first_step = trainer.step
            self._prepare_output(folder, first_step)
            # Not where the task is built: a copy of the weights has no activations to keep.
            stack.enter_context(saved_activations(trainer.task.module, self._plan.activations))
            stack.enter_context(self._writer)
            self._tell(first_step)
            self._watching.begin(first_step)
            self._do_steps(trainer)
            problem = self._save_last(trainer)
            self._export(trainer)
            if problem is not None:
                self._reporter.note(f"the weights of step {trainer.step} are exported to {self._output} all the same")
                raise problem
        assert self._saved is not None
        return TrainResult(
            target=self._settings.target,
            output=self._output,
            exports=tuple(self._output / name for name in exports(self._settings)),
            checkpoint=self._saved,
            steps=trainer.step,
            resumed_from=None if folder is None else first_step,
            parameters=self._plan.parameters,
        )

    def _enter_output(self, stack: ExitStack) -> None:
        """Keep other runs out of the run's folder; all ranks hear of the one that is in it."""
        refusal = None
        if self._distribution.is_main:
            try:
                stack.enter_context(locked_folder(self._output))
            except OutputError as error:
                refusal = error.message, error.hint
        if self._distribution.ranks > 1:
            refusal = agreed(refusal)
        if refusal is not None:
            raise OutputError(refusal[0], hint=refusal[1])

    def _find_checkpoint(self) -> Path | None:
        """Return the checkpoint to go on from, and take over from it what must not change on the way."""
        if self._plan.resume is None:
            return None
        folder = choose_checkpoint(
            self._output, self._plan.resume, distribution=self._distribution, reporter=self._reporter
        )
        recorded = json.loads((folder / RUNNING_STATES_FILE).read_text(encoding="utf-8")).get("micro_batches")
        if isinstance(recorded, int):
            self._settle_micro_batches(folder, recorded)
        return folder

    def _settle_micro_batches(self, folder: Path, recorded: int) -> None:
        """Take those that are asked for or, where none are, as many as the run had."""
        asked, ranks = self._settings.loop.micro_batches, self._distribution.data_ranks
        if asked is not None:
            if asked != recorded:
                self._reporter.warn(f"an update has {asked} micro-batches from now on, instead of {recorded}")
            return
        if recorded % ranks:
            least = -(-recorded // ranks) * ranks
            raise RequestError(
                f"{folder} is of a run with loop.micro_batches={recorded}, which {ranks} data-parallel ranks cannot "
                "share",
                hint=f"use a number of ranks that divides {recorded}, or larger updates from now on: "
                f"--set loop.micro_batches={least}",
            )
        if recorded != ranks:
            self._reporter.warn(f"loop.micro_batches={recorded}, as the run began, not {ranks}")
            self._settings = self._settings.replace({"loop.micro_batches": recorded})

    def _build(self, stack: ExitStack) -> Trainer[Any]:
        settings, distribution, reporter = self._settings, self._distribution, self._reporter
        # First, since these need encoders for a moment only, and tables may be wrong.
        self._validation = open_validation(settings, distribution=distribution, reporter=reporter)
        self._samples = open_samples(settings, distribution=distribution, output=self._output, reporter=reporter)
        clips = open_clips_cache(settings, distribution=distribution, reporter=reporter)
        task = build_task(settings, distribution=distribution, clips=clips, reporter=reporter)
        batches = build_batches(settings, distribution=distribution, clips=clips, reporter=reporter)
        stack.callback(batches.close)
        stack.callback(self._watching.close)
        return Trainer(
            task,
            batches,
            loop=settings.loop,
            optimizer=settings.optimizer,
            precision=Precision(settings.precision, distribution.device),
            distribution=distribution,
            clock=self._watching.clock,
            observers=self._watching.observers,
            reporter=reporter,
            trained_only=settings.lora.is_on,
        )

    def _resume(self, trainer: Trainer[Any], folder: Path) -> None:
        running = restore(trainer, folder)
        steps = self._settings.loop.steps
        if trainer.step > steps:
            raise RequestError(
                f"loop.steps={steps} is over already: {folder} is of step {trainer.step}",
                hint=f"use a number over {trainer.step}: --set loop.steps=N",
            )
        self._done = list(running.get(DONE, ()))
        if folder.parent == self._output:
            self._saved, self._saved_step = folder, trainer.step

    def _prepare_output(self, folder: Path | None, first_step: int) -> None:
        """Leave nothing in the run's folder that is of another course of it."""
        if self._distribution.is_main:
            remove_unfinished(self._output)
            if folder is not None:
                put_aside_newer(self._output, folder, reporter=self._reporter)
                forget_later(self._output, step=first_step)
            elif self._plan.overwrite:
                for each in all_epoch_folders(self._output) if self._output.is_dir() else ():
                    remove_checkpoint(each)
                (self._output / TRAINING_FILE).unlink(missing_ok=True)
                forget_all(self._output)
            write_json_atomic(self._output / SETTINGS_FILE, self._settings.model_dump(mode="json"))
        self._distribution.barrier()

    def _tell(self, first_step: int) -> None:
        target, parameters = self._settings.target, self._plan.parameters
        steps = self._settings.loop.steps
        self._reporter.note(f"{target}: {parameters:,} parameters, steps {first_step} to {steps}")
        if self._plan.activations:
            self._reporter.note(f"memory: {self._plan.activations.line()}")

    def _do_steps(self, trainer: Trainer[Any]) -> None:
        steps, every = self._settings.loop.steps, self._settings.checkpoints.every

        def tell() -> None:
            self._reporter.note("this step is finished and saved first; a second Ctrl-C ends at once, without that")

        def stop_if_asked() -> None:
            # Before the first step there is nothing to save.
            if trainer.step and self._distribution.any(is_interrupted()):
                self._save(trainer)
                self._writer.wait()
                raise KeyboardInterrupt(
                    f"step {trainer.step} of {steps} is saved in {self._output}: go on with --resume"
                )

        def do_what_is_due() -> None:
            # An interruption does not wait for it, since whoever asks for an end may kill soon: a resumed run does it.
            stop_if_asked()
            for name, do in (("validation", self._validate), ("samples", self._sample)):
                if name not in self._done and do(trainer):
                    self._done.append(name)
                    stop_if_asked()
            # The last one may fail and all is exported yet.
            if 0 < trainer.step < steps and trainer.step % every == 0:
                self._save(trainer)

        with (
            noticed(tell) as is_interrupted,
            self._reporter.stage("train", total=steps, unit="steps") as progress,
        ):
            if trainer.step:
                progress.advance(trainer.step)
            do_what_is_due()
            while trainer.step < steps:
                self._done, self._validation_loss = [], None
                trainer.do_step()
                progress.advance()
                self._writer.look()
                do_what_is_due()

    def _validate(self, trainer: Trainer[Any]) -> bool:
        """Validate if it is time; return whether it was."""
        is_due = self._validation is not None and self._validation.is_due(trainer.step)
        if self._validation is not None and is_due:
            with self._watching.clock.part("validation"):
                figures = self._validation.run(trainer.step, trainer)
            self._validation_loss = figures["loss"]
            # If this step was saved at an interruption, that lacks the loss.
            self._saved_step = None
            trainer.tell_validation(figures)
        return is_due

    def _sample(self, trainer: Trainer[Any]) -> bool:
        """Make sample videos if it is time; return whether it was."""
        is_due = self._samples is not None and self._samples.is_due(trainer.step)
        if self._samples is not None and is_due:
            with self._watching.clock.part("samples"):
                self._samples.run(trainer.step, trainer)
        return is_due

    def _save(self, trainer: Trainer[Any]) -> None:
        """Save, unless this step is saved already."""
        # Waiting for the writing, which may follow, is no part of a step either.
        beat("checkpoint")
        if self._saved_step != trainer.step:
            with self._watching.clock.part("checkpoint"):
                self._saved = self._writer.save(trainer, validation_loss=self._validation_loss, done=self._done)
            self._saved_step = trainer.step

    def _save_last(self, trainer: Trainer[Any]) -> OutputError | None:
        """Save and wait for it; return what went wrong, since the weights can still be exported."""
        try:
            self._save(trainer)
            self._writer.wait()
        except OutputError as error:
            return error
        return None

    def _export(self, trainer: Trainer[Any]) -> None:
        beat("export")
        weights = whole_weights(trainer)
        if self._distribution.is_main:
            trainer.task.export(weights, self._output)
        self._distribution.barrier()
