"""Configuration of PEFT adapters."""

import json
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from opensora_cli.core.exceptions import CheckpointError, RequestError, missing_library
from opensora_cli.core.formatting import first_few, plain
from opensora_cli.core.strict_json import shown

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

_Number = TypeVar("_Number", int, float)

_MAX_NAME_LENGTH = 1000
_MAX_NUMBER = 1_000_000

_PLAIN_NAME = re.compile(r"\^?(?:\\\.|[\w.-])+")
_GROUP = r"\((?:\?:)?(?:\\?[\w.-]|\|)*\)"
_SIMPLE_PATTERN = re.compile(rf"\^?(?:\\[.dw_-]|\[[\w-]+\]|[\w.|-]|(?<![*+?(|^])[*+?]|{_GROUP}(?![*+?]))*\$?")
_MAX_PATTERN_LENGTH = 200
_MAX_PATTERNS = 100
_MAX_REPEATS = 3
_MAX_CHOICES = 100
_MAX_STEPS = 10**9
"""Limit of the steps for matching all names: some seconds."""

_REFUSED = {
    "use_dora": "DoRA",
    "lora_bias": "biases of B",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal LoRA",
    "alora_invocation_tokens": "activated LoRA",
    "arrow_config": "Arrow",
    "layer_replication": "replicated layers",
    "target_parameters": "adapters of bare parameters",
    "trainable_token_indices": "trained tokens",
}
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftConfig:
    """Fields of `adapter_config.json` that affect the result, under PEFT's names."""

    fan_in_fan_out: bool
    trains_more: bool
    """Whether the adapter may hold tensors that replace the model's."""
    ranks: Mapping[str, int]
    """Rank of the matrices of each module."""
    scales: Mapping[str, float]
    """Alpha of each module, divided by the rank or by the square root of the rank."""

    @classmethod
    def of(cls, path: Path, config: Mapping[str, Any], modules: Collection[str]) -> "PeftConfig":
        """Parse the fields of the file `path` for some modules.

        Raises CheckpointError and RequestError like `open_adapter`.
        """
        kind = config.get("peft_type")
        if kind != "LORA":
            raise RequestError(f"{path}: peft_type={_quoted(kind)} is no LoRA, and cannot be merged")
        for key, feature in _REFUSED.items():
            if config.get(key):
                raise RequestError(f"{path}: {key} ({feature}) cannot be merged")
        beginning = config.get("init_lora_weights", True)
        if beginning not in _PLAIN_BEGINNINGS:
            raise RequestError(
                f"{path}: init_lora_weights={_quoted(beginning)} has changed the weights that the adapter is for",
                hint="save it as plain LoRA: save_pretrained(path_initial_model_for_weight_conversion=...)",
            )
        too_long = [module for module in modules if len(module) > _MAX_NAME_LENGTH]
        if too_long:
            raise CheckpointError(f"{path.parent} is for a module of too long a name: {first_few(too_long)}")
        rank, alpha = _rank(path, "r", config.get("r")), _number(path, "lora_alpha", config.get("lora_alpha"))
        ranks = dict.fromkeys(modules, rank) | _by_name(path, config, "rank_pattern", _rank, modules)
        alphas = dict.fromkeys(modules, alpha) | _by_name(path, config, "alpha_pattern", _number, modules)
        divisor = math.sqrt if config.get("use_rslora") is True else float
        return cls(
            fan_in_fan_out=config.get("fan_in_fan_out") is True,
            trains_more=bool(config.get("modules_to_save")) or config.get("bias", "none") != "none",
            ranks=ranks,
            scales={module: alphas[module] / divisor(ranks[module]) for module in modules},
        )


def _by_name(
    path: Path,
    config: Mapping[str, Any],
    key: str,
    checked: Callable[[Path, str, Any], _Number],
    modules: Collection[str],
) -> dict[str, _Number]:
    patterns = config.get(key) or {}
    if not isinstance(patterns, dict):
        raise CheckpointError(f"{path}: {key} must be an object")
    try:
        return values_by_name({text: checked(path, text, value) for text, value in patterns.items()}, modules)
    except ValueError as error:
        raise CheckpointError(f"{path}: {key}: {error}", hint="list the modules by their names") from None


def _number(path: Path, key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _MAX_NUMBER:
        raise CheckpointError(f"{path}: {shown(key)} must be a number up to {_MAX_NUMBER:,}, and is {_quoted(value)}")
    return float(value)


def _rank(path: Path, key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MAX_NUMBER:
        raise CheckpointError(
            f"{path}: {shown(key)} must be a whole number from 1 to {_MAX_NUMBER:,}, and is {_quoted(value)}"
        )
    return value


def _quoted(value: object) -> str:
    """Return a value of the configuration, quoted for a message."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return shown(value) if isinstance(value, str) else plain(json.dumps(value))


def values_by_name(values: Mapping[str, _Number], names: Collection[str]) -> dict[str, _Number]:
    """Return the value of each name that matches a pattern; the first pattern that matches counts.

    PEFT treats each key as a regular expression for the whole name, or for the end of the name after a dot. Most keys
    are plain names; their dots match only dots here. An adapter may be hostile, and `re` can take years to match an
    expression. So only patterns with bounded steps are accepted: few repeats, and no repeated group.

    Raises:
        ValueError: a pattern is refused, or there are too many for so many names.
    """
    plain_names: dict[str, tuple[int, _Number]] = {}
    regular: list[tuple[int, _Number, re.Pattern[str]]] = []
    steps = 0
    for number, (text, value) in enumerate(values.items()):
        key = text.removesuffix("$")
        if _PLAIN_NAME.fullmatch(key):
            plain_names.setdefault(key.replace("\\.", "."), (number, value))
            continue
        try:
            repeats, choices = _cost(text)
            regular.append((number, value, re.compile(rf"(?:.*\.)?(?:{text})\Z")))
        except (ValueError, re.error) as error:
            raise ValueError(f"the pattern {shown(text)} is refused: {error}") from None
        # The number of steps is at most the number of ways to divide a name among the repeats, PEFT's own included.
        steps += sum(math.comb(len(name) + repeats + 1, repeats + 1) for name in names) * choices
        if len(regular) > _MAX_PATTERNS or steps > _MAX_STEPS:
            raise ValueError("there are too many regular expressions for so many modules")
    found = {}
    for name in names:
        ends: list[str] = [name]
        while "." in ends[-1]:
            ends.append(ends[-1].partition(".")[2])
        matches = [plain_names[key] for key in (f"^{name}", *ends) if key in plain_names]
        matches += [(number, value) for number, value, pattern in regular if pattern.match(name)]
        if matches:
            found[name] = min(matches)[1]
    return found


def _cost(text: str) -> tuple[int, int]:
    """Return a pattern's numbers of repeats and of combinations of alternatives. Raises ValueError if refused."""
    if len(text) > _MAX_PATTERN_LENGTH:
        raise ValueError("it is too long")
    if not _SIMPLE_PATTERN.fullmatch(text):
        raise ValueError("only names, classes of characters, repeats of one and (a|b) are understood")
    choices = math.prod(group.count("|") + 1 for group in [*re.findall(_GROUP, text), re.sub(_GROUP, "", text)])
    repeats = sum(text.replace("(?:", "(").count(sign) for sign in "*+?")
    if choices > _MAX_CHOICES or repeats > _MAX_REPEATS:
        raise ValueError(f"it has too many choices, or more than {_MAX_REPEATS} repeats")
    return repeats, choices
