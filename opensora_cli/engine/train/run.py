"""Execution of `osora train`: starts or resumes a run, and exports the weights."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist

from opensora_cli.checkpoint.formats.colossal import all_epoch_folders
from opensora_cli.checkpoint.shared_folder import on_all
from opensora_cli.core.device import multiplies_bf16, random_state_kept
from opensora_cli.core.device_names import type_of_ranks
from opensora_cli.core.documents import Document
from opensora_cli.core.exceptions import OutputError, RequestError, TrainingError
from opensora_cli.core.limits import ThreadChoice, threads_used
from opensora_cli.core.locks import LOCK_FILE, sole_run
from opensora_cli.core.progress import Reporter, SilentReporter
from opensora_cli.core.ranks import RankContext, beat
from opensora_cli.core.signals import deferred_interrupts
from opensora_cli.data.batches import ClipSource
from opensora_cli.engine.components.attention import AttentionPlan
from opensora_cli.engine.components.hardware import OutOfMemoryError, out_of_memory_reported
from opensora_cli.engine.encode.clip_cache import require_same_settings
from opensora_cli.engine.encode.datasets import open_batches, open_table
from opensora_cli.engine.launch.launcher import LaunchRequest, launch, log_folder, write_settings
from opensora_cli.engine.launch.rank import WatchedReporter, settings_of_ranks
from opensora_cli.engine.train.build import build_task, open_clips_cache, plan_attention
from opensora_cli.engine.train.checkpoints import (
    CheckpointWriter,
    RunningStates,
    choose_checkpoint,
    prepare_output,
    read_running_states,
    restore,
    whole_weights,
)
from opensora_cli.engine.train.distribution import Distribution, joined_ranks, training_device
from opensora_cli.engine.train.early import Given, refuse_early
from opensora_cli.engine.train.evaluate import HeldOutLoss, SampleVideos, open_samples, open_validation
from opensora_cli.engine.train.memory import streamed_weights
from opensora_cli.engine.train.metrics import Metrics
from opensora_cli.engine.train.objectives import TokenWeights
from opensora_cli.engine.train.plan import TrainPlan, plan_training, refuse_lack_of_memory
from opensora_cli.engine.train.trainer import Trainer
from opensora_cli.settings.train import TrainSettings
from opensora_cli.settings.train_sections import Compute

_Event = HeldOutLoss | SampleVideos
_SAVING_S = 1800.0
"""Seconds that an interrupted rank has to finish its step and a checkpoint."""
_SMALLER = "use smaller batches or sizes, or memory.checkpointing=full; --dry-run prints the memory of a rank"


class TrainResult(Document):
    """Result of a finished run."""

    SCHEMA = "osora.train/2"

    target: str
    output: Path
    exports: tuple[Path, ...]
    checkpoint: Path
    """Last checkpoint."""
    steps: int
    resumed_from: int | None
    """Step of the checkpoint that the run resumed from. None means a run from the start."""
    parameters: int
    attention: AttentionPlan | None
    """Attention backend of the transformer, with the reason. None means that another part was trained."""

    def lines(self) -> list[str]:
        return [str(path) for path in self.exports]


def train(
    settings: TrainSettings,
    *,
    resume: Path | bool = False,
    overwrite: bool = False,
    reporter: Reporter | None = None,
    context: RankContext | None = None,
    rank_flags: Sequence[str] = (),
    source: ClipSource | None = None,
    held_out: ClipSource | None = None,
    token_weights: TokenWeights | None = None,
) -> TrainResult | None:
    """Train the model `settings.target`, and export it to `settings.output`. Several devices use several processes.

    `source` provides clips instead of `data.table`, and `held_out` instead of `validation.table`, in the sizes of
    `data.buckets`. `token_weights` weights the loss of the transformer. With any of these, several ranks need
    torchrun and `context=find_context(os.environ)`.

    The settings are also written there, as `settings.json`. `resume` is a checkpoint of the run, or True for its
    newest. A resumed run is bitwise identical to an uninterrupted one; with another number of ranks, it matches up to
    rounding. Without a `context`, the process runs alone, or starts ranks with `rank_flags` on their command line: the
    first one reports the result, and None is returned here.

    Raises:
        RequestError: The request contradicts itself.
        CheckpointError: Frozen weights or the checkpoint are missing or broken.
        FileProblem: The data are missing or broken.
        OutputError: The folder holds an earlier run, and neither `resume` nor `overwrite` is given, another run uses
            it, or it cannot be written.
        HardwareError: The device is missing, or has too little memory.
        TrainingError: The loss was not finite several steps in a row, or weights are not finite.
        RankFailure: A rank failed.
        KeyboardInterrupt: Its argument tells how to resume.
    """
    reporter = reporter or SilentReporter()
    given = Given(source, held_out, token_weights)
    with ExitStack() as stack:
        distribution = None
        if context is not None:
            refuse_lack_of_memory(settings_of_ranks(settings, context), rank=context.rank, reporter=reporter)
            settings, distribution = stack.enter_context(joined_ranks(settings, context))
            reporter = WatchedReporter(reporter)
        refuse_early(settings, resume=resume, overwrite=overwrite, given=given)
        plan = plan_training(settings, resume=resume, overwrite=overwrite)
        if distribution is None and (ranks := settings.parallel.world_size) > 1:
            if any(each is not None for each in given):
                raise RequestError(
                    f"parallel.gpus={ranks} starts no ranks for the clips of a program",
                    hint=f"use torchrun --nproc-per-node {ranks}, and pass context=find_context(os.environ)",
                )
            _start_ranks(settings, flags=rank_flags)
            return None
        if distribution is None:
            refuse_lack_of_memory(settings, rank=0, reporter=reporter)
            distribution = Distribution(training_device(settings))
        return _Run(plan, distribution, reporter, given).run()


def require_same_cache(settings: TrainSettings) -> None:
    """Raise FileProblem if the cache of clips was made with other settings. Weights are compared in the run."""
    if settings.clip_cache is not None:
        is_alone = settings.parallel.world_size == 1
        device = training_device(settings) if is_alone else torch.device(type_of_ranks(settings.device))
        require_same_settings(settings, device=device)


def _start_ranks(settings: TrainSettings, *, flags: Sequence[str]) -> None:
    """Train in one process per rank. Unreadable tables, and a cache of other settings, are refused before."""
    for each in [settings, *([settings.held_out] if settings.validation.every is not None else [])]:
        open_table(each, fixed_starts=False)
    kind, parallel = type_of_ranks(settings.device), settings.parallel
    require_same_cache(settings)
    with log_folder("train") as log_dir:
        request = LaunchRequest(parallel=parallel, gpus=parallel.ranks_per_node, device_type=kind, log_dir=log_dir)
        saved = write_settings(log_dir, settings.model_dump(mode="json"))
        launch(request, ["train", "--from", str(saved), *flags], finish_s=_SAVING_S)


def as_recorded(
    running: RunningStates, settings: TrainSettings, threads: ThreadChoice, *, data_ranks: int, reporter: Reporter
) -> tuple[TrainSettings, ThreadChoice]:
    """Return settings with the micro-batches of the checkpoint's run, and its CPU threads, on which sums depend.

    A number that a user chose stays, with a warning. Raises RequestError if the ranks cannot share the micro-batches.
    """
    if running.threads not in (None, threads.count):
        if threads.is_free:
            threads = ThreadChoice(count=running.threads, reason="as the run began, for the same sums")
        else:
            reporter.warn(
                f"the run had {running.threads} threads, and from now on {threads.line()}: results match up to "
                f"rounding; with --threads {running.threads} they are bitwise identical"
            )
    recorded, chosen = running.micro_batches, settings.loop.micro_batches
    if recorded in (None, chosen or data_ranks):
        return settings, threads
    if chosen is not None:
        reporter.warn(f"an update has {chosen} micro-batches from now on, instead of {recorded}")
        return settings, threads
    if recorded % data_ranks:
        least = -(-recorded // data_ranks) * data_ranks
        raise RequestError(
            f"the run began with loop.micro_batches={recorded}, which {data_ranks} data-parallel ranks cannot share",
            hint=f"use a number of ranks that divides {recorded}, or larger updates from now on: "
            f"--set loop.micro_batches={least}",
        )
    reporter.warn(f"loop.micro_batches={recorded}, as the run began, not {data_ranks}")
    return settings.replace({"loop.micro_batches": recorded}), threads


class _Run:
    """Part of a run in one process. The plan is the same on all ranks."""

    def __init__(self, plan: TrainPlan, distribution: Distribution, reporter: Reporter, given: Given) -> None:
        self._plan, self._distribution, self._reporter, self._given = plan, distribution, reporter, given
        self._settings, self._output = plan.settings, Path(plan.settings.output)
        self._writer = CheckpointWriter(self._output, keep=plan.settings.checkpoints.keep, reporter=reporter)
        self._metrics = Metrics(plan.settings, distribution=distribution, output=self._output, reporter=reporter)
        self._trainer: Trainer
        self._attention: AttentionPlan | None = None
        self._saved: Path | None = None
        """Last checkpoint."""
        self._saved_step: int | None = None
        self._done: list[str] = []
        """Validation and samples that are done for this step."""

    def run(self) -> TrainResult:
        try:
            with out_of_memory_reported(hint=_SMALLER):
                return self._run()
        except (TrainingError, OutOfMemoryError) as error:
            # Whether the last checkpoint is complete is known only now.
            has_checkpoint = self._output.is_dir() and bool(all_epoch_folders(self._output))
            way = "--resume from the last checkpoint" if has_checkpoint else "start again with --overwrite"
            raise type(error)(error.message, hint=f"{way}, and {error.hint}") from error

    def _run(self) -> TrainResult:
        plan, distribution, reporter = self._plan, self._distribution, self._reporter
        device, folder, threads = distribution.device, None, plan.threads
        with ExitStack() as stack:
            on_all(dist.group.WORLD if distribution.ranks > 1 else None, lambda: self._lock(stack))
            if plan.resume_from:
                folder = choose_checkpoint(self._output, plan.resume_from, distribution=distribution)
                recorded, data_ranks = read_running_states(folder), distribution.data_ranks
                self._settings, threads = as_recorded(
                    recorded, self._settings, threads, data_ranks=data_ranks, reporter=reporter
                )
            stack.enter_context(threads_used(threads, reporter))
            # Steps seed torch's global generator, whose state is the caller's.
            stack.enter_context(random_state_kept(device))
            self._attention = plan_attention(self._settings, device=device)
            # Open these first: encoders are freed before the model is loaded, and broken tables are found early.
            held_out, output = self._given.held_out, self._output
            events: dict[str, _Event | None] = {
                "validation": open_validation(
                    self._settings, distribution=distribution, reporter=reporter, source=held_out
                ),
                "samples": open_samples(self._settings, distribution=distribution, output=output, reporter=reporter),
            }
            self._trainer = trainer = self._build(stack)
            if folder is not None:
                self._resume(folder)
            first_step = trainer.step
            if distribution.is_main:
                prepare_output(
                    output, self._settings, folder, step=first_step, overwrite=plan.overwrite, reporter=reporter
                )
            distribution.barrier()
            # Only after the copy of the average, which needs no activations.
            module, frozen = trainer.task.module, plan.frozen_weights
            stack.enter_context(streamed_weights(module, frozen, self._settings, device=device, reporter=reporter))
            stack.enter_context(self._writer)
            self._report_start(first_step)
            self._metrics.start(first_step)
            second = "this step is finished and saved first; a second Ctrl-C ends at once, without that"
            with deferred_interrupts(lambda: reporter.note(second)) as is_interrupted:
                self._do_steps(events, is_interrupted)
                self._finish()
        assert self._saved is not None
        return TrainResult(
            target=self._settings.target,
            output=output,
            exports=tuple(output / name for name in self._settings.exports),
            checkpoint=self._saved,
            steps=trainer.step,
            resumed_from=None if folder is None else first_step,
            parameters=plan.parameters,
            attention=self._attention,
        )

    def _lock(self, stack: ExitStack) -> None:
        if self._distribution.is_main:
            problem = f"{self._output} is in use by another run"
            hint = "wait until it ends or end it, or give another folder: --set output=FOLDER"
            stack.enter_context(sole_run(self._output / LOCK_FILE, problem=problem, hint=hint))

    def _build(self, stack: ExitStack) -> Trainer:
        settings, distribution, reporter = self._settings, self._distribution, self._reporter
        clips = open_clips_cache(settings, distribution=distribution, reporter=reporter, source=self._given.source)
        task = build_task(
            settings, distribution=distribution, clips=clips, token_weights=self._given.token_weights, reporter=reporter
        )
        batches = open_batches(
            settings,
            data_rank=distribution.data_rank,
            data_ranks=distribution.data_ranks,
            reporter=reporter,
            load=None if clips is None else clips.clip,
            source=self._given.source,
        )
        stack.callback(batches.close)
        stack.callback(self._metrics.close)
        return Trainer(
            task,
            batches,
            loop=settings.loop,
            optimizer=settings.optimizer,
            compute=settings.precision.compute,
            distribution=distribution,
            clock=self._metrics.clock,
            trained_only=settings.lora.is_on,
        )

    def _resume(self, folder: Path) -> None:
        trainer = self._trainer
        running = restore(trainer, folder)
        steps = self._settings.loop.steps
        if trainer.step > steps:
            raise RequestError(
                f"loop.steps={steps} is already done: {folder} is of step {trainer.step}",
                hint=f"use a number over {trainer.step}: --set loop.steps=N",
            )
        self._done = list(running.done)
        before = running.attention
        if self._attention is not None and before not in (None, self._attention.backend):
            self._reporter.warn(
                f"attention: {self._attention.line()}, and up to this checkpoint it was {before}: "
                "results match up to rounding"
            )
        if folder.parent == self._output:
            self._saved, self._saved_step = folder, trainer.step

    def _report_start(self, first_step: int) -> None:
        settings, reporter = self._settings, self._reporter
        reporter.note(
            f"{settings.target}: {self._plan.parameters:,} parameters, steps {first_step} to {settings.loop.steps}"
        )
        if self._attention is not None:
            reporter.note(f"attention: {self._attention.line()}")
        for line in self._plan.memory_lines:
            reporter.note(f"memory: {line}")
        if settings.precision.compute is Compute.BF16 and not multiplies_bf16(self._distribution.device):
            reporter.warn(
                "this CPU has no native bfloat16 matmul: a step is many times slower than in float32: "
                "use --set precision.compute=fp32"
            )

    def _do_steps(self, events: Mapping[str, _Event | None], is_interrupted: Callable[[], bool]) -> None:
        steps, every, trainer = self._settings.loop.steps, self._settings.checkpoints.every, self._trainer
        with self._reporter.stage("train", total=steps, unit="steps") as progress:
            if trainer.step:
                progress.advance(trainer.step)
                beat("train")  # These steps took no time, and the next one includes warm-up.
            while True:
                # An interrupted run leaves the rest to the resumed one because SIGKILL may follow soon.
                self._stop_if(is_interrupted())
                for name, event in events.items():
                    if event is not None and name not in self._done and event.is_due(trainer.step):
                        self._hold(name, event)
                        self._stop_if(is_interrupted())
                if trainer.step >= steps:
                    return
                if trainer.step and trainer.step % every == 0:
                    self._save()
                self._done = []
                report = trainer.do_step()
                self._metrics.on_step(report)
                progress.advance()
                trainer.raise_if_stuck()

    def _stop_if(self, is_interrupted: bool) -> None:
        # There is nothing to save before the first step.
        if (step := self._trainer.step) and self._distribution.any(is_interrupted):
            self._save()
            self._writer.wait()
            of = f"{step} of {self._settings.loop.steps}"
            raise KeyboardInterrupt(f"step {of} is saved in {self._output}: continue with --resume")

    def _hold(self, name: str, event: _Event) -> None:
        step = self._trainer.step
        with self._metrics.clock.part(name):
            figures = event.run(step, self._trainer)
        self._done.append(name)
        # A checkpoint of this step, from an interruption, lacks what is done now.
        self._saved_step = None
        if name == "validation":
            self._metrics.on_validation(step, figures)

    def _save(self) -> None:
        """Save a checkpoint, unless this step is already saved."""
        trainer = self._trainer
        beat("checkpoint")
        if self._saved_step != trainer.step:
            with self._metrics.clock.part("checkpoint"):
                self._saved = self._writer.save(trainer, done=self._done, attention=self._attention)
            self._saved_step = trainer.step

    def _finish(self) -> None:
        """Save the last checkpoint, and export the weights even if that fails."""
        trainer, problem = self._trainer, None
        try:
            self._save()
            self._writer.wait()
        except OutputError as error:
            problem = error
        beat("export")
        weights = whole_weights(trainer)
        if self._distribution.is_main:
            trainer.task.export(weights, self._output)
        self._distribution.barrier()
        if problem is not None:
            self._reporter.note(f"the weights of step {trainer.step} are exported to {self._output}")
            raise problem
