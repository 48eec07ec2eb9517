"""How a training run goes: its steps and checkpoints, optimizer, precision and memory."""

from enum import StrEnum
from typing import Final, Literal, Self

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

from opensora_cli.settings.base import ByteSize, Section
from opensora_cli.settings.components import Tf32Settings
from opensora_cli.settings.enums import HostWeights


class LoopSettings(Section):
    """How long to train, and what a step is."""

    steps: PositiveInt = Field(default=1000, le=10**9, description="updates in all")
    micro_batches: PositiveInt | None = Field(
        default=None,
        le=10**9,
        description="batches whose mean gradient makes one update, over all devices: a multiple of the devices with "
        "batches of their own; none: one for each of them",
    )
    ema_decay: float | None = Field(
        default=0.999, ge=0, lt=1, description="of the averaged weights, which are exported; none: no average"
    )
    log_every: PositiveInt = Field(default=20, le=10**9, description="updates between two lines of the log")
    seed: NonNegativeInt = Field(
        default=0, le=2**31, description="of the first weights, and of every batch and its noise"
    )


class CheckpointSettings(Section):
    """When to save, and what to keep. An interruption and the end of a run are saved in any case."""

    every: PositiveInt = Field(default=200, le=10**9, description="updates between two checkpoints")
    keep: PositiveInt = Field(default=3, le=10**9, description="newest checkpoints that are kept")
    keep_best: bool = Field(
        default=True,
        description="keep the best one, too: that with the lowest validation loss or, without validation, the lowest "
        "mean training loss since the checkpoint before",
    )


class OptimizerName(StrEnum):
    """How gradients become updates."""

    ADAMW = "adamw"
    MUON = "muon"


class ScheduleName(StrEnum):
    """How the learning rate falls after its warm-up."""

    LINEAR = "linear"
    """Level, and then straight down over the last steps, if any."""
    COSINE = "cosine"
    """Along half a cosine, from the end of the warm-up to the end of the run."""


class OptimizerSettings(Section):
    """The optimizer and its learning rate over time."""

    name: OptimizerName = Field(
        default=OptimizerName.ADAMW,
        description="muon orthogonalises the updates of matrices inside blocks, adamw does the rest; adamw does all",
    )
    learning_rate: float = Field(default=1e-3, gt=0, le=1, description="of adamw, between warm-up and decay")
    muon_learning_rate: float = Field(
        default=0.02, gt=0, le=10, description="of muon, between warm-up and decay; it rises and falls with adamw's"
    )
    beta1: float = Field(default=0.9, ge=0, lt=1, description="decay of adamw's mean gradient")
    beta2: float = Field(default=0.98, ge=0, lt=1, description="decay of adamw's mean squared gradient")
    eps: float = Field(default=1e-8, gt=0, le=1, description="added to the root of adamw's mean squared gradient")
    weight_decay: float = Field(
        default=0.0, ge=0, le=1000, description="share of a weight that a step at rate 1 takes away"
    )
    max_grad_norm: float = Field(
        default=1.0, gt=0, le=1e12, description="larger gradients are scaled down to this norm"
    )
    schedule: ScheduleName = Field(
        default=ScheduleName.LINEAR,
        description="how the rate falls: linear over the last decay_steps, cosine from the end of the warm-up on",
    )
    warmup_steps: NonNegativeInt = Field(default=100, le=10**9, description="first steps, over which the rate rises")
    decay_steps: NonNegativeInt = Field(
        default=0, le=10**9, description="with linear: last steps, over which the rate falls"
    )
    initial_learning_rate: float = Field(
        default=0.0, ge=0, le=1, description="where the warm-up of learning_rate starts"
    )
    final_learning_rate: float = Field(default=0.0, ge=0, le=1, description="where the fall of learning_rate ends")
    offload_states: bool = Field(
        default=False,
        description="keep adamw's two moments in host memory and update there: 8 bytes a weight less on the device, "
        "for three copies of the weights over its bus in every step",
    )

    @model_validator(mode="after")
    def _everything_has_an_effect(self) -> Self:
        problems = []
        if self.schedule is ScheduleName.COSINE and self.decay_steps:
            problems.append(
                f"optimizer.decay_steps={self.decay_steps} has no effect with optimizer.schedule=cosine, which falls "
                "from the end of the warm-up on: use 0"
            )
        for name, steps in (("initial", self.warmup_steps), ("final", self.decay_steps)):
            rate = getattr(self, f"{name}_learning_rate")
            if rate > self.learning_rate:
                problems.append(
                    f"optimizer.{name}_learning_rate={rate} must be at most "
                    f"optimizer.learning_rate={self.learning_rate}"
                )
            if rate and not steps and not (name == "final" and self.schedule is ScheduleName.COSINE):
                missing = "warmup_steps" if name == "initial" else "decay_steps"
                problems.append(
                    f"optimizer.{name}_learning_rate={rate} has no effect with optimizer.{missing}=0: use 0, or more "
                    f"{missing}"
                )
        if self.offload_states and self.name is not OptimizerName.ADAMW:
            problems.append(f"optimizer.offload_states=true needs optimizer.name=adamw, not {self.name}")
        if problems:
            raise ValueError("\n".join(problems))
        return self


