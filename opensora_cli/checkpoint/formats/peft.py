"""Files and configuration of PEFT adapters. Needs no torch."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from opensora_cli.core.exceptions import CheckpointError, RequestError, missing_library
from opensora_cli.core.formatting import plain, shown

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

_MAX_ALPHA = 1_000_000
_REFUSED = (
    *("use_dora", "lora_bias", "use_qalora", "use_bdlora", "alora_invocation_tokens", "arrow_config"),
    *("layer_replication", "target_parameters", "trainable_token_indices", "modules_to_save", "fan_in_fan_out"),
    "alpha_pattern",
)
"""Features of PEFT's LoRA that are more than scale · B·A for each layer."""
# Other initializations (PiSSA, OLoRA, LoftQ, ...) change the weights to which the adapter is then added.
_PLAIN_BEGINNINGS = (True, False, None, "gaussian", "eva", "orthogonal")


def require_peft() -> Any:
    """Return the module `peft`, which adapter training needs. Raises HardwareError if it is not installed."""
    try:
        import peft
    except ImportError as error:
        raise missing_library("lora.rank needs PEFT", extra="train") from error
    return peft


def adapter_files(path: Path) -> tuple[Path, Path]:
    """Return the configuration file and the tensor file of an adapter.
    `path` is the folder that PEFT saved, or the tensor file in it, with any name.
    """
    weights = path / WEIGHTS_FILE if path.is_dir() else path
    return weights.parent / CONFIG_FILE, weights


def peft_scales(path: Path, config: Mapping[str, Any], ranks: Mapping[str, int]) -> dict[str, float]:
    """Return the scale of each module of an adapter: alpha, divided by the rank or by the square root of the rank.

    `config` has the fields of PEFT's configuration in the file `path`, and `ranks` those of the matrices.

    Raises:
        RequestError: the adapter is of a kind that cannot be added.
        CheckpointError: the configuration is broken.
    """
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise RequestError(f"{path}: peft_type={_quoted(kind)} is no LoRA, and cannot be added")
    for key in _REFUSED:
        if config.get(key):
            raise RequestError(f"{path}: an adapter with {key} cannot be added")
    beginning = config.get("init_lora_weights", True)
    if beginning not in _PLAIN_BEGINNINGS:
        raise RequestError(
            f"{path}: init_lora_weights={_quoted(beginning)} has changed the weights that the adapter is for",
            hint="save it as plain LoRA: save_pretrained(path_initial_model_for_weight_conversion=...)",
        )
    alpha = require_alpha(path, "lora_alpha", config.get("lora_alpha"))
    divisor = math.sqrt if config.get("use_rslora") is True else float
    return {module: alpha / divisor(rank) for module, rank in ranks.items()}


def require_alpha(path: Path, place: str, value: Any) -> float:
    """Return an alpha of an adapter. Raises CheckpointError if it is no number, or out of range."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _MAX_ALPHA:
        raise CheckpointError(f"{path}: {shown(place)} must be a number up to {_MAX_ALPHA:,}, and is {_quoted(value)}")
    return float(value)


def _quoted(value: object) -> str:
    """Return a value of the configuration, quoted for a message."""
    return shown(value) if isinstance(value, str) else plain(json.dumps(value))
