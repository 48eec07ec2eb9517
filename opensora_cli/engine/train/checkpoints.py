"""Checkpoints of a run: their tensors and record, choosing and restoring one, saving in the background, removing.

All tensors are whole and have names, so that a run can be resumed with another number of ranks.
"""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import torch.distributed as dist
from pydantic import AliasPath, BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from opensora_cli.checkpoint.formats.colossal import (
    EMA_FILE,
    MODEL_FOLDER,
    OPTIMIZER_FOLDER,
    RUNNING_STATES_FILE,
    RUNNING_STATES_SCHEMA,
    SETTINGS_FILE,
    all_epoch_folders,
    checkpoint_folder_name,
    epoch_folders,
    read_running_document,
)
from opensora_cli.checkpoint.formats.safetensors import open_safetensors
from opensora_cli.checkpoint.lazy import LazyTensor
from opensora_cli.checkpoint.opening import open_checkpoint
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
from opensora_cli.core.choices import Selection
from opensora_cli.core.device import current_gpu, is_gpu, synchronize
from opensora_cli.core.exceptions import CheckpointError, OutputError, TrainingError
from opensora_cli.core.files import write_json_atomic
from opensora_cli.core.formatting import first_few, plain
from opensora_cli.core.progress import Reporter, SilentReporter
from opensora_cli.core.rank_messages import all_gather_json, broadcast_json
from opensora_cli.engine.components.attention import AttentionPlan
from opensora_cli.engine.components.hardware import is_out_of_memory
from opensora_cli.engine.train.distribution import Distribution, local
from opensora_cli.engine.train.early import find_checkpoint
from opensora_cli.engine.train.metrics import remove_records, truncate_log
from opensora_cli.engine.train.optimizer import module_state, zero_state
from opensora_cli.engine.train.trainer import MODEL, Trainer
from opensora_cli.settings.train import TrainSettings

_LONGEST = timedelta(days=7)
_BROKEN = (OSError, RuntimeError, ValueError, KeyError, TypeError, EOFError)
_Count = Annotated[int, Field(ge=0, le=2**31)]


class RunningStates(BaseModel):
    """State of a run beside its tensors. Fields with a default are missing in checkpoints of earlier versions."""

    model_config = ConfigDict(frozen=True, strict=True)

    global_step: _Count
    skipped_in_a_row: _Count
    micro_batches: Annotated[int, Field(gt=0, le=2**31)] | None = None
    threads: Annotated[int, Field(gt=0, le=1024)] | None = None
    done: Annotated[list[Annotated[str, Field(max_length=100)]], Field(max_length=100)] = []
    attention: Annotated[str | None, Field(validation_alias=AliasPath("attention", "backend"))] = None
    """Attention backend that the run used."""
    sampler: dict[str, Any]


def read_running_states(folder: Path) -> RunningStates:
    """Return the record of a checkpoint. Raises CheckpointError if it is missing, broken, or of an earlier version."""
    document = read_running_document(folder)
    if document.get("schema") != RUNNING_STATES_SCHEMA:
        raise CheckpointError(
            f"{folder / RUNNING_STATES_FILE} has no schema {RUNNING_STATES_SCHEMA}: this version of osora cannot "
            "resume it",
            hint="resume with the version that wrote it, or start again with another --set output=FOLDER",
        )
    try:
        return RunningStates.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        problem = f"{plain('.'.join(map(str, first['loc'])))}: {plain(first['msg'])}"
        raise CheckpointError(f"{folder / RUNNING_STATES_FILE} is broken: {problem}") from None


class StatePart(NamedTuple):
    """This rank's part of a tensor of the state, with its file (`model` is a folder of shards) and its name there.

    `parameter` names the parameter of the sharded module with the same layout; empty means the same on all ranks.
    """

    file: str
    key: str
    parameter: str
    tensor: Tensor


def tensors_of(trainer: Trainer) -> Iterator[StatePart]:
    """Yield all tensors of a run, in the same order on all ranks."""
    whole_name = trainer.distribution.whole_name
    for name, tensor in module_state(trainer.task.module, trained_only=trainer.trained_only).items():
        yield StatePart(MODEL_FOLDER, whole_name(name), name, tensor)
    for name, tensor in (trainer.ema or {}).items():
        yield StatePart(EMA_FILE, whole_name(name), name, tensor)
    for role, module in trainer.task.other_modules().items():
        for name, tensor in module_state(module).items():
            yield StatePart(_weights_file(role), name, name, tensor)
    for role, learner in trainer.learners.items():
        for name, weight, optimizer in learner.trained():
            for kind, value in optimizer.state[weight].items():
                parameter = "" if kind == "step" else name
                yield StatePart(_moments_file(role), f"{kind}.{whole_name(name)}", parameter, value)


