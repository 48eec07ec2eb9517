"""Saving the checkpoints of a run in the background, and removing old ones."""

import math
import secrets
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from statistics import fmean
from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_cli.checkpoint.background import BackgroundJob
from opensora_cli.checkpoint.formats.colossal import RUNNING_STATES_SCHEMA, checkpoint_folder_name, epoch_folders
from opensora_cli.checkpoint.shared_folder import (
    Share,
    on_all,
    remove_checkpoint,
    temporary_folder,
    write_share,
)
from opensora_cli.core.exceptions import FileProblem, OutputError, TrainingError
from opensora_cli.core.progress import Reporter, SilentReporter
from opensora_cli.core.rank_messages import broadcast_json
from opensora_cli.engine.components.attention import AttentionPlan
from opensora_cli.engine.train.state import read_running_states, tensors_of
from opensora_cli.engine.train.trainer import Trainer
from opensora_cli.settings.train_loop import CheckpointSettings

VALIDATION_LOSS, TRAINING_LOSS = "validation loss", "mean training loss"
"""Scores that compare checkpoints."""

_LONGEST = timedelta(days=7)


class CheckpointWriter:
    """Writer that saves a run in the background, with all ranks.

    `save` copies everything and returns; weights may change right after it. The next `save` and `wait` wait for the
    writing to end. All ranks must call them at the same time. A `save` whose writing fails only warns because a full
    disk may get space again. A second failure in a row raises an error, and so does any failure in `wait`.

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
        self._has_warned = False
        self._had_failed = False
        """Whether the writing before the last one failed on any rank."""

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
        names validation and samples done in this step; the checkpoint records them and `attention`. Raises OutputError
        on all ranks if the last two saves failed, and TrainingError if the weights are not finite.
        """
        distribution = trainer.distribution
        self._let_one_failure_pass()
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
        running = _running_states(trainer, validation_loss, done)
        if attention is not None:
            running["attention"] = attention.to_json()
        share = Share(
            tensors=self._copy(trainer),
            files={},
            running_states=running,
            group=self._group,
        )
        trainer.losses.clear()

        def write() -> None:
            write_share(share, temporary, target)
            on_all(self._group, lambda: remove_old(self._output, self._settings) if distribution.is_main else None)

        self._job.start(write)
        return target

    def warn_of_failure(self) -> None:
        """Warn if the writing has already failed. Any rank may call this; it does not wait."""
        error = self._job.error
        if isinstance(error, OutputError) and not self._has_warned:
            self._has_warned = True
            outlook = "the next save ends the run" if self._had_failed else "the next save tries again"
            self._reporter.warn(f"{error.message}: {outlook}")

    def wait(self) -> None:
        """Wait for the writing of all ranks to end. Raises an OutputError of any rank once, on all ranks."""
        self._job.join()
        error = self._job.take_error()
        if error is not None:
            raise error

    def _let_one_failure_pass(self) -> None:
        self._job.join()
        self.warn_of_failure()
        self._has_warned = False
        error = self._job.take_error()
        if error is not None and (self._had_failed or not isinstance(error, OutputError)):
            raise error
        self._had_failed = error is not None

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
                    buffer = torch.empty(whole.shape, dtype=whole.dtype, pin_memory=whole.is_cuda)
                kept = buffers[name] = buffer.copy_(whole, non_blocking=whole.is_cuda)
            copied.setdefault(part.file, {})[part.key] = kept
        if any(buffer.is_pinned() for buffer in buffers.values()):
            torch.cuda.synchronize()
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
    scores = {}
    for folder in folders:
        try:
            running = read_running_states(folder)
        except FileProblem:
            continue
        if running.score_of in (VALIDATION_LOSS, TRAINING_LOSS) and running.score is not None:
            scores[folder] = (running.score_of, running.score)
    if not scores:
        return None
    kinds = {kind for kind, _ in scores.values()}
    kind = VALIDATION_LOSS if VALIDATION_LOSS in kinds else TRAINING_LOSS
    return min((folder for folder in reversed(scores) if scores[folder][0] == kind), key=lambda each: scores[each][1])


def _running_states(trainer: Trainer, validation_loss: float | None, done: Sequence[str]) -> dict[str, object]:
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
        "done": list(done),
        **scored,
    }
