"""Checkpoints in the folder of a run: the one to resume from, saving in the background, and removing old ones."""

import math
import secrets
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from statistics import fmean
from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_cli.checkpoint.formats.colossal import (
    RUNNING_STATES_SCHEMA,
    SETTINGS_FILE,
    all_epoch_folders,
    checkpoint_folder_name,
    epoch_folders,
)
from opensora_cli.checkpoint.shared_folder import (
    BackgroundJob,
    Share,
    on_all,
    remove_checkpoint,
    remove_unfinished,
    temporary_folder,
    write_share,
    wrong_files,
)
from opensora_cli.core.device import current_gpu, is_gpu, synchronize
from opensora_cli.core.exceptions import CheckpointError, FileProblem, OutputError, TrainingError
from opensora_cli.core.files import write_json_atomic
from opensora_cli.core.progress import Reporter, SilentReporter
from opensora_cli.core.rank_messages import all_gather_json, broadcast_json
from opensora_cli.engine.components.attention import AttentionPlan
from opensora_cli.engine.train.distribution import Distribution
from opensora_cli.engine.train.early import Resume, checkpoints_to_try
from opensora_cli.engine.train.metrics import remove_records, truncate_log
from opensora_cli.engine.train.state import read_running_states, tensors_of
from opensora_cli.engine.train.trainer import Trainer
from opensora_cli.settings.train import TrainSettings
from opensora_cli.settings.train_sections import CheckpointSettings

VALIDATION_LOSS, TRAINING_LOSS = "validation loss", "mean training loss"
"""Scores that compare checkpoints."""

_LONGEST = timedelta(days=7)
_ASIDE = "aside-"


def choose_checkpoint(output: Path, resume: Resume, *, distribution: Distribution, reporter: Reporter) -> Path:
    """Return the checkpoint to resume from. The ranks together compare its files with their hashes."""
    folders = checkpoints_to_try(output, resume)
    for number, folder in enumerate(folders):
        problems = wrong_files(folder, share=(distribution.rank, distribution.ranks))
        if distribution.ranks > 1:
            problems = sorted({problem for each in all_gather_json(problems) for problem in each})
        if not problems:
            return folder
        older = all_epoch_folders(output)
        older = older[older.index(folder) + 1 :] if folder in older else []
        if number == len(folders) - 1:
            hint = None if resume.folder is not None else "start again with --overwrite in place of --resume"
            if older and not resume.allow_older:
                way = "--allow-older resumes from" if resume.folder is None else "use the one before: --resume-from"
                hint = f"{way} {older[0]}"
            raise CheckpointError("\n".join([f"{folder} is broken:", *problems]), hint=hint)
        reporter.warn(f"{folder} is broken: {'; '.join(problems)}")
    raise AssertionError("there is at least one folder")


def prepare_output(
    output: Path, settings: TrainSettings, folder: Path | None, *, step: int, overwrite: bool, reporter: Reporter
) -> None:
    """Remove or rename files in the run's folder that do not belong to a run from `step` on; write its settings."""
    remove_unfinished(output)
    if folder is not None:
        set_aside_newer(output, folder, reporter=reporter)
        truncate_log(output, step=step)
        # An earlier run may have ended before it removed old checkpoints.
        remove_old(output, settings.checkpoints)
    elif overwrite:
        for each in all_epoch_folders(output) if output.is_dir() else ():
            remove_checkpoint(each)
        remove_records(output)
    write_json_atomic(output / SETTINGS_FILE, settings.model_dump(mode="json"))


def set_aside_newer(output: Path, folder: Path, *, reporter: Reporter) -> None:
    """Rename the checkpoints that are newer than `folder` because the resumed run will write its own."""
    folders = all_epoch_folders(output)
    newer = folders[: folders.index(folder)] if folder in folders else folders
    for each in newer:
        aside, number = each.with_name(f"{_ASIDE}{each.name}"), 1
        try:
            while aside.exists():
                number += 1
                aside = each.with_name(f"{_ASIDE}{number}-{each.name}")
            each.rename(aside)
        except OSError as error:
            raise OutputError(f"cannot rename {each}: {error.strerror or error}") from error
        reporter.note(f"{each.name} is renamed to {aside}")