def _weights_file(role: str) -> str:
    return f"{role}.safetensors"


def _moments_file(role: str) -> str:
    return f"{OPTIMIZER_FOLDER}/{'' if role == MODEL else f'{role}_'}moments.safetensors"


def whole_weights(trainer: Trainer) -> dict[str, Tensor]:
    """Return the averaged, or else current, whole weights on the host of the main rank. All ranks must call this."""
    distribution, file = trainer.distribution, MODEL_FOLDER if trainer.ema is None else EMA_FILE
    whole = {}
    for part in tensors_of(trainer):
        if part.file == file:
            gathered = distribution.whole(part.parameter, part.tensor)
            if distribution.is_main:
                whole[part.key] = gathered.cpu()
    return whole


def choose_checkpoint(output: Path, resume: Path | bool, *, distribution: Distribution) -> Path:
    """Return the checkpoint to resume from. The ranks together compare its files with their hashes."""
    folder = find_checkpoint(output, resume)
    problems = wrong_files(folder, share=(distribution.rank, distribution.ranks))
    if distribution.ranks > 1:
        problems = sorted({problem for each in all_gather_json(problems) for problem in each})
    if problems:
        of_run = all_epoch_folders(output)
        older = of_run[of_run.index(folder) + 1 :] if folder in of_run else []
        hint = f"use the one before: --resume-from {older[0]}" if older else "start again with --overwrite"
        raise CheckpointError("\n".join([f"{folder} is broken:", *problems]), hint=hint)
    return folder


def restore(trainer: Trainer, folder: Path) -> RunningStates:
    """Restore a run from a complete checkpoint, in place, and return its record.

    Each rank reads its own part. Learning rates and other settings of this run stay. Raises CheckpointError if the
    checkpoint belongs to another model or other data.
    """
    running = read_running_states(folder)
    try:
        _restore_tensors(trainer, folder)
        trainer.batches.load_state_dict(running.sampler)
    except _BROKEN as error:
        if is_out_of_memory(error):
            raise
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"{folder} cannot be resumed from: {first_line}", hint="start again with another --set output=FOLDER"
        ) from error
    trainer.skipped_in_a_row, trainer.step = running.skipped_in_a_row, running.global_step
    return running


@torch.no_grad()
def _restore_tensors(trainer: Trainer, folder: Path) -> None:
    roles = [EMA_FILE, *map(_weights_file, trainer.task.other_modules()), *map(_moments_file, trainer.learners)]
    stored: dict[str, Mapping[str, LazyTensor]] = {
        MODEL_FOLDER: open_checkpoint(folder, select=Selection.MODEL).entries,
        **{name: open_safetensors(folder / name)[0] if (folder / name).exists() else {} for name in roles},
    }
    for role, learner in trainer.learners.items():
        moments = stored[_moments_file(role)]
        for parameter, weight, optimizer in learner.trained():
            state, whole_name = zero_state(optimizer, weight), trainer.distribution.whole_name(parameter)
            # Allocate the state of the weights that the checkpoint has moments of, and drop that of others.
            optimizer.state[weight] = state if any(f"{kind}.{whole_name}" in moments for kind in state) else {}
    parts = [*tensors_of(trainer)]
    for name, entries in stored.items():
        keys = {part.key for part in parts if part.file == name}
        if name == EMA_FILE and not (keys and entries):
            # A new average starts as a copy of the weights.
            stored[name] = stored[MODEL_FOLDER]
        elif keys != entries.keys():
            raise _of_another_model(folder / name, f"{first_few(sorted(keys ^ entries.keys()))} are not in both")
    for part in parts:
        own, target = trainer.distribution.part(part.parameter, stored[part.file][part.key].read()), local(part.tensor)
        if own.shape != target.shape:
            problem = f"{part.key} is {list(own.shape)}, and must be {list(target.shape)}"
            raise _of_another_model(folder / part.file, problem)
        target.copy_(own)


def _of_another_model(path: Path, problem: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is of another model: {problem}",
        hint="resume with the settings of the run, or start again with another --set output=FOLDER",
    )


