"""Saving the checkpoints of a run in the background, and removing old ones."""

import json
import math
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from opensora_cli.checkpoint.background import BackgroundJob, HostCopies
from opensora_cli.checkpoint.formats.colossal import (
    MODEL_FOLDER,
    RUNNING_STATES_SCHEMA,
    checkpoint_folder_name,
    epoch_folders,
)
from opensora_cli.checkpoint.shards import SAFETENSORS_FORM, make_index, name_shards
from opensora_cli.checkpoint.shared_folder import (
    Share,
    remove_checkpoint,
    remove_unfinished,
    temporary_folder,
    write_share,
)
from opensora_cli.checkpoint.stream import Entry, HeldEntry
from opensora_cli.core.exceptions import FileProblem, OutputError, TrainingError
from opensora_cli.core.progress import Reporter, SilentReporter
from opensora_cli.core.rank_messages import broadcast_json
from opensora_cli.engine.components.attention import AttentionPlan
from opensora_cli.engine.train.distribution import Distribution
from opensora_cli.engine.train.running_states import read_running_states
from opensora_cli.engine.train.state import files_of, tensors_of
from opensora_cli.engine.train.trainer import Trainer
from opensora_cli.settings.train_loop import CheckpointSettings

VALIDATION_LOSS, TRAINING_LOSS = "validation loss", "mean training loss"
"""The scores by which checkpoints are compared."""

ATTENTION = "attention"
"""Key in `running_states.json`: what computed the transformer's attention."""
DONE = "done"
"""Key in `running_states.json`: what of validation and samples this step has had before an interruption."""

_LOOK_S = 1.0


