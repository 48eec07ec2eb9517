"""Reading the files of a PEFT adapter: `adapter_config.json` and `adapter_model.safetensors`."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opensora_cli.checkpoint.entries import Entry
from opensora_cli.checkpoint.safetensors_file import open_safetensors
from opensora_cli.checkpoint.strict_json import parse_object, shown
from opensora_cli.core.exceptions import CheckpointError, RequestError
from opensora_cli.core.listing import first_few

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

_PICKLED_FILE = "adapter_model.bin"
_PREFIX = "base_model.model."
_FACTOR = re.compile(r"(?P<module>.+)\.(?:lora_(?P<linear>[AB])\.weight|lora_embedding_(?P<table>[AB]))", re.DOTALL)
_MAX_CONFIG_BYTES = 10_000_000

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
# Other ways to begin (PiSSA, OLoRA, LoftQ, ...) change the weights to which the adapter is then added.
_PLAIN_BEGINNINGS = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """What an adapter adds to one weight: scale · B·A, as a matrix of the weight's rows.

    Args:
        a: (rank, in), or of a convolution (rank, in, ...).
        b: (out, rank), or of a convolution (out, rank, 1, ...).
        scale: alpha / rank, or alpha / sqrt(rank).
        transposed: whether the weight is (in, out), as of an embedding.
    """

    a: Entry
    b: Entry
    scale: float
    transposed: bool

    @property
    def described(self) -> str:
        """The shapes, for errors."""
        return f"A {list(self.a.shape)}, B {list(self.b.shape)}"

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether it can be added to a weight of this shape."""
        rank = self.a.shape[0]
        if self.transposed:
            return len(shape) == 2 and self.a.shape == (rank, shape[0]) and self.b.shape == (shape[1], rank)
        kernel = (1,) * (len(shape) - 2)
        return len(shape) >= 2 and self.a.shape == (rank, *shape[1:]) and self.b.shape == (shape[0], rank, *kernel)

    def rows(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Compute rows `start` to `stop` of B·A: (stop - start, ...), without the scale."""
        a = self.a.read().to(dtype).flatten(1)
        if self.transposed:
            return a[:, start:stop].T @ self.b.read().to(dtype).T
        return self.b.rows(start, stop).to(dtype).flatten(1) @ a


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """An adapter; none of its tensors has been read.

    Args:
        path: its folder.
        updates: what it adds, by the names of the weights.
        replacements: tensors that were trained as a whole (`modules_to_save`, biases), by their names.
    """

    path: Path
    updates: Mapping[str, LowRank]
    replacements: Mapping[str, Entry]


def open_adapter(path: Path) -> Adapter:
    """Open the adapter in a folder.

    Raises:
        CheckpointError: a file is missing or broken, or the two do not fit each other.
        RequestError: it is no LoRA, or has something that cannot be merged; says what.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} is no folder with an adapter")
    config = _Config.read(path / CONFIG_FILE)
    weights = path / WEIGHTS_FILE
    if not weights.exists() and (path / _PICKLED_FILE).exists():
        raise CheckpointError(
            f"{path} has {_PICKLED_FILE} and no {WEIGHTS_FILE}",
            hint=f"convert it: osora ckpt convert {path / _PICKLED_FILE} {weights}",
        )
    entries, _ = open_safetensors(weights)
    factors: dict[tuple[str, bool], dict[str, Entry]] = {}
    replacements: dict[str, Entry] = {}
    for key, entry in entries.items():
        name = key.removeprefix(_PREFIX)
        match = _FACTOR.fullmatch(name)
        if match is not None:
            pair = factors.setdefault((match["module"], match["table"] is not None), {})
            pair[match["linear"] or match["table"]] = entry
        elif ".lora_" in name:
            raise RequestError(f"{weights} has {shown(key)}: this kind of LoRA cannot be merged")
        else:
            replacements[name.replace(".base_layer.", ".")] = entry
    if not factors:
        raise CheckpointError(f"{weights} has no lora_A and lora_B", hint="is it an adapter?")
    if replacements and not config.trains_more:
        raise CheckpointError(f"{weights} has tensors that are not of LoRA: {first_few(list(replacements))}")
    updates = {
        f"{module}.weight": _update(weights, module, pair, config, is_table=is_table)
        for (module, is_table), pair in factors.items()
    }
    return Adapter(path=path, updates=updates, replacements=replacements)


