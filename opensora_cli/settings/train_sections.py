"""Sections of the settings of `osora train`: clips, objectives, loop, optimizer, memory, adapters, logs, samples."""

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Annotated, Any, NamedTuple

import yaml
from pydantic import BeforeValidator, Field, PositiveInt, create_model, field_validator

from opensora_cli.core.choices import Fit
from opensora_cli.core.conditions import CONDITION_MODES, LatentGrid, ReferenceLengths
from opensora_cli.core.section import Count, CountOrZero, FileName, Section, Share, Weight, Words, matching, rule_error
from opensora_cli.models.registry import ARCHITECTURES, DEMO
from opensora_cli.settings.devices import AttentionChoice, Blocks, DType, HostWeights
from opensora_cli.settings.layers import parse_yaml_text

_Blocks = Annotated[int, Field(ge=0, le=10_000)]
_Seed = Annotated[int, Field(ge=0, le=2**31)]
_Pixels = Annotated[int, Field(ge=1, le=4096)]
_DEMO = ARCHITECTURES[DEMO].files
_DEFAULT_WEIGHTS = {
    **{"t2v": 10.0, "i2v_head": 2.0, "i2v_tail": 1.0, "i2v_loop": 1.0, "v2v_head": 1.0, "v2v_tail": 1.0},
    **{"v2v_head_easy": 0.5, "v2v_tail_easy": 0.5},
}
"""Weights of condition modes. Other modes are not trained by default."""
_FIELDS: dict[str, Any] = {
    name: (Weight, Field(_DEFAULT_WEIGHTS.get(name, 0.0), description=mode.description))
    for name, mode in CONDITION_MODES.items()
}
_LatentFrames = Annotated[int, Field(ge=1, le=1025)]
_Size = Annotated[int, Field(ge=1, le=2**16)]


BatchSize = Annotated[int, Field(ge=1, le=4096)]


class BucketSettings(NamedTuple):
    """Bucket of clips of one size."""

    probability: Share
    """Probability that a fitting sample goes to this bucket."""
    batch_size: BatchSize
    """Samples of a micro-batch."""


_EXAMPLE = "{256px: {1: [1.0, 8], 33: [1.0, 2]}}"
_Length = Annotated[int, Field(ge=1, le=1025)]
_Resolution = Annotated[str, matching(r"[1-9]\d{1,3}(px|p)", "must be a resolution, as in 256px or 720p")]


def _read_table(value: object) -> object:
    try:
        table = parse_yaml_text(value) if isinstance(value, str) else value
    except yaml.YAMLError:
        table = None
    if not isinstance(table, Mapping):
        raise rule_error(f"must be resolutions, frames, probabilities and batch sizes, as in {_EXAMPLE}")
    return table


def _check_pair(value: object) -> object:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise rule_error("must be [probability, batch size], as in [1.0, 2]")
    return value


_Lengths = Annotated[dict[_Length, Annotated[BucketSettings, BeforeValidator(_check_pair)]], Field(min_length=1)]
BucketTable = Annotated[dict[_Resolution, _Lengths], BeforeValidator(_read_table)]
"""Resolution -> frames -> (probability, batch size)."""

RELEASED_BUCKETS: BucketTable = {
    "256px": {length: BucketSettings(1.0, size) for length, size in ((1, 50), (33, 12), (65, 6), (129, 3))},
    "768px": {length: BucketSettings(1.0, size) for length, size in ((1, 13), (33, 2))},
}
"""Buckets of the reference implementation."""


class DataSettings(Section):
    """Clips, sorted into buckets of one size."""

    table: FileName | None = Field(None, description="CSV or parquet table of clips. None: from a Python program.")
    buckets: BucketTable = Field(
        RELEASED_BUCKETS,
        min_length=1,
        description=f"{{resolution: {{frames: [probability, batch size]}}}}, as in {_EXAMPLE}.",
    )
    fps_max: float = Field(24.0, gt=0, le=1000, description="Largest frame rate. Faster videos lose frames.")
    fit: Fit = Field(Fit.CROP, description="How frames of another shape are fitted to their bucket.")
    workers: int = Field(2, ge=0, le=256, description="Processes that read clips. 0: the training process.")
    prefetch: int = Field(2, ge=1, le=64, description="Micro-batches that each process prefetches.")

    def rules(self) -> Iterator[str]:
        if not any(bucket.probability for lengths in self.buckets.values() for bucket in lengths.values()):
            yield "data.buckets have probability 0: give at least one bucket a probability over 0"

    def lengths(self) -> tuple[int, ...]:
        """Return the numbers of frames of micro-batches in ascending order."""
        return tuple(sorted({length for lengths in self.buckets.values() for length in lengths}))

    def length_problems(self, grid: LatentGrid) -> list[str]:
        """Return one line for each length that the autoencoder cannot reconstruct."""
        return [
            f"data.buckets: clips of {length} frames do not suit vae.kind: use {below} frames"
            for length in self.lengths()
            if (below := grid.longest_clip(length)) != length
        ]


