"""Saving and loading the state of a training run, without keeping the run waiting."""

import atexit
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from opensora_cli.checkpoint.background import BackgroundJob, HostCopies
from opensora_cli.checkpoint.formats.colossal import (
    EMA_FILE,
    MASTER_FILE,
    MODEL_FOLDER,
    OPTIMIZER_FOLDER,
    RUNNING_STATES_FILE,
    checkpoint_folder_name,
    read_running_document,
)
from opensora_cli.checkpoint.formats.peft import CONFIG_FILE, WEIGHTS_FILE
from opensora_cli.checkpoint.formats.safetensors import write_safetensors
from opensora_cli.checkpoint.formats.torch import load_saved, load_torch, save_whole
from opensora_cli.checkpoint.load import fill_module
from opensora_cli.checkpoint.opening import open_checkpoint
from opensora_cli.checkpoint.sharding import model_gathering, rank_and_count, record_model_param_shape
from opensora_cli.checkpoint.shards import write_shards
from opensora_cli.checkpoint.stream import HeldEntry
from opensora_cli.core.exceptions import CheckpointError, OutputError, osora_error
from opensora_cli.core.files import atomic_folder
from opensora_cli.core.formatting import escaped, first_few
from opensora_cli.core.rank_messages import broadcast_json
from opensora_cli.core.weight_choices import Selection

OPTIMIZER_FILE = f"{OPTIMIZER_FOLDER}/optimizer.pt"
LR_SCHEDULER_FILE = "lr_scheduler.pt"
SAMPLER_FILE = "sampler.pt"
ADAPTER_FOLDER = "lora"
_NAMES = (
    *(MODEL_FOLDER, ADAPTER_FOLDER, EMA_FILE, MASTER_FILE, OPTIMIZER_FOLDER),
    *(LR_SCHEDULER_FILE, SAMPLER_FILE, RUNNING_STATES_FILE),
)
"""What a folder may hold that is replaced."""


T = TypeVar("T")


