"""Folders of text encoders: sizes in their configurations, parameters without building a model, and missing files.

Keys and defaults of configurations are those of transformers' `T5Config` and `CLIPTextConfig`. Importing this module
imports no torch.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, PositiveInt, ValidationError
from pydantic.dataclasses import dataclass

from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.core.reading import read_json_object, reading, stays_inside

T5_VOCABULARIES = (("spiece.model",), ("tokenizer.json",))
CLIP_VOCABULARIES = (("tokenizer.json",), ("vocab.json", "merges.txt"))

_WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
_INDEX_FILES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")

_Epsilon = Annotated[float, Field(ge=0, lt=1)]
_CONFIG = ConfigDict(strict=True, extra="ignore", populate_by_name=True)
_ABSENT: dict[str, dict[str, Any]] = {
    "T5Sizes": {"d_model": 512, "d_ff": 2048, "num_layers": 6, "num_heads": 8},
    "ClipSizes": {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8},
}
"""Values of keys that a configuration lacks, where they are not those of the released encoder."""


class _Sizes:
    """Sizes that a configuration states."""

    @classmethod
    def of(cls, folder: Path | None) -> Self:
        """Return the sizes of the encoder in `folder`, or the released ones. Raises CheckpointError if it is broken."""
        if folder is None:
            return cls()
        return cls.from_config(read_json_object(path := folder / "config.json", problem=CheckpointError), path=path)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, path: Path) -> Self:
        """Return the sizes in a configuration, read from `path`. Raises CheckpointError if it is broken."""
        # A whole CLIP has its text tower's sizes in a part of their own.
        own = config["text_config"] if isinstance(config.get("text_config"), dict) else config
        try:
            return cls(**{**_ABSENT[cls.__name__], **own})
        except ValidationError as error:
            first = error.errors()[0]
            values = "".join(f"{key}={first['input']!r}: " for key in first["loc"])
            reason = first["msg"].removeprefix("Value error, ")
            raise CheckpointError(f"{path} does not describe a text encoder: {values}{reason}") from error


@dataclass(frozen=True, kw_only=True, config=_CONFIG)
class T5Sizes(_Sizes):
    """Sizes of a T5 encoder; the defaults are those of the released one."""

    d_model: PositiveInt = 4096
    d_kv: PositiveInt = 64
    d_ff: PositiveInt = 10_240
    num_layers: PositiveInt = 24
    num_heads: PositiveInt = 64
    vocab_size: PositiveInt = 32_128
    num_buckets: int = Field(default=32, ge=4, validation_alias="relative_attention_num_buckets")
    """Number of buckets of distances; see `position_buckets`."""
    max_distance: PositiveInt = Field(default=128, validation_alias="relative_attention_max_distance")
    feed_forward_proj: Literal["gated-gelu"] = "gated-gelu"
    """Form of the MLPs: that of T5 1.1."""
    eps: _Epsilon = Field(default=1e-6, validation_alias="layer_norm_epsilon")

    def __post_init__(self) -> None:
        if self.max_distance <= self.num_buckets // 4:
            raise ValueError(f"its {self.num_buckets} buckets reach over a distance of {self.max_distance}")

    @property
    def layer_weights(self) -> Mapping[str, int]:
        """Parameters of each weight of a layer but the first, which also has the table of position biases."""
        inner = self.num_heads * self.d_kv
        return {
            **{f"layer.0.SelfAttention.{name}": self.d_model * inner for name in "qkvo"},
            "layer.0.layer_norm": self.d_model,
            **{f"layer.1.DenseReluDense.{name}": self.d_model * self.d_ff for name in ("wi_0", "wi_1", "wo")},
            "layer.1.layer_norm": self.d_model,
        }

    @property
    def position_biases(self) -> int:
        """Parameters of the first layer's table of position biases."""
        return self.num_buckets * self.num_heads

    @property
    def parameters(self) -> int:
        layers = self.num_layers * sum(self.layer_weights.values())
        return self.vocab_size * self.d_model + self.position_biases + layers + self.d_model


@dataclass(frozen=True, kw_only=True, config=_CONFIG)
class ClipSizes(_Sizes):
    """Sizes of CLIP's text tower; the defaults are those of the released one."""

    hidden_size: PositiveInt = 768
    intermediate_size: PositiveInt = 3072
    num_layers: PositiveInt = Field(default=12, validation_alias="num_hidden_layers")
    num_heads: PositiveInt = Field(default=12, validation_alias="num_attention_heads")
    vocab_size: PositiveInt = 49_408
    max_length: PositiveInt = Field(default=77, validation_alias="max_position_embeddings")
    hidden_act: Literal["quick_gelu"] = "quick_gelu"
    end_id: int = Field(default=49_407, ge=0, validation_alias="eos_token_id")
    """ID of the token that ends a text, where the model pools."""
    eps: _Epsilon = Field(default=1e-5, validation_alias="layer_norm_eps")

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_heads:
            raise ValueError(f"{self.num_heads} heads do not divide a width of {self.hidden_size}")

    @property
    def parameters(self) -> int:
        width, inner = self.hidden_size, self.intermediate_size
        attention, mlp = 4 * (width * width + width), 2 * width * inner + inner + width
        return (self.vocab_size + self.max_length) * width + self.num_layers * (attention + mlp + 4 * width) + 2 * width


def missing_files(folder: Path, *, vocabularies: Sequence[Sequence[str]]) -> list[str]:
    """Return the missing files of a transformers folder, without reading weights. One of `vocabularies` suffices."""
    missing = [] if (folder / "config.json").is_file() else [str(folder / "config.json")]
    if not any((folder / name).is_file() for name in _WEIGHT_FILES):
        indexes = [folder / name for name in _INDEX_FILES if (folder / name).is_file()]
        missing += _missing_shards(indexes[0]) if indexes else [str(folder / _WEIGHT_FILES[0])]
    if not any(all((folder / name).is_file() for name in names) for names in vocabularies):
        choices = " or ".join(" + ".join(names) for names in vocabularies)
        missing.append(str(folder / choices))
    return missing


def require_files(folder: Path, *, vocabularies: Sequence[Sequence[str]]) -> None:
    """Raise CheckpointError that names every file that `folder` lacks."""
    missing = missing_files(folder, vocabularies=vocabularies)
    if missing:
        state = "is incomplete" if folder.is_dir() else "does not exist"
        raise CheckpointError(f"text encoder folder {folder} {state}; missing: {', '.join(missing)}")


def _missing_shards(index: Path) -> list[str]:
    places = read_json_object(index, problem=CheckpointError, hint="fetch it again").get("weight_map")
    if not isinstance(places, dict) or not all(stays_inside(shard) for shard in places.values()):
        raise CheckpointError(f"{index} is no index of weight files in its folder", hint="fetch it again")
    shards = sorted(set(places.values()))
    with reading(index.parent, problem=CheckpointError):
        return [str(index.parent / shard) for shard in shards if not (index.parent / shard).is_file()]
