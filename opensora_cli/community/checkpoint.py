"""Checkpoints: weights of any format, the state of a training run, sharded averages."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor, nn

from opensora_cli.checkpoint import save
from opensora_cli.checkpoint.formats.colossal import epoch_folders
from opensora_cli.checkpoint.formats.peft import WEIGHTS_FILE
from opensora_cli.checkpoint.load import fetch_from_hub
from opensora_cli.checkpoint.load import load_checkpoint as load_checkpoint
from opensora_cli.checkpoint.save import ADAPTER_FOLDER, Stateful
from opensora_cli.checkpoint.sharding import model_gathering as model_gathering
from opensora_cli.checkpoint.sharding import model_sharding as model_sharding
from opensora_cli.checkpoint.sharding import record_model_param_shape as record_model_param_shape
from opensora_cli.checkpoint.shared_folder import remove_checkpoint
from opensora_cli.community import refused
from opensora_cli.core.exceptions import RequestError


class CheckpointIO(save.CheckpointIO):
    """Writes checkpoint folders in the background, and reads them; all ranks call it, and the first one writes."""

    def __init__(self, n_write_entries: int = 32) -> None:
        super().__init__()

    def save(  # type: ignore[override]
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
        """Save what is given, and return the folder, named after the updates; with `lora` only a PEFT model's adapter.

        `ema` may be sharded, `master` are fp32 weights. Errors are those of the engine's.
        """
        _refuse(booster, include_master_weights and master is None)
        model = _unwrapped(model)
        states = (None if lora else model, ema, optimizer, lr_scheduler, sampler)
        counts = (epoch, step, global_step if actual_update_step is None else actual_update_step, batch_size)
        extras: dict[str, Any] = {"master": master, "ema_shapes": ema_shape_dict, "async_io": async_io}
        extras |= _peft_state(model) if lora and model is not None else {}
        return str(super().save(save_dir, *states, *counts, **extras))

    def load(  # type: ignore[override]
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
        """Restore what is given, in place, and return epoch and step; a PEFT model gets the adapter that was saved."""
        _refuse(booster, include_master_weights)
        self.wait()
        model = _unwrapped(model)
        adapter = Path(load_dir, ADAPTER_FOLDER, WEIGHTS_FILE)
        if model is not None and adapter.is_file():
            import peft

            peft.set_peft_model_state_dict(model, load_file(adapter))
            model = None
        running = super().load(load_dir, model, ema, optimizer, lr_scheduler, sampler, strict=strict)
        return running["epoch"], running["step"]


def _unwrapped(model: nn.Module | None) -> nn.Module | None:
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def _refuse(booster: object, wants_master: bool) -> None:
    if booster is not None:
        raise RequestError("booster must be None, as osora does without ColossalAI", hint="save(None, save_dir, model)")
    if wants_master:
        raise RequestError("include_master_weights: optimizers hold no weights here", hint="save(..., master=weights)")


def _peft_state(model: Any) -> dict[str, Any]:
    import peft

    config = json.loads(json.dumps(model.peft_config[model.active_adapter].to_dict(), default=sorted))
    return {"adapter": peft.get_peft_model_state_dict(model), "adapter_config": config}


def load_from_hf_hub(repo_path: str, cache_dir: str | None = None) -> str:
    """Return where a file of the Hub is, fetched unless it is there: `owner/repository/file`, or all weights."""
    return str(fetch_from_hub(repo_path, cache_dir=cache_dir))


def rm_checkpoints(save_dir: str | Path, keep_n_latest: int = 0) -> None:
    """Remove all but the newest checkpoints of a run; 0 keeps all. One rank calls it."""
    for folder in epoch_folders(Path(save_dir))[keep_n_latest:] if keep_n_latest > 0 else ():
        remove_checkpoint(folder)


master_weights_gathering = refused("master_weights_gathering", hint="use CheckpointIO.save(..., master=weights)")
load_master_weights = refused("load_master_weights", hint="use osora ckpt convert --select master")
