"""State of a run as whole tensors by name, independent of the number of ranks."""

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import AliasPath, BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from opensora_cli.checkpoint.formats.colossal import (
    EMA_FILE,
    MODEL_FOLDER,
    OPTIMIZER_FOLDER,
    RUNNING_STATES_FILE,
    RUNNING_STATES_SCHEMA,
    read_running_document,
)
from opensora_cli.checkpoint.formats.safetensors import open_safetensors
from opensora_cli.checkpoint.lazy import LazyTensor
from opensora_cli.checkpoint.opening import open_checkpoint
from opensora_cli.core.choices import Selection
from opensora_cli.core.exceptions import CheckpointError, RequestError
from opensora_cli.core.formatting import first_few, plain
from opensora_cli.core.limits import ThreadChoice
from opensora_cli.core.progress import Reporter
from opensora_cli.engine.components.hardware import is_out_of_memory
from opensora_cli.engine.train.distribution import local
from opensora_cli.engine.train.optimizer import Learner, module_state, state_names
from opensora_cli.engine.train.trainer import MODEL, Trainer
from opensora_cli.settings.train import TrainSettings

_MAX_COUNT = 2**31
_MAX_THREADS = 1024  # limit of the settings
_BROKEN = (OSError, RuntimeError, ValueError, KeyError, TypeError, EOFError)
_Count = Annotated[int, Field(ge=0, le=_MAX_COUNT)]


class RunningStates(BaseModel):
    """State of a run beside its tensors. Fields with a default are missing in checkpoints of earlier versions."""

    model_config = ConfigDict(frozen=True, strict=True)

    global_step: _Count
    skipped_in_a_row: _Count
    micro_batches: Annotated[int, Field(gt=0, le=_MAX_COUNT)] | None = None
    threads: Annotated[int, Field(gt=0, le=_MAX_THREADS)] | None = None
    done: Annotated[list[Annotated[str, Field(max_length=100)]], Field(max_length=100)] = []
    attention: Annotated[str | None, Field(validation_alias=AliasPath("attention", "backend"))] = None
    """Attention backend that the run used."""
    score: Annotated[float, Field(allow_inf_nan=False)] | None = None
    score_of: str | None = None
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
        key = ".".join(map(str, first["loc"]))
        problem = f"{plain(key)}: {plain(first['msg'])}"
        raise CheckpointError(f"{folder / RUNNING_STATES_FILE} is broken: {problem}") from None


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


@dataclass(frozen=True, slots=True)
class StatePart:
    """Tensor of the state."""

    file: str
    """File of the checkpoint; `model` is a folder of shards."""
    key: str
    """Name of the tensor in that file."""
    parameter: str
    """Name of the parameter with the same layout, in the sharded module. Empty means the same tensor on all ranks."""
    tensor: Tensor
    """Part of this rank, which training changes."""


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


def restore(trainer: Trainer, folder: Path) -> RunningStates:
    """Restore a run from a complete checkpoint, in place, and return its record.

    Each rank reads its own part. Learning rates and other settings of this run stay. Raises CheckpointError if the
    checkpoint belongs to another model or other data.
    """
    running = read_running_states(folder)
    try:
        _restore_tensors(trainer, folder)
        trainer.batches.load_state_dict(running.sampler)
        trainer.skipped_in_a_row = running.skipped_in_a_row
        trainer.step = running.global_step
    except _BROKEN as error:
        if is_out_of_memory(error):
            raise
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"{folder} cannot be resumed from: {first_line}", hint="start again with another --set output=FOLDER"
        ) from error
    return running


@torch.no_grad()
def _restore_tensors(trainer: Trainer, folder: Path) -> None:
    roles = [EMA_FILE, *map(_weights_file, trainer.task.other_modules()), *map(_moments_file, trainer.learners)]
    stored: dict[str, Mapping[str, LazyTensor]] = {
        MODEL_FOLDER: open_checkpoint(folder, select=Selection.MODEL).entries,
        **{name: open_safetensors(folder / name)[0] if (folder / name).exists() else {} for name in roles},
    }
    for role, learner in trainer.learners.items():
        _allocate_moments(trainer, learner, stored[_moments_file(role)].keys())
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


def _allocate_moments(trainer: Trainer, learner: Learner, stored: Set[str]) -> None:
    """Allocate the state of the weights that a checkpoint has moments of, and drop that of others."""
    for parameter, weight, optimizer in learner.trained():
        kinds, whole_name = state_names(optimizer), trainer.distribution.whole_name(parameter)
        has_state = any(f"{kind}.{whole_name}" in stored for kind in kinds)
        optimizer.state[weight] = {
            # AdamW keeps its number of updates on the weight's device.
            kind: torch.zeros((), device=weight.device) if kind == "step" else torch.zeros_like(weight)
            for kind in kinds
            if has_state
        }


def _weights_file(role: str) -> str:
    return f"{role}.safetensors"


def _moments_file(role: str) -> str:
    return f"{OPTIMIZER_FOLDER}/{'' if role == MODEL else f'{role}_'}moments.safetensors"


def _of_another_model(path: Path, problem: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is of another model: {problem}",
        hint="resume with the settings of the run, or start again with another --set output=FOLDER",
    )
