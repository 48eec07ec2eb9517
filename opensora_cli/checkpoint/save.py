"""Saving and loading the state of a training run, without keeping the run waiting."""

import atexit
import json
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from opensora_cli.checkpoint.contents import Selection
from opensora_cli.checkpoint.formats.colossal import (
    EMA_FILE,
    MASTER_FILE,
    MODEL_FOLDER,
    OPTIMIZER_FOLDER,
    RUNNING_STATES_FILE,
    checkpoint_folder_name,
)
from opensora_cli.checkpoint.formats.safetensors import write_safetensors
from opensora_cli.checkpoint.formats.torch import save_whole
from opensora_cli.checkpoint.load import fill_module
from opensora_cli.checkpoint.opening import open_checkpoint
from opensora_cli.checkpoint.shards import write_shards
from opensora_cli.checkpoint.stream import HeldEntry
from opensora_cli.core.exceptions import CheckpointError, OutputError
from opensora_cli.core.files import atomic_folder
from opensora_cli.core.formatting import first_few

OPTIMIZER_FILE = f"{OPTIMIZER_FOLDER}/optimizer.pt"
LR_SCHEDULER_FILE = "lr_scheduler.pt"
SAMPLER_FILE = "sampler.pt"
_NAMES = (
    *(MODEL_FOLDER, EMA_FILE, MASTER_FILE, OPTIMIZER_FOLDER),
    *(LR_SCHEDULER_FILE, SAMPLER_FILE, RUNNING_STATES_FILE),
)
"""What a folder may hold that is replaced."""


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
    """

    def __init__(self) -> None:
        self._job = BackgroundJob()
        self._copies = HostCopies()

    def __enter__(self) -> "CheckpointIO":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.wait()

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
        async_io: bool = True,
    ) -> Path:
        """Save what is given into a folder of `save_dir`, replacing an earlier one of the same name.

        Args:
            save_dir: the run's folder.
            model: its parameters and persistent buffers, in the dtype they have.
            ema: averaged weights: a module, or tensors by name, as `model_gathering` gives them.
            optimizer: moments and the like.
            lr_scheduler: where the learning rate is.
            sampler: where in the data the run is.
            epoch: of the run; the first is 0.
            step: batches of this epoch that are done.
            global_step: updates of the weights that are done.
            batch_size: of one rank.
            master: fp32 weights of a model that is trained in fewer bits.
            async_io: write in the background; otherwise return when all is on the disk.

        Returns:
            The checkpoint's folder, which exists once the writing is over.

        Raises:
            OutputError: this or, if it was not waited for, the save before could not be written; or a state holds what
                cannot be read again without trusting the file, or the folder holds foreign files.
        """
        self.wait()
        folder = Path(save_dir) / checkpoint_folder_name(epoch=epoch, global_step=global_step)
        _refuse_to_replace(folder)
        states = {OPTIMIZER_FILE: optimizer, LR_SCHEDULER_FILE: lr_scheduler, SAMPLER_FILE: sampler}
        given = {
            MODEL_FOLDER: _tensors_of(model),
            EMA_FILE: _tensors_of(ema),
            MASTER_FILE: _tensors_of(master),
            **{name: None if state is None else state.state_dict() for name, state in states.items()},
        }
        running = {"epoch": epoch, "step": step, "global_step": global_step, "batch_size": batch_size}
        kept = self._snapshot({name: value for name, value in given.items() if value is not None})

        def write() -> None:
            _write_folder(folder, kept, running)

        if async_io:
            atexit.register(self._report_at_exit)
            self._job.start(write)
        else:
            write()
        return folder

    def wait(self) -> None:
        """Wait for the writing to end.

        Raises:
            OutputError: it went wrong; raised once.
        """
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
        """Restore the given objects from a checkpoint, in place.

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
            print(f"error: the last checkpoint is lost: {self._job.error}", file=sys.stderr)

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
    buffer.seek(0)
    read: list[Any] = torch.load(buffer, weights_only=True)
    return read


def _tensors_of(weights: nn.Module | Mapping[str, Tensor] | None) -> dict[str, Tensor] | None:
    if weights is None:
        return None
    return dict(weights.state_dict() if isinstance(weights, nn.Module) else weights)


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
            elif name in (EMA_FILE, MASTER_FILE):
                write_safetensors(target, _entries(value), metadata={"format": "pt"})
            else:
                with target.open("wb") as file:
                    save_whole(value, file)
        (temporary / RUNNING_STATES_FILE).write_text(json.dumps(running), encoding="utf-8")


def _entries(tensors: Mapping[str, Tensor]) -> dict[str, HeldEntry]:
    return {name: HeldEntry(tensor) for name, tensor in tensors.items()}


def _read_running_states(folder: Path) -> dict[str, Any]:
    path = folder / RUNNING_STATES_FILE
    try:
        states = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is not a complete checkpoint: {RUNNING_STATES_FILE} is missing") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(states, dict):
        raise CheckpointError(f"{path} is broken: it holds no object")
    return states


def _load_state(target: Stateful, path: Path) -> None:
    try:
        target.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except Exception as error:
        raise CheckpointError(f"{path} is broken or of another run: {' '.join(str(error).split())[:300]}") from error


class HostCopies:
    """Copies of tensors in the host's memory, each in the memory of the last one of its name where that fits."""

    def __init__(self) -> None:
        self._buffers: dict[Hashable, Tensor] = {}

    @contextmanager
    def renewed(self) -> Iterator[Callable[[Hashable, Tensor], Tensor]]:
        """Yield what copies a tensor under a name.

        When the block has ended the copies are there, and the memory of names that it did not copy is free.
        """
        buffers: dict[Hashable, Tensor] = {}

        def copy(name: Hashable, tensor: Tensor) -> Tensor:
            buffer = self._buffers.get(name)
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            buffers[name] = buffer.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
            return buffer

        yield copy
        if any(buffer.is_pinned() for buffer in buffers.values()):
            torch.cuda.synchronize()
        self._buffers = buffers


class BackgroundJob:
    """One thing at a time that is done in a thread; Python waits for it before it exits."""

    def __init__(self) -> None:
        self._thread: Thread | None = None
        self.error: BaseException | None = None
        """What ended the last one, until it is taken."""

    def start(self, do: Callable[[], None]) -> None:
        """Begin; the one before must have been joined."""

        def run() -> None:
            try:
                do()
            except BaseException as error:
                self.error = error

        self._thread = Thread(target=run, name="osora-checkpoint")
        self._thread.start()

    def join(self, seconds: float | None = None) -> bool:
        """Wait for its end, or so long; return whether it has ended. If not, it is still there to be waited for."""
        if self._thread is not None:
            self._thread.join(seconds)
            if self._thread.is_alive():
                return False
            self._thread = None
        return True

    def take_error(self) -> BaseException | None:
        """Return what went wrong, once."""
        error, self.error = self.error, None
        return error