class ModeWeights(create_model("_ModeWeights", __base__=Section, **_FIELDS)):  # type: ignore[misc]
    """Relative frequency of each condition mode in training."""

    def by_mode(self) -> dict[str, float]:
        """Return the modes with a weight over 0, with their weights."""
        weights = {mode: float(getattr(self, mode)) for mode in type(self).model_fields}
        return {mode: weight for mode, weight in weights.items() if weight > 0}

    def rules(self) -> Iterator[str]:
        if not self.by_mode():
            yield "train_mmdit.mode_weights are all 0: give at least one mode a weight over 0"


class FrozenFileSettings(Section):
    """Names of the frozen parts in the folders of `weights`."""

    vae: FileName = Field(_DEMO.vae, description="Autoencoder weights.")
    t5: FileName = Field(_DEMO.t5, description="T5 folder in the transformers layout.")
    clip: FileName = Field(_DEMO.clip, description="CLIP folder in the transformers layout.")


class MMDiTTrainSettings(Section):
    """Objective of the transformer: flow matching with condition modes and text."""

    mode_weights: ModeWeights = ModeWeights()
    video_latent_frames: _LatentFrames = Field(8, description="Latent frames given in v2v, after the first.")
    easy_latent_frames: _LatentFrames = Field(16, description="Latent frames in easy v2v, after the first.")
    t5_dropout: Share = Field(0.3162, description="Share of captions that T5 reads as an empty prompt.")
    clip_dropout: Share = Field(0.3162, description="Share of captions that CLIP reads as an empty prompt.")
    add_fps: bool = Field(True, description="Add the frame rate of clips to captions.")
    add_motion_score: bool = Field(True, description="Add the motion score, if there is one, to captions.")
    embedded_guidance: float = Field(4.0, ge=0, le=100, description="Guidance input of a distilled model.")
    masked_loss: bool = Field(
        False, description="Omit given first and last frames from the loss, unless frames between them are given, too."
    )
    sigma_min: float = Field(1e-5, ge=0, lt=1, description="Noise that remains at time 0.")
    attention: AttentionChoice = Field(AttentionChoice.AUTO, description="Attention backend. auto: by device.")
    frozen_dtype: DType = Field(DType.AUTO, description="Type of frozen parts. auto: bfloat16 on GPUs.")
    files: FrozenFileSettings = FrozenFileSettings()
    cache: str | None = Field(
        None,
        description="Folder of encoded clips, as osora data cache makes it. Missing clips are encoded before the first "
        "step. None: encode random cuts.",
    )

    @property
    def lengths(self) -> ReferenceLengths:
        """Latent frames of v2v references."""
        return ReferenceLengths(video=self.video_latent_frames, easy=self.easy_latent_frames)


class DistillTrainSettings(Section):
    """Objective of a few-step adapter: steps without guidance that reach what guided steps of its model reach."""

    steps: int = Field(4, ge=1, le=16, description="Steps of the adapter.")
    teacher_steps: int = Field(8, ge=1, le=100, description="Guided steps of the model in each of them.")
    critic_steps: int = Field(2, ge=1, le=100, description="Updates of the critic for each of the adapter (dmd).")
    critic_learning_rate: float = Field(1e-3, gt=0, le=1, description="Peak learning rate of the critic (dmd).")
    guidance_scale: float = Field(7.5, ge=0, le=100, description="Weight of the prompt; 1 disables guidance.")
    image_guidance_scale: float = Field(3.0, ge=0, le=100, description="Weight of the reference; 1 disables guidance.")
    mean_guidance_of: int | None = Field(
        50, ge=1, le=1000, description="Mean of oscillating guidance over this many steps. None: no mean."
    )


class DiscriminatorSettings(Section):
    """Discriminator between decoded and real clips, which the autoencoder learns to deceive."""

    weight: Weight = Field(0.0, description="Weight of the adversarial term. 0 disables it.")
    start_step: CountOrZero = Field(0, description="First steps without the discriminator.")
    learning_rate: float = Field(1e-4, gt=0, le=1, description="Peak learning rate of its adamw.")
    width: int = Field(64, ge=8, le=8192, multiple_of=8, description="Channels of the first layer.")
    layers: int = Field(3, ge=1, le=8, description="Layers that halve time, height and width.")