class CheckpointWriter:
    """Saves a run in the background, with all ranks.

    `save` copies everything and returns; weights may change right after it. The next `save` and `wait` wait for the
    writing to end. All ranks must call them at the same time. One `save` whose writing fails is only warned about:
    a full disk may get space again. A second failure in a row raises, and so does any failure in `wait`.

    A folder `epoch{e}-global_step{n}/` holds `model/` (shards with an index), `ema.safetensors`, `optimizer/`, small
    states, and last `running_states.json`. All tensors are whole, so a run may be resumed with another number of ranks.
    """

    def __init__(self, output: Path, settings: CheckpointSettings, *, reporter: Reporter | None = None) -> None:
        self._output = output
        self._settings = settings
        self._reporter = reporter or SilentReporter()
        self._job = BackgroundJob()
        self._copies = HostCopies()
        self._distribution: Distribution | None = None
        """Of the last save, until it was waited for."""
        self._has_warned = False
        self._had_failed = False
        """Whether the writing before the last one failed, on any rank."""

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.wait()
        elif self._distribution is None or self._distribution.ranks == 1:
            # Other ranks may be gone; the launcher ends this one too.
            self._job.join()

    def save(
        self,
        trainer: Trainer[Any],
        *,
        validation_loss: float | None = None,
        done: Sequence[str] = (),
        attention: AttentionPlan | None = None,
    ) -> Path:
        """Copy the state of a run between two steps, start to write it, and return its folder, not there until whole.

        The best checkpoint is chosen by `validation_loss`; None: by the mean loss of the steps since the last call.
        `done` names what has been done at this step beside training; the checkpoint keeps it, and `attention`.

        Raises:
            OutputError: neither of the two saves before could be written; the same on all ranks.
            TrainingError: the weights are not finite: nothing is saved.
        """
        distribution = trainer.distribution
        self._let_one_failure_pass(distribution)
        if not trainer.are_weights_finite():
            raise TrainingError(
                f"weights are not finite after step {trainer.step}: they are not saved",
                hint="use a lower rate: --set optimizer.learning_rate=X",
            )
        self._distribution = distribution
        target = self._output / checkpoint_folder_name(epoch=trainer.batches.epoch, global_step=trainer.step)
        token = secrets.token_hex(4)
        temporary = temporary_folder(target, token=broadcast_json(token) if distribution.ranks > 1 else token)
        running = _running_states(trainer, validation_loss, done)
        if attention is not None:
            running[ATTENTION] = attention.to_json()
        share = self._share(trainer, running)
        trainer.losses.clear()

        def write() -> None:
            write_share(share, temporary, target)
            if distribution.is_main:
                remove_old(self._output, self._settings)

        self._job.start(write)
        return target

    def warn_of_failure(self) -> None:
        """Warn if the writing has failed by now; it waits for nothing, and any rank may call it."""
        error = self._job.error
        if isinstance(error, OutputError) and not self._has_warned:
            self._has_warned = True
            outlook = "the next save ends the run" if self._had_failed else "the next save tries again"
            self._reporter.warn(f"{error.message}: {outlook}")

    def wait(self) -> None:
        """Wait for the writing of all ranks to end. An OutputError of any rank is raised once, on all of them."""
        if self._distribution is not None:
            self._join(self._distribution)
            error = self._take_error(self._distribution)
            self._distribution = None
            if error is not None:
                raise error

    def _join(self, distribution: Distribution) -> None:
        # Hashing and removal may take one rank longer than a collective's timeout.
        while distribution.any(not self._job.join(_LOOK_S)):
            pass

    def _take_error(self, distribution: Distribution) -> BaseException | None:
        """Return the error, once: on all ranks, if there is one on any."""
        error = self._job.take_error()
        # The other ranks do not see where the first one fails at the end.
        if distribution.any(error is not None) and error is None:
            error = OutputError(f"another rank could not write a checkpoint in {self._output}")
        return error

    def _let_one_failure_pass(self, distribution: Distribution) -> None:
        self._join(distribution)
        self.warn_of_failure()
        self._has_warned = False
        error = self._take_error(distribution)
        if error is not None and (self._had_failed or not isinstance(error, OutputError)):
            raise error
        self._had_failed = error is not None
        if self._had_failed and distribution.is_main:
            # It frees space; the other ranks write nothing before this one has sent them the folder's name.
            remove_unfinished(self._output)

    def _share(self, trainer: Trainer[Any], running_states: Mapping[str, object]) -> Share:
        tensors = self._copy(trainer)
        model = tensors.pop(MODEL_FOLDER)
        outlines: dict[str, Entry] = {key: HeldEntry(tensor) for key, tensor in model.items()}
        shards = name_shards(outlines)
        files = {f"{MODEL_FOLDER}/{name}": {key: model[key] for key in shard} for name, shard in shards.items()}

        def index(hashes: Mapping[str, str]) -> bytes:
            sha256 = {name: hashes[f"{MODEL_FOLDER}/{name}"] for name in shards}
            return json.dumps(make_index(shards, metadata={"format": "pt"}, sha256=sha256), indent=2).encode()

        return Share(
            tensors={**files, **tensors},
            files=files_of(trainer),
            indexes={f"{MODEL_FOLDER}/{SAFETENSORS_FORM.index_name}": index},
            running_states=running_states,
            process=trainer.distribution.rank,
            processes=trainer.distribution.ranks,
        )

    def _copy(self, trainer: Trainer[Any]) -> dict[str, dict[str, Tensor]]:
        """Copy this rank's tensors to the host, into the memory of the last copy where they fit."""
        ranks, rank = trainer.distribution.ranks, trainer.distribution.rank
        bytes_of = [0] * ranks
        copied: dict[str, dict[str, Tensor]] = {}
        with self._copies.renewed() as copy:
            for part in tensors_of(trainer):
                whole = trainer.distribution.whole(part.parameter, part.tensor)
                owner = bytes_of.index(min(bytes_of))
                bytes_of[owner] += whole.nbytes
                if owner == rank:
                    kept = copy((part.file, part.key), whole)
                else:
                    kept = torch.empty(whole.shape, dtype=whole.dtype, device="meta")
                copied.setdefault(part.file, {})[part.key] = kept
        return copied


def remove_old(output: Path, settings: CheckpointSettings) -> None:
    """Remove the checkpoints of a run that are neither among the newest nor the best."""
    folders = epoch_folders(output)
    newest = folders[: settings.keep]
    best = _best(folders) if settings.keep_best else None
    for folder in folders:
        if folder not in newest and folder != best:
            remove_checkpoint(folder)


def _best(folders: list[Path]) -> Path | None:
    """Return the folder with the lowest validation loss or, where none has such, training loss.

    The older one of two equals.
    """
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


def _running_states(trainer: Trainer[Any], validation_loss: float | None, done: Sequence[str]) -> dict[str, object]:
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
        DONE: list(done),
        **scored,
    }
