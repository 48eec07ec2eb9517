"""Functions for checkpoints: weights of any format, the state of a training run, sharded averages."""

import atexit
import io
import json
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from opensora_cli.checkpoint.formats.colossal import (
    EMA_FILE,
    MASTER_FILE,
    MODEL_FOLDER,
    OPTIMIZER_FOLDER,
    RUNNING_STATES_FILE,
    checkpoint_folder_name,
    epoch_folders,
    read_running_document,
)
from opensora_cli.checkpoint.formats.peft import CONFIG_FILE, WEIGHTS_FILE
from opensora_cli.checkpoint.formats.torch import read_object
from opensora_cli.checkpoint.load import fill_module
from opensora_cli.checkpoint.opening import open_checkpoint
from opensora_cli.checkpoint.shared_folder import (
    BackgroundJob,
    Share,
    on_all,
    remove_checkpoint,
    remove_unfinished,
    temporary_folder,
    write_share,
)
from opensora_cli.community import own_piece, rank_and_count, refused, unwrapped
from opensora_cli.core.choices import Selection
from opensora_cli.core.exceptions import CheckpointError, OutputError, RequestError
from opensora_cli.core.files import json_bytes
from opensora_cli.core.formatting import escaped, first_few, plain, without_credentials

_ADAPTER_FOLDER = "lora"
_STATE_FILES = (f"{OPTIMIZER_FOLDER}/optimizer.pt", "lr_scheduler.pt", "sampler.pt")
_REPLACED = (
    *(MODEL_FOLDER, _ADAPTER_FOLDER, EMA_FILE, MASTER_FILE, OPTIMIZER_FOLDER),
    *(*_STATE_FILES, RUNNING_STATES_FILE),
)
_T = TypeVar("_T")


class CheckpointIO:
    """Reader and background writer of checkpoint folders. All ranks call it, and the first rank writes.

    `save` copies everything and returns. The next `save`, `load` or `wait` waits for the writing to end, and raises its
    error on all ranks. The end of the program waits too, and prints the error.
    """

    def __init__(self, n_write_entries: int = 32) -> None:
        self._job = BackgroundJob()

    def save(
        self,
        booster: None,
        save_dir: str | Path,
        model: nn.Module | None = None,
        ema: nn.Module | None = None,
        optimizer: Stateful | None = None,
        lr_scheduler: Stateful | None = None,
        sampler: Stateful | None = None,
        epoch: int = 0,
        step: int = 0,
        global_step: int = 0,
        batch_size: int | None = None,
        lora: bool = False,
        actual_update_step: int | None = None,
        ema_shape_dict: Mapping[str, Sequence[int]] | None = None,
        async_io: bool = True,
        include_master_weights: bool = False,
        *,
        master: Mapping[str, Tensor] | None = None,
    ) -> str:
        """Save the given objects, and return the folder, named after the updates.

        `ema` may be sharded by `model_sharding`. `master` are fp32 weights. With `lora`, only the adapter of a PEFT
        model is saved. Raises OutputError if this or the last save cannot be written, or a state cannot be read again.
        """
        _refuse(booster, include_master_weights and master is None)
        self.wait()
        updates = global_step if actual_update_step is None else actual_update_step
        folder = Path(save_dir) / checkpoint_folder_name(epoch=epoch, global_step=updates)
        module = unwrapped(model)
        shapes = ema_shape_dict or ({} if module is None else record_model_param_shape(module))
        tensors: dict[str, Mapping[str, Tensor]] = {}
        files: dict[str, bytes] = {}
        if module is not None and lora:
            import peft

            config = json.loads(json.dumps(module.peft_config[module.active_adapter].to_dict(), default=sorted))
            files[f"{_ADAPTER_FOLDER}/{CONFIG_FILE}"] = json_bytes(config)
            tensors[f"{_ADAPTER_FOLDER}/{WEIGHTS_FILE}"] = _gathered(peft.get_peft_model_state_dict(module))
        elif module is not None:
            tensors[MODEL_FOLDER] = _gathered(module.state_dict())
        if ema is not None:
            tensors[EMA_FILE] = _averages(ema, shapes)
        if master is not None:
            tensors[MASTER_FILE] = _gathered(dict(master))
        named = zip(_STATE_FILES, (optimizer, lr_scheduler, sampler), strict=True)
        states = {name: _gathered(state.state_dict()) for name, state in named if state is not None}
        running = {"epoch": epoch, "step": step, "global_step": updates, "batch_size": batch_size}

        def copy_and_write() -> None:
            _refuse_to_replace(folder)
            remove_unfinished(folder.parent)
            copies = {
                name: {key: tensor.detach().to("cpu", copy=True) for key, tensor in group.items()}
                for name, group in tensors.items()
            }
            serialized = {name: _serialized(name, state) for name, state in states.items()}
            share = Share(tensors=copies, files=files | serialized, running_states=running)
            write = partial(write_share, share, temporary_folder(folder, token=secrets.token_hex(4)), folder)
            if async_io:
                atexit.register(self._report_at_exit)
                self._job.start(write)
            else:
                write()

        _do_on_first_rank(copy_and_write)
        return str(folder)

    def wait(self) -> None:
        """Wait for the writing to end. Raises its OutputError once, on all ranks."""
        _do_on_first_rank(self._wait)

    def load(
        self,
        booster: None,
        load_dir: str | Path,
        model: nn.Module | None = None,
        ema: nn.Module | None = None,
        optimizer: Stateful | None = None,
        lr_scheduler: Stateful | None = None,
        sampler: Stateful | None = None,
        strict: bool = False,
        include_master_weights: bool = False,
    ) -> tuple[int, int]:
        """Restore the given objects in place, and return epoch and step. A PEFT model gets the saved adapter.

        Raises CheckpointError or RequestError if the folder is incomplete or does not fit.
        """
        _refuse(booster, include_master_weights)
        self.wait()
        folder, model = Path(load_dir), unwrapped(model)
        if not (folder / RUNNING_STATES_FILE).is_file():
            raise CheckpointError(f"{folder} is not a complete checkpoint: {RUNNING_STATES_FILE} is missing")
        running = read_running_document(folder)
        adapter = folder / _ADAPTER_FOLDER / WEIGHTS_FILE
        if model is not None and adapter.is_file():
            import peft

            peft.set_peft_model_state_dict(model, load_file(adapter))
            model = None
        for module, select in ((model, Selection.MODEL), (ema, Selection.EMA)):
            if module is not None:
                fill_module(module, open_checkpoint(folder, select=select), strict=strict)
        for name, target in zip(_STATE_FILES, (optimizer, lr_scheduler, sampler), strict=True):
            if target is not None:
                _load_state(target, folder / name)
        return running["epoch"], running["step"]

    def _wait(self) -> None:
        error = self._job.wait()
        atexit.unregister(self._report_at_exit)
        if error is not None:
            raise error

    def _report_at_exit(self) -> None:
        if self._job.error is not None:
            print(escaped(f"error: the last checkpoint is lost: {self._job.error}"), file=sys.stderr)


