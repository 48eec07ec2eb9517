"""How training is made to fit into memory."""

from enum import StrEnum
from typing import Self

from pydantic import Field, NonNegativeInt, model_validator

from opensora_cli.settings.base import ByteSize, Section


class ActivationOffload(StrEnum):
    """Which inputs of checkpointed blocks wait in host memory between forward and backward."""

    NONE = "none"
    ALL = "all"
    DYNAMIC = "dynamic"
    """Those that come when more than a share of the device's memory is in use."""


class TrainMemorySettings(Section):
    """How training is made to fit into the memory of its device. Nothing here changes what is learnt."""

    checkpointing: bool = Field(
        default=False, description="compute blocks again in backward, instead of keeping what they computed"
    )
    checkpoint_double_blocks: NonNegativeInt | None = Field(
        default=None, description="how many double-stream blocks, from the first; none: all"
    )
    checkpoint_single_blocks: NonNegativeInt | None = Field(
        default=None, description="how many single-stream blocks, from the first; none: all"
    )
    activation_offload: ActivationOffload = Field(
        default=ActivationOffload.NONE,
        description="which inputs of these blocks wait in host memory, of use beside a GPU: all, or with dynamic those "
        "that come when its memory is nearly full",
    )
    offload_above: float | None = Field(
        default=None, ge=0, le=1, description="with dynamic: share of the memory from which on; none: 0.8"
    )
    activation_buffer: ByteSize | None = Field(
        default=None, description="size of the buffer that they wait in, as in 8GiB; none: what a step needs"
    )

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
