"""Choices that settings and the engine share: solvers, number formats, files of media and of weights."""

from enum import StrEnum


class Solver(StrEnum):
    """ODE solver for rectified flow. All solve the same equation, with different errors."""

    EULER = "euler"
    """Euler's method: uses the velocity at the beginning of the step, as the reference does."""
    AB2 = "ab2"
    """Adams-Bashforth method: extrapolates the velocity half a step from this one and the previous one."""
    HEUN = "heun"
    """Heun's method: uses the mean velocity of both ends of an Euler step, with two evaluations except in the last."""

    def evaluations(self, *, is_last: bool) -> int:
        """Return the number of evaluations of each branch in a step."""
        return 2 if self is Solver.HEUN and not is_last else 1


class LinearProducts(StrEnum):
    """Number format of the factors of a matmul; sums have more bits."""

    EXACT = "exact"
    """Numbers of the run's dtype."""
    INT8 = "int8"
    FP8 = "fp8"
    """float8_e4m3fn."""


class MediaFormat(StrEnum):
    """File format of a result. Each value is also its file ending."""

    MP4 = "mp4"
    GIF = "gif"
    PNG = "png"


class Fit(StrEnum):
    """Method that fits a reference of another shape to the video."""

    CROP = "crop"
    PAD = "pad"
    STRETCH = "stretch"


class Format(StrEnum):
    """Format of weights on disk."""

    SAFETENSORS = "safetensors"
    SAFETENSORS_SHARDS = "safetensors-shards"
    TORCH = "torch"
    COLOSSALAI = "colossalai"
    DCP = "dcp"

    @property
    def is_folder(self) -> bool:
        return self not in (Format.SAFETENSORS, Format.TORCH)

    @property
    def has_shards(self) -> bool:
        """Whether the checkpoint consists of files of limited size."""
        return self.is_folder and self is not Format.DCP

    @property
    def has_metadata(self) -> bool:
        return self not in (Format.TORCH, Format.DCP)


class Selection(StrEnum):
    """Weights of a training run: the updated ones, their average, or the updated ones in full precision."""

    MODEL = "model"
    EMA = "ema"
    MASTER = "master"


class QKV(StrEnum):
    """Layout of q, k and v: one tensor, interleaved rotary pairs (Flux), or three, half-split pairs (Open-Sora)."""

    FUSED = "fused"
    SPLIT = "split"
