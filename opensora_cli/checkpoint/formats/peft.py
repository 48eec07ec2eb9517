"""Configuration of PEFT adapters."""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opensora_cli.core.exceptions import CheckpointError, RequestError, missing_library
from opensora_cli.core.formatting import first_few, plain
from opensora_cli.core.strict_json import shown

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

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

    path: Path
    r: int
    lora_alpha: float
    use_rslora: bool
    fan_in_fan_out: bool
    trains_more: bool
    """Whether the adapter may hold tensors that replace the model's."""
    ranks: "_ValuesByName"
    alphas: "_ValuesByName"

    @classmethod
    def of(cls, path: Path, config: Mapping[str, Any]) -> "PeftConfig":
        """Parse the fields of the file `path`. Raises CheckpointError and RequestError like `open_adapter`."""
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
        return cls(
            path=path,
            r=_rank(path, "r", config.get("r")),
            lora_alpha=_number(path, "lora_alpha", config.get("lora_alpha")),
            use_rslora=config.get("use_rslora") is True,
            fan_in_fan_out=config.get("fan_in_fan_out") is True,
            trains_more=bool(config.get("modules_to_save")) or config.get("bias", "none") != "none",
            ranks=_by_name(path, config, "rank_pattern", _rank),
            alphas=_by_name(path, config, "alpha_pattern", _number),
        )

    def check(self, modules: Set[str]) -> None:
        """Refuse module names that would take long to match: too long ones, or too many for the patterns."""
        too_long = [module for module in modules if len(module) > _MAX_NAME_LENGTH]
        if too_long:
            raise CheckpointError(f"{self.path.parent} is for a module of too long a name: {first_few(too_long)}")
        for key, values in (("rank_pattern", self.ranks), ("alpha_pattern", self.alphas)):
            try:
                values.check(modules)
            except ValueError as error:
                raise CheckpointError(f"{self.path}: {key}: {error}") from None

    def rank(self, module: str) -> int:
        """Return the rank of a module's matrices."""
        return int(self.ranks.get(module, self.r))

    def scale(self, module: str) -> float:
        """Return alpha divided by the rank, or by the square root of the rank."""
        rank = self.rank(module)
        return self.alphas.get(module, self.lora_alpha) / (math.sqrt(rank) if self.use_rslora else rank)


def _by_name(
    path: Path, config: Mapping[str, Any], key: str, checked: Callable[[Path, str, Any], float]
) -> "_ValuesByName":
    patterns = config.get(key) or {}
    if not isinstance(patterns, dict):
        raise CheckpointError(f"{path}: {key} must be an object")
    values = {pattern: checked(path, pattern, value) for pattern, value in patterns.items()}
    try:
        return _ValuesByName(values)
    except ValueError as error:
        hint = "list the modules by their names"
        raise CheckpointError(f"{path}: {key}: {error}", hint=hint) from None


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


class _ValuesByName:
    """Values by patterns of module names; the first pattern that matches a name counts.

    PEFT treats each key as a regular expression for the whole name, or for the end of the name after a dot. Most keys
    are plain names; their dots match only dots here. An adapter may be hostile, and `re` can take years to match an
    expression. So only patterns with bounded steps are accepted: few repeats, and no repeated group.

    Raises:
        ValueError: a pattern is refused, or there are too many.
    """

    def __init__(self, values: Mapping[str, float]) -> None:
        self._plain: dict[str, tuple[int, float]] = {}
        self._regular: list[tuple[int, float, re.Pattern[str]]] = []
        self._costs: list[tuple[int, int]] = []
        for number, (text, value) in enumerate(values.items()):
            key = text.removesuffix("$")
            if _PLAIN_NAME.fullmatch(key):
                self._plain.setdefault(key.replace("\\.", "."), (number, value))
                continue
            try:
                self._costs.append(_cost(text))
                self._regular.append((number, value, re.compile(rf"(?:.*\.)?(?:{text})\Z")))
            except (ValueError, re.error) as error:
                raise ValueError(f"the pattern {shown(text)} is refused: {error}") from None
            if len(self._regular) > _MAX_PATTERNS:
                raise ValueError(f"there are more than {_MAX_PATTERNS} regular expressions")

    def check(self, names: Iterable[str]) -> None:
        """Check that all values are found in bounded time. Raises ValueError if not."""
        lengths = [len(name) for name in names]
        # The number of steps is at most the number of ways to divide a name among the repeats, PEFT's own included.
        steps = sum(math.comb(n + count + 1, count + 1) * choices for count, choices in self._costs for n in lengths)
        if steps > _MAX_STEPS:
            raise ValueError("there are too many regular expressions for so many modules")

    def get(self, name: str, default: float) -> float:
        """Return the value for a name."""
        ends = [name]
        while "." in ends[-1]:
            ends.append(ends[-1].partition(".")[2])
        found = [self._plain[key] for key in (f"^{name}", *ends) if key in self._plain]
        found += [(number, value) for number, value, pattern in self._regular if pattern.match(name)]
        return min(found)[1] if found else default


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
