"""Choices of settings."""

from enum import StrEnum


class VAEKind(StrEnum):
    """Autoencoder."""

    HUNYUAN = "hunyuan"
    """Causal video autoencoder with compression 4x8x8."""
    DC_AE = "dc_ae"
    """Video autoencoder with compression 4x32x32."""
    FLUX_AE = "flux_ae"
    """Picture autoencoder with compression 1x8x8. It encodes videos frame by frame."""

    @property
    def makes_videos(self) -> bool:
        """Whether models generate videos with it."""
        return self is not VAEKind.FLUX_AE


class AspectRatio(StrEnum):
    """Width to height."""

    WIDE_2_39_1 = "2.39:1"
    WIDE_2_1 = "2:1"
    WIDE_1_85_1 = "1.85:1"
    WIDE_16_9 = "16:9"
    WIDE_8_5 = "8:5"
    WIDE_3_2 = "3:2"
    WIDE_4_3 = "4:3"
    SQUARE = "1:1"
    TALL_3_4 = "3:4"
    TALL_2_3 = "2:3"
    TALL_5_8 = "5:8"
    TALL_9_16 = "9:16"
    TALL_1_1_85 = "1:1.85"
    TALL_1_2 = "1:2"
    TALL_1_2_39 = "1:2.39"


class ReferenceRate(StrEnum):
    """Frames of a reference video with another rate: the stored ones, or those visible at the video's times."""

    KEEP = "keep"
    MATCH = "match"


class DType(StrEnum):
    """Floating point type of models. `auto` means bfloat16 on GPUs and float32 on a CPU."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class AttentionChoice(StrEnum):
    """Attention backend of the transformer (see `core.attention_kinds`). `auto` means the first one that works."""

    AUTO = "auto"
    SDPA = "sdpa"
    CUDNN = "cudnn"
    FLASH2 = "flash2"
    FLASH3 = "flash3"
    FLASH4 = "flash4"
    XFORMERS = "xformers"
    MATH = "math"
    BF16_PRODUCTS = "bf16_products"


class OffloadMode(StrEnum):
    """Weights that wait in host memory until they are needed."""

    AUTO = "auto"
    """The fastest mode that fits in memory."""
    NONE = "none"
    MODEL = "model"
    BLOCKS = "blocks"


class NameFrom(StrEnum):
    """Name of results in a folder: `raining-sea_seed42`, or `raining, sea-0` as VBench expects."""

    SEED = "seed"
    PROMPT = "prompt"


class HostWeights(StrEnum):
    """Location of offloaded blocks: a page-locked copy, or the mapped file, which is as fast as the disk."""

    PINNED = "pinned"
    MAPPED = "mapped"


class AllToAll(StrEnum):
    """All-to-all algorithm of Ulysses attention: between all ranks, or inside machines and then between them."""

    DIRECT = "direct"
    HIERARCHICAL = "hierarchical"


class Compression(StrEnum):
    """Rounding of elements in the exchanges of Ulysses attention."""

    NONE = "none"
    BF16 = "bf16"
    """The error is at most 1/256 of an element."""
    FP8 = "fp8"
    """The error is at most 1/16 of an element, or 2^-18 of the largest element of its token and head."""

    @property
    def largest_error(self) -> str | None:
        """Largest error as text. None means no rounding."""
        errors = {Compression.BF16: "1/256", Compression.FP8: "1/16"}
        return f"elements off by at most {errors[self]}" if self in errors else None


class EnvProfile(StrEnum):
    """Kind of machine for recommended settings."""

    LOCAL = "local"
    CLOUD = "cloud"
    CLUSTER = "cluster"


class Collective(StrEnum):
    """Collective that `osora bench-comm` measures."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    HIERARCHICAL = "hierarchical"
    """All-to-all in two stages, inside and between machines."""
    ALL_TO_ALL_BF16 = "all_to_all_bf16"
    """All-to-all of fp32 elements that are sent as bf16."""
    ALL_TO_ALL_FP8 = "all_to_all_fp8"
    """All-to-all of fp32 elements that are sent in 8 bits with a scale for each row."""
    BROADCAST = "broadcast"
    SEND_RECV = "send_recv"


class Scaling(StrEnum):
    """Scaling test of `osora bench-comm`: the total work (strong), or the work of each rank (weak) is constant."""

    STRONG = "strong"
    WEAK = "weak"
