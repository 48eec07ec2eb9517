"""Training of low-rank adapters (Hu et al. 2021, LoRA)."""

from enum import StrEnum
from typing import Self

from pydantic import Field, PositiveInt, model_validator

from opensora_cli.settings.base import Section


class LoraTarget(StrEnum):
    """Linear layers of the transformer's blocks, by the ends of their names."""

    Q_PROJ = "q_proj"
    K_PROJ = "k_proj"
    V_PROJ = "v_proj"
    PROJ = "proj"
    """After the attention of a double-stream block."""
    MLP = "mlp"
    """Both layers of the MLPs of a double-stream block."""
    V_MLP = "v_mlp"
    """Values and MLP of a single-stream block."""
    LINEAR2 = "linear2"
    """After attention and MLP of a single-stream block."""


class LoraSettings(Section):
    """Training of an adapter beside the transformer's frozen weights, which `init` names."""

    rank: PositiveInt | None = Field(
        default=None,
        le=2**16,
        description="rows of each small matrix, as in 16; none: no adapter, all weights are trained",
    )
    alpha: float | None = Field(
        default=None, gt=0, le=10**6, description="the adapter is added alpha / rank times; none: once"
    )
    dropout: float = Field(default=0.0, ge=0, lt=1, description="share of an adapter's inputs that a step leaves out")
    targets: tuple[LoraTarget, ...] = Field(
        default=tuple(LoraTarget), min_length=1, description="linear layers of the blocks that get an adapter"
    )

    init: str | None = Field(
        default=None,
        min_length=1,
        description="adapter to continue, as --lora takes it: of this rank, alpha and these targets; none: a new one",
    )

    @property
    def is_on(self) -> bool:
        """Whether an adapter is trained, and nothing else."""
        return self.rank is not None

    def problems(
        self,
        *,
        trains_transformer: bool,
        init: str | None,
        hidden_size: int,
        fp8_linears: bool,
        divides_tokens: bool,
    ) -> list[str]:
        """Return what contradicts an adapter elsewhere in the settings of a training."""
        if not self.is_on:
            return []
        setting = f"lora.rank={self.rank}"
        problems = []
        if not trains_transformer:
            problems.append(f"{setting} is made for target=mmdit alone: use none")
        if init is None:
            problems.append(f"{setting} needs the weights that it is trained beside: --set init=FILE")
        if trains_transformer and self.rank is not None and self.rank > hidden_size:
            problems.append(
                f"{setting} must be at most model.hidden_size={hidden_size}: more rows add nothing to a matrix"
            )
        if fp8_linears:
            problems.append(f"{setting} does not go with precision.fp8_linears=true: use false")
        if self.dropout and divides_tokens:
            problems.append(
                f"lora.dropout={self.dropout} does not go with strategy=hybrid, whose ranks would leave out the same "
                "places of different tokens: use 0"
            )
        return problems

    @model_validator(mode="after")
    def _everything_has_an_effect(self) -> Self:
        if not self.is_on:
            for name in ("alpha", "dropout", "targets", "init"):
                if (value := getattr(self, name)) != type(self).model_fields[name].default:
                    shown = ",".join(value) if isinstance(value, tuple) else value
                    raise ValueError(f"lora.{name}={shown} has no effect without lora.rank: set it, as in lora.rank=16")
        return self
