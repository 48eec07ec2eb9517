"""The sizes of text encoders, from their configurations, and what they weigh, without building them.

Keys and defaults of configurations are those of transformers' `T5Config` and `CLIPTextConfig`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.core.reading import read_json_object
from opensora_cli.models.text.activations import ACTIVATIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class T5Sizes:
    """Sizes of a T5 encoder; the defaults are those of the released one."""

    d_model: int = 4096
    d_kv: int = 64
    d_ff: int = 10_240
    num_layers: int = 24
    num_heads: int = 64
    vocab_size: int = 32_128
    num_buckets: int = 32
    """Number of buckets of distances; see `position_buckets`."""
    max_distance: int = 128
    activation: str = "gelu_new"
    is_gated_act: bool = True
    eps: float = 1e-6

    @classmethod
    def of(cls, folder: Path | None) -> Self:
        """Return the sizes of the encoder in `folder`, or the released ones. Raises CheckpointError if it is broken."""
        if folder is None:
            return cls()
        return cls.from_config(read_json_object(path := folder / "config.json", problem=CheckpointError), path=path)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, path: Path) -> Self:
        """Return the sizes in a configuration, read from `path`. Raises CheckpointError if it is broken."""
        read = _Reader(config, path)
        form = read.text("feed_forward_proj", "relu")
        activation = read.activation(form.removeprefix("gated-"))
        sizes = cls(
            d_model=read.size("d_model", 512),
            d_kv=read.size("d_kv", 64),
            d_ff=read.size("d_ff", 2048),
            num_layers=read.size("num_layers", 6),
            num_heads=read.size("num_heads", 8),
            vocab_size=read.size("vocab_size", 32_128),
            num_buckets=read.size("relative_attention_num_buckets", 32, least=4),
            max_distance=read.size("relative_attention_max_distance", 128),
            eps=read.small_number("layer_norm_epsilon", 1e-6),
            # As the published models have always meant it.
            activation="gelu_new" if form == "gated-gelu" else activation,
            is_gated_act=activation != form,
        )
        if sizes.max_distance <= sizes.num_buckets // 4:
            raise read.error(f"its {sizes.num_buckets} buckets reach over a distance of {sizes.max_distance}")
        return sizes

    @property
    def layer_weights(self) -> Mapping[str, int]:
        """Parameters of each weight of a layer but the first, which also has the table of position biases."""
        inner, inward = self.num_heads * self.d_kv, ("wi_0", "wi_1") if self.is_gated_act else ("wi",)
        return {
            **{f"layer.0.SelfAttention.{name}": self.d_model * inner for name in "qkvo"},
            "layer.0.layer_norm": self.d_model,
            **{f"layer.1.DenseReluDense.{name}": self.d_model * self.d_ff for name in (*inward, "wo")},
            "layer.1.layer_norm": self.d_model,
        }

    @property
    def position_biases(self) -> int:
        """Parameters of the first layer's table of position biases."""
        return self.num_buckets * self.num_heads

    @property
    def parameters(self) -> int:
        """All parameters."""
        layers = self.num_layers * sum(self.layer_weights.values())
        return self.vocab_size * self.d_model + self.position_biases + layers + self.d_model


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipSizes:
    """Sizes of CLIP's text tower; the defaults are those of the released one."""

    hidden_size: int = 768
    intermediate_size: int = 3072
    num_layers: int = 12
    num_heads: int = 12
    vocab_size: int = 49_408
    max_length: int = 77
    activation: str = "quick_gelu"
    end_id: int = 49_407
    """ID of the token that ends a text, where the model pools."""
    eps: float = 1e-5

    @classmethod
    def of(cls, folder: Path | None) -> Self:
        """Return the sizes of the encoder in `folder`, like `T5Sizes.of`."""
        if folder is None:
            return cls()
        return cls.from_config(read_json_object(path := folder / "config.json", problem=CheckpointError), path=path)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, path: Path) -> Self:
        """Return the sizes in a configuration, like `T5Sizes.from_config`."""
        # A whole CLIP has its text tower's sizes in a part of their own.
        inner = config.get("text_config")
        read = _Reader(inner if isinstance(inner, dict) else config, path)
        sizes = cls(
            hidden_size=read.size("hidden_size", 512),
            intermediate_size=read.size("intermediate_size", 2048),
            num_layers=read.size("num_hidden_layers", 12),
            num_heads=read.size("num_attention_heads", 8),
            vocab_size=read.size("vocab_size", 49_408),
            max_length=read.size("max_position_embeddings", 77),
            activation=read.activation(read.text("hidden_act", "quick_gelu")),
            end_id=read.size("eos_token_id", 49_407, least=0),
            eps=read.small_number("layer_norm_eps", 1e-5),
        )
        if sizes.hidden_size % sizes.num_heads:
            raise read.error(f"{sizes.num_heads} heads do not divide a width of {sizes.hidden_size}")
        return sizes

    @property
    def parameters(self) -> int:
        """All parameters."""
        width, inner = self.hidden_size, self.intermediate_size
        attention, mlp = 4 * (width * width + width), 2 * width * inner + inner + width
        return (self.vocab_size + self.max_length) * width + self.num_layers * (attention + mlp + 4 * width) + 2 * width


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reader of the configuration of a text encoder. Invalid values raise CheckpointError."""

    values: Mapping[str, Any]
    path: Path

    def size(self, key: str, default: int, *, least: int = 1) -> int:
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.error(f"{key} is {value!r}, and no number from {least}")
        return value

    def small_number(self, key: str, default: float) -> float:
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
            raise self.error(f"{key} is {value!r}, and no number from 0 to 1")
        return float(value)

    def text(self, key: str, default: str) -> str:
        value = self.values.get(key, default)
        if not isinstance(value, str):
            raise self.error(f"{key} is {value!r}, and no name")
        return value

    def activation(self, name: str) -> str:
        if name not in ACTIVATIONS:
            raise self.error(f"{name!r} is no activation function of {', '.join(ACTIVATIONS)}")
        return name

    def error(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self.path} does not describe a text encoder: {reason}")
