"""Settings of the training loop: steps, checkpoints, optimizer, precision, memory and adapters."""

from collections.abc import Iterator
from enum import StrEnum
from typing import Final, Literal

from pydantic import Field, PositiveInt, ValidationError, ValidatorFunctionWrapHandler, field_validator

from opensora_cli.core.section import ByteSize, Count, CountOrZero, FileName, Section, Share
from opensora_cli.settings.components import Tf32Settings
from opensora_cli.settings.devices import Blocks
from opensora_cli.settings.enums import HostWeights


class LoopSettings(Section):
    """Length of training, and batches of a step."""

    steps: Count = Field(default=1000, description="Number of updates.")
    micro_batches: Count | None = Field(
        default=None, description="Batches of an update over all devices. None: one for each."
    )
    ema_decay: float | None = Field(
        default=0.999, ge=0, lt=1, description="Decay of the exported averaged weights. None: no average."
    )
    log_every: Count = Field(default=20, description="Updates between lines of the log.")
    seed: int = Field(default=0, ge=0, le=2**31, description="Seed of first weights, batches and noise.")


class CheckpointSettings(Section):
    """Checkpoints. A run also saves one at its end and when it is interrupted."""

    every: Count = Field(default=200, description="Updates between checkpoints.")
    keep: Count = Field(default=3, description="Newest checkpoints to keep.")
    keep_best: bool = Field(
        default=True,
        description="Also keep the checkpoint with the lowest validation loss, or training loss without it.",
    )


class OptimizerName(StrEnum):
    """Optimizer."""

    ADAMW = "adamw"
    MUON = "muon"


class ScheduleName(StrEnum):
    """Decay of the learning rate after its warm-up."""

    LINEAR = "linear"
    """Constant, then linear decay over the last steps."""
    COSINE = "cosine"
    """Half a cosine from the end of the warm-up to the end of the run."""


class OptimizerSettings(Section):
    """Optimizer and learning rate."""

    name: OptimizerName = Field(default=OptimizerName.ADAMW, description="adamw, or muon for the matrices in blocks.")
    learning_rate: float = Field(default=1e-3, gt=0, le=1, description="Peak learning rate of adamw.")
    muon_learning_rate: float = Field(default=0.02, gt=0, le=10, description="Peak learning rate of muon.")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="Decay of the first moment of adamw.")
    beta2: float = Field(default=0.98, ge=0, lt=1, description="Decay of the second moment of adamw.")
    eps: float = Field(default=1e-8, gt=0, le=1, description="Epsilon of adamw.")
    weight_decay: float = Field(default=0.0, ge=0, le=1000, description="Weight decay.")
    max_grad_norm: float = Field(default=1.0, gt=0, le=1e12, description="Gradients are clipped to this norm.")
    schedule: ScheduleName = Field(default=ScheduleName.LINEAR, description="linear decay at the end, or cosine.")
    warmup_steps: CountOrZero = Field(default=100, description="First steps, over which the learning rate rises.")
    decay_steps: CountOrZero = Field(default=0, description="Last steps, over which a linear learning rate falls.")
    initial_learning_rate: Share = Field(default=0.0, description="Learning rate at the start of the warm-up.")
    final_learning_rate: Share = Field(default=0.0, description="Learning rate at the end of the decay.")
    offload_states: bool = Field(
        default=False,
        description="Keep and update the moments of adamw on the host, which saves 8 bytes a weight and is slower.",
    )

    def rules(self) -> Iterator[str]:
        for name in ("initial_learning_rate", "final_learning_rate"):
            if (rate := getattr(self, name)) > self.learning_rate:
                yield f"optimizer.{name}={rate} must be at most optimizer.learning_rate={self.learning_rate}"


class Compute(StrEnum):
    """Floating point type of layers. Weights, gradients and moments are in fp32."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


class PrecisionSettings(Tf32Settings):
    """Precision of training. The weights stay in fp32, as master weights of mixed precision."""

    compute: Compute = Field(default=Compute.BF16, description="Floating point type of layers. fp16 scales the loss.")
    fp8_linears: bool = Field(default=False, description="Multiply matrices of blocks in 8 bits (GPU from 8.9).")
    initial_loss_scale: float = Field(
        default=65536.0, ge=1, le=2.0**126, description="First scale of the loss in fp16."
    )
    loss_scale_window: Count = Field(default=2000, description="Updates without overflow that double the scale.")


class ActivationOffload(StrEnum):
    """Inputs of checkpointed blocks that are in host memory between forward and backward."""

    NONE = "none"
    ALL = "all"
    DYNAMIC = "dynamic"
    """Inputs that are computed while more than a share of the device's memory is in use."""


class WeightOffload(StrEnum):
    """Frozen weights beside an adapter that are in host memory until they are needed."""

    NONE = "none"
    BLOCKS = "blocks"
    """Weights of the transformer's blocks. They are copied to the device for forward and again for backward."""


AUTO: Final = "auto"
"""`memory.checkpointing` that is chosen by the device's memory."""


class TrainMemorySettings(Section):
    """Memory use of training. Only `fp8_storage` changes the trained weights."""

    checkpointing: bool | Literal["auto"] = Field(
        default=False,
        description="Recompute blocks in backward. auto recomputes as little as the device's memory requires.",
    )
    checkpoint_double_blocks: int | None = Field(
        default=None, ge=0, le=10_000, description="First double-stream blocks to recompute. None: all."
    )
    checkpoint_single_blocks: int | None = Field(
        default=None, ge=0, le=10_000, description="First single-stream blocks to recompute. None: all."
    )
    activation_offload: ActivationOffload = Field(
        default=ActivationOffload.NONE,
        description="Inputs of these blocks in host memory: none, all, or dynamic (while GPU memory is nearly full).",
    )
    offload_above: Share | None = Field(
        default=None, description="Share of memory in use that starts dynamic offload. None: 0.8."
    )
    activation_buffer: ByteSize | None = Field(default=None, description="Host buffer for activations, as in 8GiB.")
    offload: WeightOffload = Field(default=WeightOffload.NONE, description="Frozen weights that are kept on the host.")
    resident_blocks: Blocks | None = Field(default=None, description="Offloaded blocks on the device. None means 2.")
    host_weights: HostWeights | None = Field(default=None, description="Location of offloaded blocks. None: by memory.")
    fp8_storage: bool = Field(default=False, description="Store frozen blocks in 8 bits, which changes the weights.")

    @field_validator("checkpointing", mode="wrap")
    @classmethod
    def _checkpointing_is_auto_or_not(cls, value: object, read: ValidatorFunctionWrapHandler) -> object:
        try:
            return read(value)
        except ValidationError:
            raise ValueError(f"memory.checkpointing={value} must be true, false or auto") from None


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
        default=None, le=2**16, description="Rank of the adapter, as in 16. None: no adapter."
    )
    alpha: float | None = Field(
        default=None, gt=0, le=10**6, description="The adapter is scaled by alpha / rank. None: by 1."
    )
    dropout: float = Field(default=0.0, ge=0, lt=1, description="Dropout of the adapter's inputs.")
    targets: tuple[LoraTarget, ...] = Field(
        default=tuple(LoraTarget), min_length=1, description="Layers with an adapter."
    )
    init: FileName | None = Field(default=None, description="Adapter to continue, with its sizes. None: a new one.")

    @property
    def is_on(self) -> bool:
        """Whether an adapter is trained."""
        return self.rank is not None