class Stateful(Protocol):
    """What can be saved and restored: an optimizer, a schedule, a sampler."""

    def state_dict(self) -> dict[str, Any]:
        """Return all that there is to save."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> object:
        """Restore what was saved."""


class CheckpointIO:
    """Writes checkpoint folders in the background, and reads them.

    `save` copies everything and returns; weights may change right after it. The next `save`, `wait`, and leaving the
    `with` block all wait for the writing to end, and raise what went wrong there. A program that ends without any of
    them waits too, and prints the error.

    A folder `epoch{e}-global_step{n}/` holds `model/` (shards with an index), `ema.safetensors`, `master.safetensors`,
    `optimizer/`, and last `running_states.json`. It appears under its name only when it is complete.

    With several ranks all of them call every method, at the same time and with the same folder: the first one writes
    its states and the whole of what is sharded, and all raise what goes wrong there.
    """

    def __init__(self) -> None:
        self._job = BackgroundJob()
        self._copies = HostCopies()
        self._outcome_is_open = False
        """Whether ranks have yet to agree on how the last writing went."""

    def __enter__(self) -> "CheckpointIO":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.wait()
        else:
            # Other ranks may be gone.
            self._outcome_is_open = False
            self._wait_alone()

    def save(
        self,
        save_dir: str | Path,
        model: nn.Module | None = None,
        ema: nn.Module | Mapping[str, Tensor] | None = None,
        optimizer: Stateful | None = None,
        lr_scheduler: Stateful | None = None,
        sampler: Stateful | None = None,
        epoch: int = 0,
        step: int = 0,
        global_step: int = 0,
        batch_size: int | None = None,
        *,
        master: Mapping[str, Tensor] | None = None,
        ema_shapes: Mapping[str, Sequence[int]] | None = None,
        adapter: Mapping[str, Tensor] | None = None,
        adapter_config: Mapping[str, object] | None = None,
        async_io: bool = True,
    ) -> Path:
        """Save what is given into a folder of `save_dir`, replacing an earlier one of the same name.

        Args:
            save_dir: the run's folder.
            model: its parameters and persistent buffers, in the dtype they have; DTensors are gathered.
            ema: averaged weights: a module, which `model_sharding` may have sharded, or tensors by name.
            optimizer: moments and the like.
            lr_scheduler: where the learning rate is.
            sampler: where in the data the run is.
            epoch: of the run; the first is 0.
            step: batches of this epoch that are done.
            global_step: updates of the weights that are done.
            batch_size: of one rank.
            master: fp32 weights of a model that is trained in fewer bits.
            ema_shapes: what `record_model_param_shape` gave before `ema` was sharded; None: the shapes of `model`.
            adapter: a LoRA's weights by their names in PEFT's files, which go to the folder `lora`.
            adapter_config: what PEFT keeps beside them, as JSON has it.
            async_io: write in the background; otherwise return when all is on the disk.

        Returns:
            The checkpoint's folder, which exists once the writing is over.

        Raises:
            OutputError: this or, if it was not waited for, the save before could not be written; or a state holds what
                cannot be read again without trusting the file, or the folder holds foreign files.
        """
        self.wait()
        folder = Path(save_dir) / checkpoint_folder_name(epoch=epoch, global_step=global_step)
        _do_on_first_rank(lambda: _refuse_to_replace(folder))
        states = {OPTIMIZER_FILE: optimizer, LR_SCHEDULER_FILE: lr_scheduler, SAMPLER_FILE: sampler}
        given: dict[str, Any] = {
            MODEL_FOLDER: _tensors_of(model),
            EMA_FILE: _averages_of(ema, ema_shapes or ({} if model is None else record_model_param_shape(model))),
            MASTER_FILE: _tensors_of(master),
            **{name: None if state is None else _gathered(state.state_dict()) for name, state in states.items()},
            ADAPTER_FOLDER: None if adapter is None else {"weights": _tensors_of(adapter), "config": adapter_config},
        }
        running = {"epoch": epoch, "step": step, "global_step": global_step, "batch_size": batch_size}

        def copy_and_write() -> None:
            kept = self._snapshot({name: value for name, value in given.items() if value is not None})
            write = partial(_write_folder, folder, kept, running)
            if async_io:
                atexit.register(self._report_at_exit)
                self._job.start(write)
            else:
                write()

        _do_on_first_rank(copy_and_write)
        self._outcome_is_open = async_io and rank_and_count()[1] > 1
        return folder

    def wait(self) -> None:
        """Wait for the writing to end.

        Raises:
            OutputError: it went wrong; raised once.
        """
        if self._outcome_is_open:
            self._outcome_is_open = False
            _do_on_first_rank(self._wait_alone)
        else:
            self._wait_alone()

    def _wait_alone(self) -> None:
        # Its memory is free only when it has ended.
        self._job.join()
        atexit.unregister(self._report_at_exit)
        error = self._job.take_error()
        if error is not None:
            raise error

    def load(
        self,
        load_dir: str | Path,
        model: nn.Module | None = None,
        ema: nn.Module | None = None,
        optimizer: Stateful | None = None,
        lr_scheduler: Stateful | None = None,
        sampler: Stateful | None = None,
        *,
        strict: bool = True,
    ) -> dict[str, Any]:
        """Restore the given objects from a checkpoint, in place, also schedule and sampler of the reference's.

        Weights are overwritten in place: an optimizer's references stay valid. With `strict` their keys must match.

        Returns:
            `epoch`, `step`, `global_step` and `batch_size`.

        Raises:
            CheckpointError: the folder is not a complete checkpoint, lacks a state, or does not fit.
            RequestError: it lacks the selected weights.
        """
        self.wait()
        folder = Path(load_dir)
        running = _read_running_states(folder)
        for module, select in ((model, Selection.MODEL), (ema, Selection.EMA)):
            if module is not None:
                fill_module(module, open_checkpoint(folder, select=select), strict=strict)
        for target, name in ((optimizer, OPTIMIZER_FILE), (lr_scheduler, LR_SCHEDULER_FILE), (sampler, SAMPLER_FILE)):
            if target is not None:
                _load_state(target, folder / name)
        return running

    def _report_at_exit(self) -> None:
        if self._job.error is not None:
            print(escaped(f"error: the last checkpoint is lost: {self._job.error}"), file=sys.stderr)

    def _snapshot(self, values: dict[str, Any]) -> dict[str, Any]:
        """Copy everything; tensors to the host, into the memory of the last snapshot where they fit."""
        found, structure = pytree.tree_flatten_with_path(values)
        named = [(pytree.keystr(path), leaf) for path, leaf in found]
        plain = iter(_copy_plain([(name, leaf) for name, leaf in named if not isinstance(leaf, Tensor)]))
        with self._copies.renewed() as copy:
            copied = [copy(name, leaf) if isinstance(leaf, Tensor) else next(plain) for name, leaf in named]
        snapshot: dict[str, Any] = pytree.tree_unflatten(copied, structure)
        return snapshot


def _copy_plain(leaves: list[tuple[str, Any]]) -> list[Any]:
    """Copy what is not a tensor by writing and reading it, which shows at once that it can be read again."""
    try:
        return _written_and_read([leaf for _, leaf in leaves])
    except Exception:
        for name, leaf in leaves:
            try:
                _written_and_read([leaf])
            except Exception as error:
                raise OutputError(
                    f"the state {name} cannot be saved: {type(leaf).__name__} is nothing that can be read again safely",
                    hint="keep tensors, numbers, text, and lists and dictionaries of them in it",
                ) from error
        raise


def _written_and_read(values: list[Any]) -> list[Any]:
    buffer = BytesIO()
    torch.save(values, buffer)
    read: list[Any] = load_saved(buffer)
    return read


def _tensors_of(weights: nn.Module | Mapping[str, Tensor] | None) -> dict[str, Tensor] | None:
    if weights is None:
        return None
    return _gathered(dict(weights.state_dict() if isinstance(weights, nn.Module) else weights))


def _gathered(state: T) -> T:
    """Return a state with whole tensors on the host in place of DTensors; all ranks call it."""
    gathered: T = pytree.tree_map_only(DTensor, lambda tensor: tensor.full_tensor().cpu(), state)
    return gathered


def _averages_of(
    ema: nn.Module | Mapping[str, Tensor] | None, shapes: Mapping[str, Sequence[int]]
) -> dict[str, Tensor] | None:
    """Return the averaged weights, gathered on the first rank where `model_sharding` has sharded them."""
    if not isinstance(ema, nn.Module):
        return _tensors_of(ema)
    if all(tuple(weight.shape) == tuple(shapes.get(name, weight.shape)) for name, weight in ema.named_parameters()):
        return _tensors_of(ema)
    state = ema.state_dict() if rank_and_count()[0] == 0 else {}
    whole = {name: torch.empty(tuple(shapes.get(name, held.shape)), dtype=held.dtype) for name, held in state.items()}
    model_gathering(ema, shapes, whole)
    return whole


def _do_on_first_rank(do: Callable[[], object]) -> None:
    """Have the first rank do something alone, and raise on all ranks what goes wrong there."""
    rank, ranks = rank_and_count()
    if ranks == 1:
        do()
        return
    raised: Exception | None = None
    if rank == 0:
        try:
            do()
        except Exception as error:
            raised = error
    report = broadcast_json(raised and [type(raised).__name__, str(raised), getattr(raised, "hint", None)])
    if raised is not None:
        raise raised
    if report is not None:
        raise osora_error(*report)


def _refuse_to_replace(folder: Path) -> None:
    foreign = sorted(path.name for path in folder.iterdir() if path.name not in _NAMES) if folder.is_dir() else []
    if foreign:
        raise OutputError(
            f"{folder} holds more than a checkpoint, which would be lost: {first_few(foreign)}",
            hint="move it, or save to another folder",
        )


def _write_folder(folder: Path, kept: Mapping[str, Any], running: Mapping[str, object]) -> None:
    with atomic_folder(folder) as temporary:
        for name, value in kept.items():
            target = temporary / name
            target.parent.mkdir(exist_ok=True)
            if name == MODEL_FOLDER:
                target.mkdir()
                write_shards(target, _entries(value), metadata={"format": "pt"})
            elif name == ADAPTER_FOLDER:
                target.mkdir()
                write_safetensors(target / WEIGHTS_FILE, _entries(value["weights"]), metadata={"format": "pt"})
                (target / CONFIG_FILE).write_text(json.dumps(value["config"], indent=2), encoding="utf-8")
            elif name in (EMA_FILE, MASTER_FILE):
                write_safetensors(target, _entries(value), metadata={"format": "pt"})
            else:
                with target.open("wb") as file:
                    save_whole(value, file)
        (temporary / RUNNING_STATES_FILE).write_text(json.dumps(running), encoding="utf-8")


def _entries(tensors: Mapping[str, Tensor]) -> dict[str, HeldEntry]:
    return {name: HeldEntry(tensor) for name, tensor in tensors.items()}


def _read_running_states(folder: Path) -> dict[str, Any]:
    if not (folder / RUNNING_STATES_FILE).is_file():
        raise CheckpointError(f"{folder} is not a complete checkpoint: {RUNNING_STATES_FILE} is missing")
    return read_running_document(folder)


def _load_state(target: Stateful, path: Path) -> None:
    # The reference has no endings there.
    if not path.exists() and path.with_suffix("").is_file():
        path = path.with_suffix("")
    state = load_torch(path)
    try:
        target.load_state_dict(state)
    except Exception as error:
        raise CheckpointError(f"{path} is broken or of another run: {' '.join(str(error).split())[:300]}") from error