def prepare_output(
    output: Path, settings: TrainSettings, folder: Path | None, *, step: int, overwrite: bool, reporter: Reporter
) -> None:
    """Remove or rename files in the run's folder that do not belong to a run from `step` on; write its settings."""
    remove_unfinished(output)
    if folder is not None:
        set_aside_newer(output, folder, reporter=reporter)
        truncate_log(output, step=step)
        # An earlier run may have ended before it removed old checkpoints.
        remove_old(output, keep=settings.checkpoints.keep)
    elif overwrite:
        for each in all_epoch_folders(output) if output.is_dir() else ():
            remove_checkpoint(each)
        remove_records(output)
    write_json_atomic(output / SETTINGS_FILE, settings.model_dump(mode="json"))


def set_aside_newer(output: Path, folder: Path, *, reporter: Reporter) -> None:
    """Rename the checkpoints that are newer than `folder` because the resumed run will write its own."""
    folders = all_epoch_folders(output)
    for each in folders[: folders.index(folder)] if folder in folders else folders:
        names = (each.with_name(f"aside-{number}-{each.name}") for number in count(1))
        aside = next(path for path in names if not path.exists())
        try:
            each.rename(aside)
        except OSError as error:
            raise OutputError(f"cannot rename {each}: {error.strerror or error}") from error
        reporter.note(f"{each.name} is renamed to {aside}")


def remove_old(output: Path, *, keep: int) -> None:
    for folder in epoch_folders(output)[keep:]:
        remove_checkpoint(folder)


class CheckpointWriter:
    """Writer that saves a run in the background, with all ranks.

    `save` copies everything and returns; weights may change right after it. The next `save` and `wait` wait for the
    writing to end. All ranks must call them at the same time. A `save` whose writing fails only warns because a full
    disk may get space again; `wait` raises the error.

    A folder `epoch{e}-global_step{n}/` holds `model/` (shards with an index), `ema.safetensors`, `optimizer/` and
    `running_states.json`.
    """

    def __init__(self, output: Path, *, keep: int = 3, reporter: Reporter | None = None) -> None:
        self._output, self._keep = output, keep
        self._reporter = reporter or SilentReporter()
        self._job = BackgroundJob()
        self._buffers: dict[tuple[str, str], Tensor] = {}
        self._group: dist.ProcessGroup | None = None
        """Group of the background threads of all ranks."""

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.wait()
        else:
            self._job.wait()

    def save(self, trainer: Trainer, *, done: Sequence[str] = (), attention: AttentionPlan | None = None) -> Path:
        """Copy the state of a run between two steps, start writing it, and return its folder, which appears last.

        `done` names validation and samples done in this step; the checkpoint records them and `attention`. Raises
        TrainingError if the weights are not finite.
        """
        distribution, step, epoch = trainer.distribution, trainer.step, trainer.batches.epoch
        error = self._job.wait()
        if error is not None and not isinstance(error, OutputError):
            raise error
        if not trainer.are_weights_finite():
            raise TrainingError(
                f"weights are not finite after step {step}: they are not saved",
                hint="use a lower rate: --set optimizer.learning_rate=X",
            )
        if distribution.ranks > 1 and self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=_LONGEST)
        target = self._output / checkpoint_folder_name(epoch=epoch, global_step=step)
        token = secrets.token_hex(4)
        temporary = temporary_folder(target, token=broadcast_json(token) if distribution.ranks > 1 else token)
        running: dict[str, object] = {
            "schema": RUNNING_STATES_SCHEMA,
            "epoch": epoch,
            "global_step": step,
            "micro_batches": trainer.micro_batches,
            "ranks": distribution.ranks,
            "threads": torch.get_num_threads(),
            "skipped_in_a_row": trainer.skipped_in_a_row,
            "sampler": trainer.batches.state_dict(),
            "done": list(done),
        }
        if attention is not None:
            running["attention"] = attention.to_json()
        share = Share(tensors=self._copy(trainer), files={}, running_states=running, group=self._group)

        def write() -> None:
            outcome = "is not saved"
            try:
                write_share(share, temporary, target)
                outcome = "is saved, and an old checkpoint is not removed"
                on_all(self._group, lambda: remove_old(self._output, keep=self._keep) if distribution.is_main else None)
            except OutputError as error:
                self._reporter.warn(f"step {step} {outcome}: {error.message}")
                raise

        self._job.start(write)
        return target

    def wait(self) -> None:
        """Wait for the writing of all ranks to end. Raises an OutputError of any rank once, on all ranks."""
        if (error := self._job.wait()) is not None:
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