class Compute(StrEnum):
    """The numbers that layers compute with; weights, gradients and moments are in fp32."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


class PrecisionSettings(Tf32Settings):
    """What training computes with. The weights themselves are kept in fp32, which are what mixed precision calls
    master weights.
    """

    compute: Compute = Field(
        default=Compute.BF16, description="numbers that layers compute with; fp16 scales the loss against underflow"
    )
    fp8_linears: bool = Field(
        default=False,
        description="multiply the matrices of the blocks in 8 bits, which needs a GPU of compute capability 8.9",
    )
    initial_loss_scale: float = Field(
        default=65536.0,
        ge=1,
        le=2.0**126,
        description="with fp16: factor of the loss at first; it halves when a gradient overflows",
    )
    loss_scale_window: PositiveInt = Field(
        default=2000, le=10**9, description="with fp16: updates without overflow after which the factor doubles"
    )

    def problems(self, *, trains_transformer: bool) -> list[str]:
        """Return what contradicts the target of a training, which is the transformer or something else."""
        if self.fp8_linears and not trains_transformer:
            return ["precision.fp8_linears=true is for target=mmdit alone: use false"]
        return []

    @model_validator(mode="after")
    def _everything_has_an_effect(self) -> Self:
        if self.fp8_linears and self.compute is not Compute.BF16:
            raise ValueError(
                f"precision.fp8_linears=true needs precision.compute=bf16, not {self.compute}: everything but the "
                "products of matrices stays in it"
            )
        if self.compute is not Compute.FP16:
            for name in ("initial_loss_scale", "loss_scale_window"):
                if (value := getattr(self, name)) != type(self).model_fields[name].default:
                    raise ValueError(
                        f"precision.{name}={value} has no effect with precision.compute={self.compute}: use fp16"
                    )
        return self


class ActivationOffload(StrEnum):
    """Which inputs of checkpointed blocks are in host memory between forward and backward."""

    NONE = "none"
    ALL = "all"
    DYNAMIC = "dynamic"
    """Those that come when more than a share of the device's memory is in use."""


class WeightOffload(StrEnum):
    """Which frozen weights beside an adapter wait in host memory until they are needed."""

    NONE = "none"
    BLOCKS = "blocks"
    """Those of the transformer's blocks: they come to the device for forward, and again for backward."""


AUTO: Final = "auto"
"""`memory.checkpointing` by what the device's memory asks for."""


