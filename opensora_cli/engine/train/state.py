"""State of a run as whole tensors by name, independent of the number of ranks."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opensora_cli.checkpoint.formats.colossal import EMA_FILE, MODEL_FOLDER, OPTIMIZER_FOLDER
from opensora_cli.checkpoint.formats.safetensors import open_safetensors
from opensora_cli.checkpoint.formats.torch import load_torch
from opensora_cli.checkpoint.lazy import LazyTensor
from opensora_cli.checkpoint.opening import open_checkpoint
from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.core.files import json_bytes
from opensora_cli.core.formatting import first_few
from opensora_cli.core.reading import read_json_object
from opensora_cli.core.weight_choices import Selection
from opensora_cli.engine.components.hardware import is_out_of_memory
from opensora_cli.engine.train.ema import module_state
from opensora_cli.engine.train.moments import named_moments, restore_moments, update_counts
from opensora_cli.engine.train.parallelize import local
from opensora_cli.engine.train.resuming import RunningStates, read_running_states
from opensora_cli.engine.train.trainer import Trainer

ADVERSARY_FILE = "adversary.safetensors"
MOMENTS_FILE = f"{OPTIMIZER_FOLDER}/moments.safetensors"
ADVERSARY_MOMENTS_FILE = f"{OPTIMIZER_FOLDER}/adversary_moments.safetensors"
UPDATES_FILE = f"{OPTIMIZER_FOLDER}/updates.json"
SAMPLER_FILE = "sampler.pt"
"""File with the position in the data in checkpoints of earlier versions."""

_MOMENTS_OF = {"model": MOMENTS_FILE, "adversary": ADVERSARY_MOMENTS_FILE}
_MAX_SAMPLER_BYTES = 2**20
_MAX_UPDATES = 2**31
_BROKEN = (OSError, RuntimeError, ValueError, KeyError, TypeError, EOFError)


@dataclass(frozen=True, slots=True)
class StatePart:
    """Tensor of the state."""

    file: str
    """File of the checkpoint; `model` is a folder of shards."""
    key: str
    """Name of the tensor in that file."""
    parameter: str
    """Name of the parameter with the same layout, in the sharded module."""
    tensor: Tensor
    """Part of this rank, which training changes."""


def tensors_of(trainer: Trainer[Any]) -> Iterator[StatePart]:
    """Yield all tensors of a run, in the same order on all ranks."""
    whole_name = trainer.distribution.whole_name
    for name, tensor in module_state(trainer.task.module, trained_only=trainer.trained_only).items():
        yield StatePart(MODEL_FOLDER, whole_name(name), name, tensor)
    for name, tensor in (trainer.ema or {}).items():
        yield StatePart(EMA_FILE, whole_name(name), name, tensor)
    if trainer.task.adversary is not None:
        for name, tensor in module_state(trainer.task.adversary.module).items():
            yield StatePart(ADVERSARY_FILE, name, name, tensor)
    for learner, file in _MOMENTS_OF.items():
        if learner in trainer.learners:
            learning = trainer.learners[learner]
            for moment in named_moments(learning.module, learning.optimizers):
                key = f"{moment.name}.{whole_name(moment.parameter)}"
                yield StatePart(file, key, moment.parameter, moment.tensor)


def whole_weights(trainer: Trainer[Any]) -> dict[str, Tensor]:
    """Return the averaged, or else current, whole weights on the host of the main rank. All ranks must call this."""
    distribution, weights = trainer.distribution, trainer.ema
    if weights is None:
        weights = module_state(trainer.task.module, trained_only=trainer.trained_only)
    whole = {}
    for name, part in weights.items():
        gathered = distribution.whole(name, part)
        if distribution.is_main:
            whole[distribution.whole_name(name)] = gathered.cpu()
    return whole


def updates_file(trainer: Trainer[Any]) -> dict[str, bytes]:
    """Return the name and content of the file with the number of updates of each parameter."""
    whole_name = trainer.distribution.whole_name
    counts = {
        name: {whole_name(key): count for key, count in update_counts(each.module, each.optimizers).items()}
        for name, each in trainer.learners.items()
    }
    return {UPDATES_FILE: json_bytes(counts)}


def restore(trainer: Trainer[Any], folder: Path) -> RunningStates:
    """Restore a run from a complete checkpoint, in place, and return its record.

    Each rank reads its own part. Learning rates and other settings of this run stay. Raises CheckpointError if the
    checkpoint belongs to another model or other data.
    """
    try:
        running = read_running_states(folder)
        _restore_tensors(trainer, folder)
        _restore_moments(trainer, folder)
        sampler = running.sampler
        if sampler is None:
            sampler = load_torch(folder / SAMPLER_FILE, max_bytes=_MAX_SAMPLER_BYTES)
        trainer.batches.load_state_dict(sampler)
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
def _restore_tensors(trainer: Trainer[Any], folder: Path) -> None:
    stored: dict[str, Mapping[str, LazyTensor]] = {
        MODEL_FOLDER: open_checkpoint(folder, select=Selection.MODEL).entries,
        **{
            name: open_safetensors(folder / name)[0] if (folder / name).exists() else {}
            for name in (EMA_FILE, ADVERSARY_FILE)
        },
    }
    wanted = [part for part in tensors_of(trainer) if part.file in stored]
    for name, entries in stored.items():
        keys = {part.key for part in wanted if part.file == name}
        if name == EMA_FILE and not entries and keys:
            # A new average starts as a copy of the weights.
            stored[name] = stored[MODEL_FOLDER]
        elif keys and keys != entries.keys():
            odd = sorted(keys ^ entries.keys())
            raise CheckpointError(
                f"{folder / name} is of another model: {first_few(odd)} are not in both",
                hint="resume with the settings of the run, or start again with another --set output=FOLDER",
            )
    for part in wanted:
        entry = stored[part.file][part.key]
        if tuple(entry.shape) != tuple(part.tensor.shape) and trainer.distribution.ranks == 1:
            raise CheckpointError(
                f"{folder / part.file} is of another model: {part.key} is {list(entry.shape)}, and must be "
                f"{list(part.tensor.shape)}",
                hint="resume with the settings of the run, or start again with another --set output=FOLDER",
            )
        local(part.tensor).copy_(trainer.distribution.part(part.parameter, entry.read()))


def _restore_moments(trainer: Trainer[Any], folder: Path) -> None:
    counts = read_update_counts(folder / UPDATES_FILE)
    distribution = trainer.distribution
    for name, learner in trainer.learners.items():
        path = folder / _MOMENTS_OF[name]
        entries = open_safetensors(path)[0] if path.exists() else {}

        def find(parameter: str, moment: str, entries: Mapping[str, LazyTensor] = entries) -> Tensor:
            whole = entries[f"{moment}.{distribution.whole_name(parameter)}"].read()
            return distribution.part(parameter, whole)

        names = {distribution.whole_name(key): key for key, _ in learner.module.named_parameters()}
        own_counts = {names.get(key, key): count for key, count in counts.get(name, {}).items()}
        restore_moments(learner.module, learner.optimizers, own_counts, find)


def read_update_counts(path: Path) -> dict[str, dict[str, int]]:
    """Return the number of updates of each parameter of each learner."""
    counts = read_json_object(path, problem=CheckpointError)
    for each in counts.values():
        if not isinstance(each, dict) or not all(
            type(count) is int and 0 <= count <= _MAX_UPDATES for count in each.values()
        ):
            raise CheckpointError(f"{path} is broken: it holds no counts of updates")
    return counts
