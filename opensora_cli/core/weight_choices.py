"""Choices of weights and their layouts, for settings and readers of checkpoints."""

from enum import StrEnum


class Format(StrEnum):
    """Format of weights on disk."""

    SAFETENSORS = "safetensors"
    SAFETENSORS_SHARDS = "safetensors-shards"
    TORCH = "torch"
    TORCH_SHARDS = "torch-shards"
    COLOSSALAI = "colossalai"
    DCP = "dcp"

    @property
    def is_folder(self) -> bool:
        """Whether the checkpoint is a folder."""
        return self not in (Format.SAFETENSORS, Format.TORCH)

    @property
    def has_shards(self) -> bool:
        """Whether the checkpoint consists of files of limited size."""
        return self.is_folder and self is not Format.DCP

    @property
    def has_metadata(self) -> bool:
        """Whether the format stores text about the weights."""
        return self is not Format.DCP


class Selection(StrEnum):
    """Weights of a training run: the updated ones, their average, or the updated ones in full precision."""

    MODEL = "model"
    EMA = "ema"
    MASTER = "master"


class QKV(StrEnum):
    """Layout of the q, k and v projections: one tensor (Flux) or three (Open-Sora v2)."""

    FUSED = "fused"
    SPLIT = "split"


class Rotary(StrEnum):
    """Layout of rotary pairs in a head: dims (2j, 2j+1) (Flux) or (j, D/2+j) (Open-Sora v2)."""

    INTERLEAVED = "interleaved"
    HALF = "half"