def _refuse(booster: object, wants_master: bool) -> None:
    if booster is not None:
        raise RequestError("booster must be None, as osora does without ColossalAI", hint="save(None, save_dir, model)")
    if wants_master:
        raise RequestError("include_master_weights: optimizers hold no weights here", hint="save(..., master=weights)")


def _refuse_to_replace(folder: Path) -> None:
    foreign = sorted(path.name for path in folder.iterdir() if path.name not in _REPLACED) if folder.is_dir() else []
    if foreign:
        raise OutputError(
            f"{folder} holds more than a checkpoint: {first_few(foreign)}", hint="move it, or save to another folder"
        )


def _gathered(state: _T) -> _T:
    """Return a state with whole tensors instead of DTensors; all ranks call it."""
    gathered: _T = pytree.tree_map_only(DTensor, lambda tensor: tensor.full_tensor(), state)
    return gathered


def _averages(ema: nn.Module, shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    if all(tuple(weight.shape) == tuple(shapes.get(name, weight.shape)) for name, weight in ema.named_parameters()):
        return _gathered(ema.state_dict())
    state = ema.state_dict() if rank_and_count()[0] == 0 else {}
    whole = {name: torch.empty(tuple(shapes.get(name, held.shape)), dtype=held.dtype) for name, held in state.items()}
    model_gathering(ema, shapes, whole)
    return whole


def _serialized(name: str, state: object) -> bytes:
    buffer = io.BytesIO()
    try:
        torch.save(state, buffer)
        torch.load(io.BytesIO(buffer.getbuffer()), weights_only=True)
    except Exception as error:
        reason = " ".join(str(error).split()).rpartition("WeightsUnpickler error: ")[2]
        hint = "keep tensors, numbers, text, and lists and dictionaries of them in the state"
        raise OutputError(f"{name} cannot be saved: {reason[:300]}", hint=hint) from error
    return buffer.getvalue()


def _load_state(target: Stateful, path: Path) -> None:
    # The reference writes names without endings.
    if not path.exists() and path.with_suffix("").is_file():
        path = path.with_suffix("")
    state = read_object(path)
    try:
        target.load_state_dict(state)
    except Exception as error:
        raise CheckpointError(f"{path} is broken or of another run: {' '.join(str(error).split())[:300]}") from error


def _do_on_first_rank(do: Callable[[], object]) -> None:
    """Call `do` on the first rank only. Its error is raised there, and the other ranks raise OutputError."""
    rank, ranks = rank_and_count()
    on_all(dist.group.WORLD if ranks > 1 else None, lambda: None if rank else do())


def load_checkpoint(
    model: nn.Module,
    path: str | Path,
    cache_dir: str | Path | None = None,
    device_map: torch.device | str = "cpu",
    cai_model_name: str = "model",
    strict: bool = True,
    rename_keys: Mapping[str, str] | None = None,
) -> nn.Module:
    """Load weights of any format from a file, a folder or the Hugging Face Hub, and return the model.

    Existing weights are overwritten in place. Weights on the meta device get the checkpoint's dtype, 8-bit ones
    torch's default. Raises CheckpointError or RequestError if there is nothing to load, or it does not fit.

    Args:
        path: a file or folder; if there is none, `owner/repository/file` on the Hub.
        cache_dir: folder for files of the Hub; None means the usual cache.
        device_map: device for weights on the meta device.
        cai_model_name: the part of a ColossalAI checkpoint that is loaded: `model`, or a file or folder in it.
        strict: refuse missing and unexpected keys; otherwise they cause a warning. Shapes must fit in any case.
        rename_keys: old to new parts of names, replaced before names are compared.
    """
    found = Path(path) if Path(path).exists() else Path(load_from_hf_hub(str(path), cache_dir=cache_dir))
    if cai_model_name != MODEL_FOLDER:
        found = found / cai_model_name
    checkpoint = open_checkpoint(found)
    renamed = {}
    for name, entry in checkpoint.entries.items():
        for old, new in (rename_keys or {}).items():
            name = name.replace(old, new)
        if name in renamed:
            raise RequestError(f"rename_keys gives two tensors the same name: {plain(name)}")
        renamed[name] = entry
    fill_module(model, replace(checkpoint, entries=renamed), device=device_map, strict=strict)
    return model


def load_from_hf_hub(repo_path: str, cache_dir: str | Path | None = None) -> str:
    """Return the path of `owner/repository/file` in the Hub's cache, fetched if missing.

    Raises CheckpointError if the file is missing, or the Hub cannot be reached.
    """
    owner, _, rest = repo_path.partition("/")
    repository, _, file = rest.partition("/")
    if owner in ("", ".", "..", "~") or not file:
        raise CheckpointError(f"{repo_path} does not exist", hint="a file on the Hub is OWNER/REPOSITORY/FILE")
    try:
        # Importing it reads HF_ENDPOINT.
        from huggingface_hub import hf_hub_download

        return hf_hub_download(f"{owner}/{repository}", file, cache_dir=cache_dir)
    except Exception as error:  # errors of the HTTP library, and any error from an unexpected answer
        lines = without_credentials(str(error)).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(
            f"{repo_path} does not exist here, and cannot be fetched from the Hugging Face Hub: {plain(lines[0])}"
        ) from error


def rm_checkpoints(save_dir: str | Path, keep_n_latest: int = 0) -> None:
    """Remove all except the newest checkpoints of a run; 0 keeps all. One rank calls it."""
    for folder in epoch_folders(Path(save_dir))[keep_n_latest:] if keep_n_latest > 0 else ():
        remove_checkpoint(folder)


# Sharded averages: equal flat pieces of parameters, one for each rank, padded with zeros. An averaged copy of a large
# model is updated element by element, so a rank needs the whole copy only for saving.


def record_model_param_shape(model: nn.Module) -> dict[str, torch.Size]:
    """Return the shape of each parameter by name, for `model_gathering`."""
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def model_sharding(model: nn.Module, device: torch.device | str | None = None) -> None:
    """Replace every parameter, in place, by this rank's piece, on `device` or on the parameter's device.

    The model is equal on all ranks. Buffers stay whole, and gradients are dropped.
    """
    for parameter in model.parameters():
        parameter.data = own_piece(parameter, device)
        parameter.grad = None


def model_gathering(
    model: nn.Module, model_shape_dict: Mapping[str, Sequence[int]], pinned_state_dict: Mapping[str, Tensor]
) -> None:
    """Gather the pieces of a sharded model on the first rank; all ranks call it.

    `model_shape_dict` has the shapes before sharding. `pinned_state_dict` holds the tensors that receive parameters and
    buffers on the first rank; other ranks may pass an empty one. Raises KeyError if a dictionary lacks a parameter.
    """
    rank, ranks = rank_and_count()
    for name, parameter in model.named_parameters():
        shape = tuple(model_shape_dict[name])
        pieces = [torch.empty_like(parameter) for _ in range(ranks)] if rank == 0 else None
        if ranks > 1:
            dist.gather(parameter.detach().contiguous(), pieces)
        elif pieces is not None:
            pieces = [parameter.detach()]
        if pieces is not None:
            pinned_state_dict[name].copy_(torch.cat(pieces)[: prod(shape)].view(shape))
    if rank == 0:
        for name, buffer in model.named_buffers():
            if name in pinned_state_dict:
                pinned_state_dict[name].copy_(buffer)


master_weights_gathering = refused("master_weights_gathering", hint="use CheckpointIO.save(..., master=weights)")
load_master_weights = refused("load_master_weights", hint="use osora ckpt convert --select master")