def _update(path: Path, module: str, pair: Mapping[str, Entry], config: "_Config", *, is_table: bool) -> LowRank:
    if len(pair) != 2:
        raise CheckpointError(f"{path}: {shown(module)} has one of lora_A and lora_B and not the other")
    a, b = pair["A"], pair["B"]
    rank = config.rank(module)
    if min(len(a.shape), len(b.shape)) < 2 or a.shape[0] != rank or b.shape[1] != rank:
        raise CheckpointError(
            f"{path}: {shown(module)} has A {list(a.shape)} and B {list(b.shape)}, "
            f"which are not of rank {rank} as {CONFIG_FILE} says"
        )
    return LowRank(a=a, b=b, scale=config.scale(module), transposed=is_table or config.fan_in_fan_out)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Config:
    """What of `adapter_config.json` decides the result; fields as PEFT names them."""

    path: Path
    r: int
    lora_alpha: float
    use_rslora: bool
    fan_in_fan_out: bool
    trains_more: bool
    """Whether tensors may come with it that replace the model's."""
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> "_Config":
        config = _read_json(path)
        kind = config.get("peft_type")
        if kind != "LORA":
            raise RequestError(f"{path}: peft_type={kind!r} is no LoRA, and cannot be merged")
        for key, feature in _REFUSED.items():
            if config.get(key):
                raise RequestError(f"{path}: {key} ({feature}) cannot be merged")
        beginning = config.get("init_lora_weights", True)
        if beginning not in _PLAIN_BEGINNINGS:
            raise RequestError(
                f"{path}: init_lora_weights={beginning!r} has changed the weights that the adapter is for",
                hint="save it as plain LoRA: save_pretrained(path_initial_model_for_weight_conversion=...)",
            )
        return cls(
            path=path,
            r=_rank(path, "r", config.get("r")),
            lora_alpha=_number(path, "lora_alpha", config.get("lora_alpha")),
            use_rslora=config.get("use_rslora") is True,
            fan_in_fan_out=config.get("fan_in_fan_out") is True,
            trains_more=bool(config.get("modules_to_save")) or config.get("bias", "none") != "none",
            rank_pattern={k: _rank(path, k, v) for k, v in _patterns(path, config, "rank_pattern").items()},
            alpha_pattern={k: _number(path, k, v) for k, v in _patterns(path, config, "alpha_pattern").items()},
        )

    def rank(self, module: str) -> int:
        return int(_value_for(module, self.rank_pattern, self.r))

    def scale(self, module: str) -> float:
        rank = self.rank(module)
        alpha = _value_for(module, self.alpha_pattern, self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def _value_for(module: str, patterns: Mapping[str, float], default: float) -> float:
    """Return the value of the first pattern that matches the module's name, or the end of it after a dot."""
    found = (value for pattern, value in patterns.items() if re.match(rf"(.*\.)?({pattern})$", module))
    return next(found, default)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise CheckpointError(f"{path} is too long to be the configuration of an adapter")
        return parse_object(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist", hint="an adapter is the folder that PEFT saved") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is broken: {error}") from error


def _patterns(path: Path, config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    patterns = config.get(key) or {}
    if not isinstance(patterns, dict):
        raise CheckpointError(f"{path}: {key} must be an object")
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise CheckpointError(f"{path}: {key} has {shown(pattern)}, no regular expression: {error}") from error
    return patterns


def _number(path: Path, key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise CheckpointError(f"{path}: {shown(key)} must be a number, and is {shown(str(value))}")
    return float(value)


def _rank(path: Path, key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"{path}: {shown(key)} must be a whole number over 0, and is {shown(str(value))}")
    return value
