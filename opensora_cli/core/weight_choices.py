"""Choices of weights and their layouts, for settings and readers of checkpoints."""

from enum import StrEnum


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