class VAETrainSettings(Section):
    """Objective of the autoencoder: mean absolute error and weighted terms."""

    decoder_only: bool = Field(False, description="Train the decoder alone, so that latents stay the same.")
    single_frame_share: Share = Field(0.0, description="Share of batches that are cut to single frames.")
    crop_size: int = Field(0, ge=0, le=2**16, description="Side of random square crops in pixels. 0: no crops.")
    squared_error_weight: Weight = Field(0.0, description="Weight of the mean squared error.")
    gradient_weight: Weight = Field(0.0, description="Weight of the absolute error of pixel gradients.")
    kl_weight: Weight = Field(0.0, description="Weight of the mean KL divergence of a latent value, in nats.")
    perceptual_weight: Weight = Field(0.0, description="Weight of the perceptual distance LPIPS.")
    perceptual_files: tuple[str, ...] = Field((), description="LPIPS weights: vgg16-397923af.pth and vgg.pth.")
    discriminator: DiscriminatorSettings = DiscriminatorSettings()
    export_half: bool = Field(False, description="Export float16 instead of float32.")


class TextTrainSettings(Section):
    """Lengths of captions."""

    t5_max_length: _Size = Field(32, description="Tokens that T5 reads, end token included.")
    clip_max_length: _Size = Field(32, description="Tokens that CLIP reads, start and end tokens included.")


class LoopSettings(Section):
    """Length of training, and batches of a step."""

    steps: Count = Field(1000, description="Number of updates.")
    micro_batches: Count | None = Field(None, description="Batches of an update over all devices. None: one for each.")
    ema_decay: float | None = Field(0.999, ge=0, lt=1, description="Decay of averaged weights. None: no average.")
    log_every: Count = Field(20, description="Updates between lines of the log.")
    seed: _Seed = Field(0, description="Seed of first weights, batches and noise.")


class CheckpointSettings(Section):
    """Checkpoints. A run also saves one at its end and when it is interrupted."""

    every: Count = Field(200, description="Updates between checkpoints.")
    keep: Count = Field(3, description="Newest checkpoints to keep.")


OptimizerName = StrEnum("OptimizerName", ["ADAMW", "MUON"])
"""Optimizer."""

ScheduleName = StrEnum("ScheduleName", ["LINEAR", "COSINE"])
"""Decay of the learning rate: linear over the last steps, or half a cosine from the end of the warm-up."""


class OptimizerSettings(Section):
    """Optimizer and learning rate."""

    name: OptimizerName = Field(OptimizerName.ADAMW, description="adamw, or muon for the matrices in blocks.")
    learning_rate: float = Field(1e-3, gt=0, le=1, description="Peak learning rate of adamw.")
    muon_learning_rate: float = Field(0.02, gt=0, le=10, description="Peak learning rate of muon.")
    beta1: float = Field(0.9, ge=0, lt=1, description="Decay of the first moment of adamw.")
    beta2: float = Field(0.98, ge=0, lt=1, description="Decay of the second moment of adamw.")
    eps: float = Field(1e-8, gt=0, le=1, description="Epsilon of adamw.")
    weight_decay: float = Field(0.0, ge=0, le=1000, description="Weight decay.")
    max_grad_norm: float = Field(1.0, gt=0, le=1e12, description="Gradients are clipped to this norm.")
    schedule: ScheduleName = Field(ScheduleName.LINEAR, description="linear decay at the end, or cosine.")
    warmup_steps: CountOrZero = Field(100, description="First steps, over which the learning rate rises.")
    decay_steps: CountOrZero = Field(0, description="Last steps, over which a linear learning rate falls.")
    offload_states: bool = Field(False, description="Keep sharded weights and moments on the host: slower.")


Compute = StrEnum("Compute", ["FP32", "BF16"])
"""Floating point type of layers. Weights, gradients and moments are in fp32."""


class PrecisionSettings(Section):
    """Precision of training. The weights stay in fp32, as master weights of mixed precision."""

    compute: Compute = Field(Compute.BF16, description="Floating point type of layers: fp32 or bf16.")


Checkpointing = StrEnum("Checkpointing", ["NONE", "FULL", "SELECTIVE", "OFFLOAD"])
"""Activation checkpointing of the transformer's blocks (Chen et al. 2016).

`full` keeps the inputs of blocks, `selective` the results of attention too, and `offload` the inputs on the host.
"""

