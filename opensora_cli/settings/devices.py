"""Settings of what runs where: the devices, their memory, and how several of them share the work."""

import re
from collections.abc import Iterable, Mapping
from math import prod
from typing import ClassVar, Self

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
from opensora_cli.settings.enums import AttentionChoice, DType, HostWeights, ModelChoice, OffloadChoice

_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
_RETIRED_KEYS = ("node_rank", "rdzv_endpoint")


class DeviceSettings(Section):
    """Which devices take part; subclasses add how many of them share what."""

    degree_names: ClassVar[tuple[str, ...]] = ()
    """The settings whose product has to divide the number of devices."""

    gpus: PositiveInt | None = Field(
        default=None, description="devices of this machine, or processes on a CPU; none: 1, or devices"
    )
    devices: tuple[NonNegativeInt, ...] | None = Field(
        default=None, min_length=1, description="numbers of the GPUs, as in 0,2; none: the first ones"
    )
    nnodes: PositiveInt = Field(default=1, description="machines, each with as many devices; set by torchrun and srun")

    @property
    def ranks_per_node(self) -> int:
        """Processes on this machine, one for each device."""
        return self.gpus or len(self.devices or (0,))

    @property
    def world_size(self) -> int:
        """Processes on all machines."""
        return self.nnodes * self.ranks_per_node

    @property
    def degrees(self) -> dict[str, int]:
        """The degrees that are set."""
        return {name: degree for name in self.degree_names if (degree := getattr(self, name)) is not None}

    @field_validator("devices", mode="wrap")
    @classmethod
    def _devices_are_numbers(cls, value: object, read: ValidatorFunctionWrapHandler) -> object:
        try:
            return read(value)
        except ValidationError:
            # A wrong number alone would be named as if it were all.
            named = value if isinstance(value, str) or not isinstance(value, Iterable) else ",".join(map(str, value))
            raise ValueError(f"parallel.devices={named} must be numbers of GPUs, as in 0,2") from None

    @model_validator(mode="after")
    def _rules_hold(self) -> Self:
        problems = [*self._device_problems(), *self._degree_problems()]
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def _device_problems(self) -> list[str]:
        if self.devices is None:
            return []
        if len(set(self.devices)) < len(self.devices):
            return [f"parallel.devices={','.join(map(str, self.devices))} names a GPU twice"]
        if self.gpus not in (None, len(self.devices)):
            count = len(self.devices)
            return [f"parallel.gpus={self.gpus} must be the number of parallel.devices, {count}: drop one of them"]
        return []

    def _degree_problems(self) -> list[str]:
        product = prod(self.degrees.values())
        if self.world_size % product:
            named = " x ".join(f"parallel.{name}={degree}" for name, degree in self.degrees.items())
            return [f"{named} must divide the {self.world_size} devices: use degrees whose product does"]
        return []


class ParallelSettings(DeviceSettings):
    """Which devices make one video, and how many of them share what. Degrees that are not set are chosen."""

    degree_names = ("ulysses_degree", "ring_degree", "cfg_parallel_degree", "tensor_parallel_degree")

    ulysses_degree: PositiveInt | None = Field(default=None, description="devices that exchange tokens for heads")
    ring_degree: PositiveInt | None = Field(default=None, description="devices round which keys and values are passed")
    cfg_parallel_degree: PositiveInt | None = Field(
        default=None, le=3, description="devices that share the branches of guidance"
    )
    tensor_parallel_degree: PositiveInt | None = Field(
        default=None, description="devices that share heads and features of each block, and so its weights"
    )


def without_retired_keys(saved: Mapping[str, object]) -> Mapping[str, object]:
    """Return settings that an earlier version saved, without the keys that were dropped since."""
    parallel = saved.get("parallel")
    if not isinstance(parallel, Mapping):
        return saved
    return {**saved, "parallel": {key: value for key, value in parallel.items() if key not in _RETIRED_KEYS}}


class PlacementSettings(Section):
    """What runs where, of any model."""

    weights: str | None = Field(default=None, description="folder with the weights; none: ./ckpts or the Hub's cache")
    device: str = Field(default="auto", description="auto, cpu, cuda or cuda:N")
    dtype: DType = Field(default=DType.AUTO, description="auto: bfloat16 on CUDA, float32 on a CPU")
    threads: PositiveInt | None = Field(
        default=None, le=1024, description="threads that compute on the CPU; none: chosen by work, cores and load"
    )

    @field_validator("device")
    @classmethod
    def _device_exists(cls, value: str) -> str:
        if not _DEVICE.fullmatch(value):
            raise ValueError(f"runtime.device={value} must be auto, cpu, cuda or cuda:N, as in cuda:1")
        return value


class RuntimeSettings(PlacementSettings):
    """What runs where."""

    model_choice: ModelChoice = Field(
        default=ModelChoice.AUTO, description="auto: the best model that this machine can run"
    )
    attention: AttentionChoice = Field(
        default=AttentionChoice.AUTO,
        description="how the transformer computes attention; auto: the fastest way that works on the device",
    )


class MemorySettings(Section):
    """How a run is made to fit into the memory of its device. Only `fp8_storage` changes the result beyond rounding."""

    offload: OffloadChoice = Field(default=OffloadChoice.AUTO, description="auto: the least that fits")
    resident_blocks: PositiveInt | None = Field(
        default=None,
        description="transformer blocks on the device at a time, those in transit included; none: as many as fit",
    )
    limit: ByteSize | None = Field(
        default=None, description="most memory of the device to plan for, as in 24GiB; none: what is free"
    )
    host_weights: HostWeights | None = Field(
        default=None,
        description="where the other blocks wait; none: pinned where a GPU's machine has the memory, else mapped",
    )
    fp8_storage: bool = Field(
        default=False, description="keep the blocks' weights in 8 bits, which halves them and changes the result"
    )

    @model_validator(mode="after")
    def _blocks_are_offloaded(self) -> Self:
        for name, value in (("resident_blocks", self.resident_blocks), ("host_weights", self.host_weights)):
            if value is not None and self.offload in (OffloadChoice.NONE, OffloadChoice.MODEL):
                raise ValueError(f"memory.{name}={value} has no effect with memory.offload={self.offload}: use blocks")
        return self