class CheckpointWriter:
    """Writer that saves a run in the background, with all ranks.

    `save` copies everything and returns; weights may change right after it. The next `save` and `wait` wait for the
    writing to end. All ranks must call them at the same time. A `save` whose writing fails only warns because a full
    disk may get space again; `wait` raises the error.

    A folder `epoch{e}-global_step{n}/` holds `model/` (shards with an index), `ema.safetensors`, `optimizer/` and
    `running_states.json`. All tensors are whole, so that a run can be resumed with another number of ranks.
    """

    def __init__(self, output: Path, settings: CheckpointSettings, *, reporter: Reporter | None = None) -> None:
        self._output = output
        self._settings = settings
        self._reporter = reporter or SilentReporter()
        self._job = BackgroundJob()
        self._buffers: dict[tuple[str, str], Tensor] = {}
        self._group: dist.ProcessGroup | None = None
        """Group of the background threads of all ranks."""

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.wait()
        else:
            self._job.join()

    def save(
        self,
        trainer: Trainer,
        *,
        validation_loss: float | None = None,
        done: Sequence[str] = (),
        attention: AttentionPlan | None = None,
    ) -> Path:
        """Copy the state of a run between two steps, start writing it, and return its folder, which appears last.

        The best checkpoint has the lowest `validation_loss`, or mean loss of the steps since the last call. `done`
        names validation and samples done in this step; the checkpoint records them and `attention`. Raises
        TrainingError if the weights are not finite.
        """
        distribution = trainer.distribution
        self._job.join()
        error = self._job.take_error()
        if error is not None and not isinstance(error, OutputError):
            raise error
        if not trainer.are_weights_finite():
            raise TrainingError(
                f"weights are not finite after step {trainer.step}: they are not saved",
                hint="use a lower rate: --set optimizer.learning_rate=X",
            )
        if distribution.ranks > 1 and self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=_LONGEST)
        target = self._output / checkpoint_folder_name(epoch=trainer.batches.epoch, global_step=trainer.step)
        token = secrets.token_hex(4)
        temporary = temporary_folder(target, token=broadcast_json(token) if distribution.ranks > 1 else token)
        running = {
            **_running_states(trainer, validation_loss),
            "done": list(done),
            **({} if attention is None else {"attention": attention.to_json()}),
        }
        share = Share(tensors=self._copy(trainer), files={}, running_states=running, group=self._group)
        trainer.losses.clear()
        step = trainer.step

        def write() -> None:
            outcome = "is not saved"
            try:
                write_share(share, temporary, target)
                outcome = "is saved, and an old checkpoint is not removed"
                on_all(self._group, lambda: remove_old(self._output, self._settings) if distribution.is_main else None)
            except OutputError as error:
                self._reporter.warn(f"step {step} {outcome}: {error.message}")
                raise

        self._job.start(write)
        return target

    def wait(self) -> None:
        """Wait for the writing of all ranks to end. Raises an OutputError of any rank once, on all ranks."""
        self._job.join()
        error = self._job.take_error()
        if error is not None:
            raise error

    def _copy(self, trainer: Trainer) -> dict[str, dict[str, Tensor]]:
        """Copy this rank's tensors to the host, into the buffers of the last copy if they fit."""
        bytes_of = [0] * trainer.distribution.ranks
        buffers: dict[tuple[str, str], Tensor] = {}
        copied: dict[str, dict[str, Tensor]] = {}
        for part in tensors_of(trainer):
            whole = trainer.distribution.whole(part.parameter, part.tensor)
            owner = bytes_of.index(min(bytes_of))
            bytes_of[owner] += whole.nbytes
            kept = whole.new_empty(whole.shape, device="meta")
            if owner == trainer.distribution.rank:
                name = part.file, part.key
                buffer = self._buffers.get(name)
                if buffer is None or buffer.shape != whole.shape or buffer.dtype != whole.dtype:
                    buffer = torch.empty(whole.shape, dtype=whole.dtype, pin_memory=is_gpu(whole.device))
                kept = buffers[name] = buffer.copy_(whole, non_blocking=is_gpu(whole.device))
            copied.setdefault(part.file, {})[part.key] = kept
        if any(buffer.is_pinned() for buffer in buffers.values()):
            synchronize(current_gpu())
        self._buffers = buffers
        return copied


def remove_old(output: Path, settings: CheckpointSettings) -> None:
    """Remove the checkpoints of a run, except the newest and the best."""
    folders = epoch_folders(output)
    newest = folders[: settings.keep]
    best = _best(folders) if settings.keep_best else None
    for folder in folders:
        if folder not in newest and folder != best:
            remove_checkpoint(folder)


def _best(folders: list[Path]) -> Path | None:
    """Return the folder with the lowest validation loss, or training loss without one; the older one if equal."""
    scores: dict[str, dict[Path, float]] = {VALIDATION_LOSS: {}, TRAINING_LOSS: {}}
    for folder in reversed(folders):
        with suppress(FileProblem):
            running = read_running_states(folder)
            if running.score_of in scores and running.score is not None:
                scores[running.score_of][folder] = running.score
    chosen = scores[VALIDATION_LOSS] or scores[TRAINING_LOSS]
    return min(chosen, key=chosen.__getitem__) if chosen else None


def _running_states(trainer: Trainer, validation_loss: float | None) -> dict[str, object]:
    score = validation_loss if validation_loss is not None else fmean(trainer.losses or [math.nan])
    scored: dict[str, object] = {}
    if math.isfinite(score):
        scored = {"score": score, "score_of": TRAINING_LOSS if validation_loss is None else VALIDATION_LOSS}
    return {
        "schema": RUNNING_STATES_SCHEMA,
        "epoch": trainer.batches.epoch,
        "global_step": trainer.step,
        "micro_batches": trainer.micro_batches,
        "ranks": trainer.distribution.ranks,
        "threads": torch.get_num_threads(),
        "skipped_in_a_row": trainer.skipped_in_a_row,
        "sampler": trainer.batches.state_dict(),
        **scored,
    }
