"""The choices that settings offer."""

from enum import StrEnum


class ModelName(StrEnum):
    """Model to generate with."""

    AUTO = "auto"
    """The best model that this machine can run. Only `runtime.model_choice` takes it."""
    DEMO = "demo"
    OPEN_SORA_V2 = "open-sora-v2"
    OPEN_SORA_V2_DC_AE = "open-sora-v2-dc-ae"
    """Over the latents of the video DC-AE."""
    FLUX1_DEV = "flux1-dev"
    """For pictures."""


class VAEKind(StrEnum):
    """An autoencoder."""

    HUNYUAN = "hunyuan"
    """Causal, for video: 4x8x8."""
    DC_AE = "dc_ae"
    """For video, of high compression: 4x32x32."""
    FLUX_AE = "flux_ae"
    """For pictures, and video frame by frame: 1x8x8."""

    @property
    def makes_videos(self) -> bool:
        """Whether models generate videos with it, and not pictures alone."""
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
    """Which frames of a reference video of another rate are given."""

    KEEP = "keep"
    """Those that are stored, one for one."""
    MATCH = "match"
    """Those that it shows at the times of the video's frames."""


class DType(StrEnum):
    """The floating point type that models compute in; `auto` is bfloat16 on CUDA and float32 on a CPU."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class AttentionChoice(StrEnum):
    """Attention backend of the transformer (`core.attention_kinds`); `auto` is the first one that works here."""

    AUTO = "auto"
    SDPA = "sdpa"
    CUDNN = "cudnn"
    FLASH2 = "flash2"
    FLASH3 = "flash3"
    XFORMERS = "xformers"
    MATH = "math"
    BF16_PRODUCTS = "bf16_products"


class TargetFormat(StrEnum):
    """What can be written. `checkpoint.formats` also knows what can only be read."""

    SAFETENSORS = "safetensors"
    SAFETENSORS_SHARDS = "safetensors-shards"
    TORCH = "torch"
    TORCH_SHARDS = "torch-shards"
    COLOSSALAI = "colossalai"
    DCP = "dcp"

    @property
    def is_folder(self) -> bool:
        """Whether it is written as a folder."""
        return self not in (TargetFormat.SAFETENSORS, TargetFormat.TORCH)

    @property
    def has_shards(self) -> bool:
        """Whether it is cut into files of limited size."""
        return self in (TargetFormat.SAFETENSORS_SHARDS, TargetFormat.TORCH_SHARDS, TargetFormat.COLOSSALAI)

    @property
    def has_metadata(self) -> bool:
        """Whether it has a place for text about the weights."""
        return self is not TargetFormat.DCP


class WeightDType(StrEnum):
    """Floating point types that weights are written in; 8-bit ones get a scale beside each weight."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8_E4M3 = "fp8_e4m3"
    FP8_E5M2 = "fp8_e5m2"

    @property
    def is_fp8(self) -> bool:
        """Whether it has 8 bits."""
        return self in (WeightDType.FP8_E4M3, WeightDType.FP8_E5M2)


class QKVLayout(StrEnum):
    """Whether the projections to q, k and v are one tensor, as in Flux, or three, as in Open-Sora v2."""

    FUSED = "fused"
    SPLIT = "split"


class RotaryLayout(StrEnum):
    """How rotary pairs lie in a head: dims (2j, 2j+1), as in Flux, or (j, D/2+j), as in Open-Sora v2."""

    INTERLEAVED = "interleaved"
    HALF = "half"


class WeightSelection(StrEnum):
    """Which weights of a training."""

    MODEL = "model"
    EMA = "ema"
    MASTER = "master"


class DownloadPreset(StrEnum):
    """What can be downloaded."""

    OPEN_SORA_V2 = "open-sora-v2"
    OPEN_SORA_V2_DC_AE = "open-sora-v2-dc-ae"
    FLUX1_DEV = "flux1-dev"


class OffloadMode(StrEnum):
    """Weights that wait in host memory until they are needed."""

    AUTO = "auto"
    """The fastest mode that fits in memory."""
    NONE = "none"
    MODEL = "model"
    BLOCKS = "blocks"


class NameFrom(StrEnum):
    """What results in a folder are named after."""

    SEED = "seed"
    """The prompt, shortened, and the seed: `raining-sea_seed42`."""
    PROMPT = "prompt"
    """The prompt as it is, and the number of the sample from 0: `raining, sea-0`, as VBench looks for them."""


class HostWeights(StrEnum):
    """Where the weights of offloaded blocks wait."""

    PINNED = "pinned"
    """In page-locked memory, from which copies overlap with computation: one copy of the weights."""
    MAPPED = "mapped"
    """In the file, mapped: no copy, if the file has the dtype and the layout of the model; as fast as the disk."""


class EnvProfile(StrEnum):
    """A kind of machine that settings are recommended for."""

    LOCAL = "local"
    CLOUD = "cloud"
    CLUSTER = "cluster"


class AllToAll(StrEnum):
    """How Ulysses attention exchanges tokens for heads."""

    DIRECT = "direct"
    """Every rank sends to every other."""
    HIERARCHICAL = "hierarchical"
    """Inside a machine first, then one message from each rank to each other machine."""


class Compression(StrEnum):
    """What the exchanges of Ulysses attention round their elements to, on the way."""

    NONE = "none"
    BF16 = "bf16"
    """An element comes out wrong by at most 1/256 of itself."""
    FP8 = "fp8"
    """By at most 1/16 of itself, or 2^-18 of the largest element of its token and head, whichever is more."""

    @property
    def largest_error(self) -> str | None:
        """For people; None: elements travel as they are."""
        errors = {Compression.BF16: "1/256", Compression.FP8: "1/16"}
        return f"elements off by at most {errors[self]}" if self in errors else None


class Collective(StrEnum):
    """What `osora bench-comm` measures: collectives, and shapes in which this project uses them."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    HIERARCHICAL = "hierarchical"
    """The all-to-all in two stages, inside machines and between them."""
    ALL_TO_ALL_BF16 = "all_to_all_bf16"
    """The all-to-all of fp32 that travels as bf16."""
    ALL_TO_ALL_FP8 = "all_to_all_fp8"
    """As 8 bits, with a scale for each row."""
    BROADCAST = "broadcast"
    SEND_RECV = "send_recv"
    GATHER_SPLIT = "gather_split"
    """`gather_forward_split_backward`, both ways."""
    SPLIT_GATHER = "split_gather"
    """`split_forward_gather_backward`, both ways."""
    ULYSSES_256PX = "ulysses_256px"
    ULYSSES_768PX = "ulysses_768px"
    BLOCK_GATHER = "block_gather"
    """The weights of one transformer block."""
    OVERLAP = "overlap"
    """Ulysses attention of one block, whose exchanges overlap with it; its rows are a table of their own."""

    @property
    def has_sizes(self) -> bool:
        """Whether it is measured over a range of sizes; the others have the one that a model gives them."""
        return self not in (
            Collective.ULYSSES_256PX,
            Collective.ULYSSES_768PX,
            Collective.BLOCK_GATHER,
            Collective.OVERLAP,
        )


class Scaling(StrEnum):
    """What stays the same while `osora bench-comm` adds ranks."""

    STRONG = "strong"
    """The work as a whole."""
    WEAK = "weak"
    """The work of each rank."""


class BenchDevice(StrEnum):
    """On what the ranks of `osora bench-comm` run; `auto` is cuda where there are GPUs."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"