WeightOffload = StrEnum("WeightOffload", ["NONE", "BLOCKS"])
"""Frozen weights beside an adapter that wait on the host. Blocks are copied for forward and again for backward."""


class TrainMemorySettings(Section):
    """Memory use of training. Only `fp8_storage` changes the trained weights."""

    checkpointing: Checkpointing = Field(
        Checkpointing.NONE,
        description="Recompute blocks in backward: full, selective (not attention), or offload (inputs on the host).",
    )
    checkpoint_double_blocks: _Blocks | None = Field(None, description="First double blocks to recompute. None: all.")
    checkpoint_single_blocks: _Blocks | None = Field(None, description="First single blocks to recompute. None: all.")
    offload: WeightOffload = Field(WeightOffload.NONE, description="Frozen weights that are kept on the host.")
    resident_blocks: Blocks | None = Field(None, description="Offloaded blocks on the device. None means 2.")
    host_weights: HostWeights | None = Field(None, description="Location of offloaded blocks. None: by memory.")
    fp8_storage: bool = Field(False, description="Store frozen blocks in 8 bits, which changes the weights.")


LoraTarget = StrEnum("LoraTarget", ["Q_PROJ", "K_PROJ", "V_PROJ", "PROJ", "MLP", "V_MLP", "LINEAR2"])
"""Linear layers of transformer blocks, by the ends of their names.

`proj` follows the attention of a double-stream block. Single-stream blocks have `v_mlp` (values and MLP) and
`linear2` (after both).
"""


class LoraSettings(Section):
    """Adapter that is trained beside the frozen transformer of `init`."""

    rank: PositiveInt | None = Field(None, le=2**16, description="Rank of the adapter, as in 16. None: no adapter.")
    alpha: float | None = Field(None, gt=0, le=10**6, description="The adapter is scaled by alpha / rank. None: by 1.")
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout of the adapter's inputs.")
    targets: tuple[LoraTarget, ...] = Field(tuple(LoraTarget), min_length=1, description="Layers with an adapter.")
    init: FileName | None = Field(None, description="Adapter to continue, with its sizes. None: a new one.")

    @property
    def is_on(self) -> bool:
        """Whether an adapter is trained."""
        return self.rank is not None


class WatchingSettings(Section):
    """Records beside log.jsonl, which every run has."""

    tensorboard: bool = Field(False, description="Write the folder tensorboard for `tensorboard --logdir`.")
    nvtx: bool = Field(False, description="Mark the parts of each step for Nsight Systems. Needs a GPU.")
    peak_tflops: float | None = Field(None, gt=0, le=10**9, description="Peak of a GPU in TFLOP/s, for the MFU.")


class ValidationSettings(Section):
    """Loss on held-out clips, with the same noise every time."""

    every: Count | None = Field(None, description="Updates between validations. None: never.")
    table: FileName | None = Field(None, description="Table of held-out clips.")
    batches: int = Field(8, ge=1, le=100_000, description="Largest number of micro-batches.")
    seed: _Seed = Field(0, description="Seed of the clips' order, times and noise.")


class SampleSettings(Section):
    """Videos of the model in training."""

    every: Count | None = Field(None, description="Updates between videos. None disables them.")
    prompts: tuple[Words, ...] = Field((), max_length=64, description='Prompt, or a list as in ["raining, sea", snow].')
    num_frames: int | None = Field(None, ge=1, le=1025, description="Number of frames.")
    height: _Pixels | None = Field(None, description="Height in pixels.")
    width: _Pixels | None = Field(None, description="Width in pixels.")
    fps: float | None = Field(None, gt=0, le=240, description="Frames per second. None means data.fps_max.")
    num_inference_steps: int = Field(20, ge=1, le=1000, description="Number of Euler steps.")
    guidance_scale: float = Field(7.5, ge=0, le=100, description="Guidance scale of the prompt. 1 disables it.")
    seed: _Seed = Field(0, description="Seed of the first video. Video i uses seed + i.")

    @field_validator("prompts", mode="before")
    @classmethod
    def _read_prompts(cls, value: object) -> object:
        # Prompts may have commas, so that text is not split there.
        if not isinstance(value, str):
            return value
        if not value.lstrip().startswith("["):
            return (value,) if value.strip() else ()
        try:
            return parse_yaml_text(value)
        except yaml.YAMLError:
            raise ValueError(f'samples.prompts={value} must be a list, as in ["raining, sea", snow]') from None
