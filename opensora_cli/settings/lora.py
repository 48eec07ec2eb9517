"""Settings of low-rank adapters in training (Hu et al. 2021, LoRA)."""

from enum import StrEnum

from pydantic import Field, PositiveInt

from opensora_cli.core.section import FileName, Section


class LoraTarget(StrEnum):
    """Linear layers of transformer blocks, by the ends of their names."""

    Q_PROJ = "q_proj"
    K_PROJ = "k_proj"
    V_PROJ = "v_proj"
    PROJ = "proj"
    """Projection after the attention of a double-stream block."""
    MLP = "mlp"
    """Both layers of the MLPs of a double-stream block."""
    V_MLP = "v_mlp"
    """Values and MLP of a single-stream block."""
    LINEAR2 = "linear2"
    """Projection after attention and MLP of a single-stream block."""


class LoraSettings(Section):
    """Adapter that is trained beside the frozen transformer of `init`."""

    rank: PositiveInt | None = Field(
        default=None, le=2**16, description="Rank of the adapter, as in 16. None trains all weights without an adapter."
    )
    alpha: float | None = Field(
        default=None, gt=0, le=10**6, description="The adapter is scaled by alpha / rank. None means a scale of 1."
    )
    dropout: float = Field(default=0.0, ge=0, lt=1, description="Dropout of the adapter's inputs.")
    targets: tuple[LoraTarget, ...] = Field(
        default=tuple(LoraTarget), min_length=1, description="Layers with an adapter."
    )
    init: FileName | None = Field(
        default=None, description="Adapter to continue, with this rank, alpha and targets. None starts a new one."
    )

    @property
    def is_on(self) -> bool:
        """Whether an adapter is trained."""
        return self.rank is not None