class TrainMemorySettings(Section):
    """How training fits into the memory of its device. Only `fp8_storage` changes what is learnt."""

    checkpointing: bool | Literal["auto"] = Field(
        default=False,
        description="compute blocks again in backward, instead of keeping what they computed; auto: as little as the "
        "device's memory asks for, and what costs most for its bytes last",
    )
    checkpoint_double_blocks: NonNegativeInt | None = Field(
        default=None, le=10_000, description="how many double-stream blocks, from the first; none: all"
    )
    checkpoint_single_blocks: NonNegativeInt | None = Field(
        default=None, le=10_000, description="how many single-stream blocks, from the first; none: all"
    )
    activation_offload: ActivationOffload = Field(
        default=ActivationOffload.NONE,
        description="which inputs of these blocks are offloaded to the host, beside a GPU: all, or with dynamic those "
        "that come when its memory is nearly full",
    )
    offload_above: float | None = Field(
        default=None, ge=0, le=1, description="with dynamic: share of the memory from which on; none: 0.8"
    )
    activation_buffer: ByteSize | None = Field(
        default=None, description="size of the buffer for them, as in 8GiB; none: what a step needs"
    )
    offload: WeightOffload = Field(
        default=WeightOffload.NONE,
        description="beside an adapter: which frozen weights wait in host memory, and come to the device block by "
        "block, forward and backward",
    )
    resident_blocks: PositiveInt | None = Field(
        default=None,
        le=10_000,
        description="with blocks: how many are on the device at a time, those in transit included; none: 2",
    )
    host_weights: HostWeights | None = Field(
        default=None,
        description="with blocks: where the others wait; none: pinned where a GPU's machine has room, else mapped",
    )
    fp8_storage: bool = Field(
        default=False,
        description="beside an adapter: keep the blocks' frozen weights in 8 bits, which halves them and changes "
        "what is learnt a little",
    )

    def problems(self, *, trains_adapter: bool, shards: bool, compiles: bool, device: str) -> list[str]:
        """Return what contradicts the weights that are trained, and the devices that hold them."""
        asked = {
            "memory.offload=blocks": self.offload is WeightOffload.BLOCKS,
            "memory.fp8_storage=true": self.fp8_storage,
        }
        problems = []
        for named in (name for name, is_on in asked.items() if is_on):
            if not trains_adapter:
                problems.append(
                    f"{named} is for the frozen weights beside an adapter, and without lora.rank all weights are "
                    "trained: set it, as in lora.rank=16, or use strategy=zero3 and optimizer.offload_states=true"
                )
            elif shards:
                problems.append(f"{named} needs whole blocks, of which a strategy other than ddp has shares: use ddp")
        if self.offload is WeightOffload.BLOCKS and compiles:
            problems.append("memory.offload=blocks does not go with compile=true: use one of them")
        if self.host_weights is HostWeights.PINNED and device == "cpu":
            problems.append("memory.host_weights=pinned has no effect with device=cpu, which reads them where they are")
        return problems

    @field_validator("checkpointing", mode="wrap")
    @classmethod
    def _checkpointing_is_auto_or_not(cls, value: object, read: ValidatorFunctionWrapHandler) -> object:
        try:
            return read(value)
        except ValidationError:
            raise ValueError(f"memory.checkpointing={value} must be true, false or auto") from None

    @model_validator(mode="after")
    def _auto_chooses_alone(self) -> Self:
        if self.checkpointing != AUTO:
            return self
        for name in ("checkpoint_double_blocks", "checkpoint_single_blocks"):
            if (count := getattr(self, name)) is not None:
                raise ValueError(
                    f"memory.{name}={count} does not go with memory.checkpointing=auto, which chooses it: use none, or "
                    "checkpointing=true"
                )
        if self.activation_offload is not ActivationOffload.NONE:
            raise ValueError(
                f"memory.activation_offload={self.activation_offload} does not go with memory.checkpointing=auto, "
                "which keeps on the device what fits there: use none, or checkpointing=true"
            )
        return self

    @model_validator(mode="after")
    def _every_streamed_block_is_checkpointed(self) -> Self:
        if self.offload is WeightOffload.NONE:
            for name in ("resident_blocks", "host_weights"):
                if (value := getattr(self, name)) is not None:
                    raise ValueError(f"memory.{name}={value} has no effect with memory.offload=none: use blocks")
            return self
        reason = "since the weights of each block come again when it is computed again"
        if not self.checkpointing:
            raise ValueError(f"memory.offload=blocks needs memory.checkpointing=true, {reason}")
        for name in ("checkpoint_double_blocks", "checkpoint_single_blocks"):
            if getattr(self, name) is not None:
                raise ValueError(f"memory.offload=blocks needs memory.{name}=none, {reason}")
        return self

    @model_validator(mode="after")
    def _everything_has_an_effect(self) -> Self:
        offload = self.activation_offload
        if not self.checkpointing:
            for name in ("checkpoint_double_blocks", "checkpoint_single_blocks"):
                if (count := getattr(self, name)) is not None:
                    raise ValueError(f"memory.{name}={count} has no effect without memory.checkpointing=true")
            if offload is not ActivationOffload.NONE:
                raise ValueError(f"memory.activation_offload={offload} has no effect without memory.checkpointing=true")
        if self.offload_above is not None and offload is not ActivationOffload.DYNAMIC:
            raise ValueError(
                f"memory.offload_above={self.offload_above} has no effect with memory.activation_offload={offload}: "
                "use dynamic"
            )
        if self.activation_buffer is not None and offload is ActivationOffload.NONE:
            raise ValueError(
                f"memory.activation_buffer={self.activation_buffer} has no effect with memory.activation_offload=none: "
                "use all or dynamic"
            )
        return self
