"""The sizes of text encoders, from their configurations alone: what they weigh, without building them.

transformers takes a second to load; for a plan, arithmetic is enough. Keys and defaults are those of its `T5Config` and
`CLIPTextConfig`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.core.reading import read_json_object


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
    activation: str = "gelu_new"
    is_gated_act: bool = True

    @classmethod
    def of(cls, folder: Path | None) -> Self:
        """Return those of the encoder in `folder`, None: the released one; a broken one is a CheckpointError."""
        if folder is None:
            return cls()
        read = _Reader(folder)
        form = read.text("feed_forward_proj", "relu")
        activation = form.removeprefix("gated-")
        return cls(
            d_model=read.size("d_model", 512),
            d_kv=read.size("d_kv", 64),
            d_ff=read.size("d_ff", 2048),
            num_layers=read.size("num_layers", 6),
            num_heads=read.size("num_heads", 8),
            vocab_size=read.size("vocab_size", 32_128),
            num_buckets=read.size("relative_attention_num_buckets", 32),
            # As the published models have always meant it.
            activation="gelu_new" if form == "gated-gelu" else activation,
            is_gated_act=activation != form,
        )

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
        """Parameters of the first layer's table of them."""
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
    """The token that ends a text, where the model pools."""

    @classmethod
    def of(cls, folder: Path | None) -> Self:
        """Return those of the encoder in `folder`, as `T5Sizes.of` does."""
        if folder is None:
            return cls()
        read = _Reader(folder, part="text_config")
        return cls(
            hidden_size=read.size("hidden_size", 512),
            intermediate_size=read.size("intermediate_size", 2048),
            num_layers=read.size("num_hidden_layers", 12),
            num_heads=read.size("num_attention_heads", 8),
            vocab_size=read.size("vocab_size", 49_408),
            max_length=read.size("max_position_embeddings", 77),
            activation=read.text("hidden_act", "quick_gelu"),
            end_id=read.size("eos_token_id", 49_407, least=0),
        )

    @property
    def parameters(self) -> int:
        """All parameters."""
        width, inner = self.hidden_size, self.intermediate_size
        attention, mlp = 4 * (width * width + width), 2 * width * inner + inner + width
        return (self.vocab_size + self.max_length) * width + self.num_layers * (attention + mlp + 4 * width) + 2 * width


class _Reader:
    """Reads the configuration of a text encoder; what is wrong with it is a CheckpointError."""

    def __init__(self, folder: Path, *, part: str | None = None) -> None:
        self._path = folder / "config.json"
        values = read_json_object(self._path, problem=CheckpointError)
        # A whole CLIP has its text tower's sizes in a part of their own.
        inner = values.get(part) if part else None
        self._values: Mapping[str, Any] = inner if isinstance(inner, dict) else values

    def size(self, key: str, default: int, *, least: int = 1) -> int:
        value = self._values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self._error(f"{key} is {value!r}, and no number from {least}")
        return value

    def text(self, key: str, default: str) -> str:
        value = self._values.get(key, default)
        if not isinstance(value, str):
            raise self._error(f"{key} is {value!r}, and no name")
        return value

    def _error(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self._path} does not describe a text encoder: {reason}")
