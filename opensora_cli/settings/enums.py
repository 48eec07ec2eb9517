"""Choices of settings."""

from enum import StrEnum


class VAEKind(StrEnum):
    """Autoencoder: a video model with compression 4x8x8 or 4x32x32, or a picture model with 1x8x8."""

    HUNYUAN = "hunyuan"
    DC_AE = "dc_ae"
    FLUX_AE = "flux_ae"

    @property
    def makes_videos(self) -> bool:
        """Whether models generate videos with it."""
        return self is not VAEKind.FLUX_AE


ReferenceRate = StrEnum("ReferenceRate", ["KEEP", "MATCH"])
"""Frames of a reference video with another rate: the stored ones, or those visible at the video's times."""

DType = StrEnum("DType", ["AUTO", "FLOAT32", "BFLOAT16", "FLOAT16"])
"""Floating point type of models. `auto` means bfloat16 on GPUs and float32 on a CPU."""

AttentionChoice = StrEnum(
    "AttentionChoice", ["AUTO", "SDPA", "CUDNN", "FLASH2", "FLASH3", "FLASH4", "XFORMERS", "MATH", "BF16_PRODUCTS"]
)
"""Attention backend of the transformer (see `core.attention`). `auto` means the first one that works."""

OffloadMode = StrEnum("OffloadMode", ["AUTO", "NONE", "MODEL", "BLOCKS"])
"""Weights that wait in host memory until they are needed. `auto` means the fastest mode that fits in memory."""

NameFrom = StrEnum("NameFrom", ["SEED", "PROMPT"])
"""Name of results in a folder: `raining-sea_seed42`, or `raining, sea-0` as VBench expects."""


class HostWeights(StrEnum):
    """Location of offloaded blocks: a page-locked copy, or the mapped file, which is as fast as the disk."""

    PINNED = "pinned"
    MAPPED = "mapped"


AllToAll = StrEnum("AllToAll", ["DIRECT", "HIERARCHICAL"])
"""All-to-all algorithm of Ulysses attention: between all ranks, or inside machines and then between them."""


class Compression(StrEnum):
    """Rounding of elements in the exchanges of Ulysses attention.

    The error of bf16 is at most 1/256 of an element. That of fp8 is at most 1/16 of an element, or 2^-18 of the largest
    element of its token and head.
    """

    NONE = "none"
    BF16 = "bf16"
    FP8 = "fp8"

    @property
    def largest_error(self) -> str | None:
        """Largest error as text. None means no rounding."""
        errors = {Compression.BF16: "1/256", Compression.FP8: "1/16"}
        return f"elements off by at most {errors[self]}" if self in errors else None


EnvProfile = StrEnum("EnvProfile", ["LOCAL", "CLOUD", "CLUSTER"])
"""Kind of machine for recommended settings."""

Collective = StrEnum(
    "Collective",
    "ALL_REDUCE ALL_GATHER REDUCE_SCATTER ALL_TO_ALL HIERARCHICAL ALL_TO_ALL_BF16 ALL_TO_ALL_FP8 BROADCAST SEND_RECV",
)
"""Collective that `osora bench-comm` measures.

`hierarchical` is an all-to-all in two stages, inside and between machines. The compressed all-to-alls send fp32
elements as bf16, or in 8 bits with a scale for each row.
"""

Scaling = StrEnum("Scaling", ["STRONG", "WEAK"])
"""Scaling test of `osora bench-comm`: the total work (strong), or the work of each rank (weak) is constant."""
