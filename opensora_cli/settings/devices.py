"""Settings of what runs where: the devices, their memory, and how several of them share the work."""

import re
from collections.abc import Iterable, Mapping
from math import prod
from typing import Annotated, ClassVar, Self

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
from opensora_cli.settings.enums import (
    AllToAll,
    AttentionChoice,
    Compression,
    DType,
    HostWeights,
    ModelName,
    OffloadMode,
)

_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
MAX_DEGREE = 65_536
"""Devices that share one video or sample."""
MAX_RANKS = 1024 * 65_536
"""Devices in all: the most of a machine, times the most machines."""

_Device = Annotated[NonNegativeInt, Field(le=1023)]
_RETIRED_KEYS = {"parallel": ("node_rank", "rdzv_endpoint"), "sampling": ("batch_size",)}


class DeviceSettings(Section):
    """Which devices take part; subclasses add how many of them share what."""

    degree_names: ClassVar[tuple[str, ...]] = ()
    """The settings whose product has to divide the number of devices."""

    gpus: PositiveInt | None = Field(
        default=None, le=1024, description="devices of this machine, or processes on a CPU; none: 1, or devices"
    )
    devices: tuple[_Device, ...] | None = Field(
        default=None, min_length=1, max_length=1024, description="numbers of the GPUs, as in 0,2; none: the first ones"
    )
    nnodes: PositiveInt = Field(
        default=1, le=65_536, description="machines, each with as many devices; set by torchrun and srun"
    )

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


class ExchangeSettings(DeviceSettings):
    """How the devices that share tokens exchange them for heads, and whether collectives are watched."""

    all_to_all: AllToAll = Field(
        default=AllToAll.DIRECT, description="how the devices of ulysses_degree exchange tokens for heads"
    )
    fast_link_ranks: int | None = Field(
        default=None,
        ge=2,
        le=MAX_DEGREE,
        description="with all_to_all=hierarchical: devices in a row that fast links join; none: those of a machine",
    )
    compression: Compression = Field(
        default=Compression.NONE,
        description="round what is exchanged: bf16 by at most 1/256 of an element, fp8 by at most 1/16",
    )
    watch: bool = Field(
        default=False, description="before each collective, check that all ranks come to it, and name those that do not"
    )
    watch_limit_s: float = Field(
        default=45.0, gt=0, le=86_400, description="with watch: seconds that a rank may come later than the others"
    )

    def exchange_problems(self, *, ulysses: int, tensor: int) -> list[str]:
        """Return what has no effect on these devices, or cannot be: one line each, with its fix.

        `ulysses` and `tensor` are the ranks along these axes.
        """
        problems = []
        if self.watch and self.world_size == 1:
            problems.append("parallel.watch=true has no effect on one device: use --gpus N, or leave it out")
        if ulysses == 1:
            problems += [
                f"parallel.{name}={getattr(self, name)} has no effect, since no tokens are exchanged for heads: "
                "use parallel.ulysses_degree over 1, or leave it out"
                for name in self._changed("all_to_all", "compression")
            ]
        elif self.all_to_all is AllToAll.HIERARCHICAL:
            problems += self._hierarchy_problems(ulysses=ulysses, tensor=tensor)
        return problems

    def inner_ranks(self, *, ulysses: int, tensor: int) -> int:
        """Return how many ranks of a Ulysses group fast links join; 1: the exchange is direct, or cannot be divided.

        Ranks that share heads and features, `tensor` of them, follow one another, and so do those of a machine.
        """
        fast = self.fast_link_ranks or self.ranks_per_node
        if self.all_to_all is AllToAll.DIRECT or fast % tensor or ulysses % (fast // tensor):
            return 1
        return fast // tensor

    def _hierarchy_problems(self, *, ulysses: int, tensor: int) -> list[str]:
        inner = self.inner_ranks(ulysses=ulysses, tensor=tensor)
        fast = self.fast_link_ranks or self.ranks_per_node
        if 1 < inner < ulysses:
            return []
        machines = f"{self.nnodes} machine{'s' if self.nnodes > 1 else ''} of {fast} devices"
        what = f"parallel.fast_link_ranks={fast}" if self.fast_link_ranks else machines
        shared = f"parallel.ulysses_degree={ulysses}" + (f" x tensor_parallel_degree={tensor}" if tensor > 1 else "")
        halves = [str(each * tensor) for each in range(2, ulysses // 2 + 1) if ulysses % each == 0]
        fix = f"use direct, or parallel.fast_link_ranks={' or '.join(halves)}" if halves else "use direct"
        return [
            f"parallel.all_to_all=hierarchical needs {shared} in equal parts of several ranks, which "
            f"{what} {'do' if self.nnodes > 1 else 'does'} not give: {fix}"
        ]

    def _changed(self, *names: str) -> list[str]:
        return [name for name in names if getattr(self, name) != type(self).model_fields[name].default]

    @model_validator(mode="after")
    def _exchange_rules_hold(self) -> Self:
        problems = []
        if self.fast_link_ranks is not None and self.all_to_all is AllToAll.DIRECT:
            problems.append(
                f"parallel.fast_link_ranks={self.fast_link_ranks} has no effect with parallel.all_to_all=direct: "
                "use hierarchical"
            )
        if self._changed("watch_limit_s") and not self.watch:
            problems.append(f"parallel.watch_limit_s={self.watch_limit_s:g} has no effect without parallel.watch=true")
        if problems:
            raise ValueError("\n".join(problems))
        return self


class ParallelSettings(ExchangeSettings):
    """Which devices make one video, and how many of them share what. Degrees that are not set are chosen."""

    degree_names = (
        "data_parallel_degree",
        "ulysses_degree",
        "ring_degree",
        "cfg_parallel_degree",
        "tensor_parallel_degree",
    )

    data_parallel_degree: PositiveInt | None = Field(
        default=None,
        le=MAX_RANKS,
        description="devices that each make rows of --prompts of their own; none: all of them",
    )
    ulysses_degree: PositiveInt | None = Field(
        default=None, le=MAX_DEGREE, description="devices that exchange tokens for heads"
    )
    ring_degree: PositiveInt | None = Field(
        default=None, le=MAX_DEGREE, description="devices round which keys and values are passed"
    )
    cfg_parallel_degree: PositiveInt | None = Field(
        default=None, le=3, description="devices that share the branches of guidance"
    )
    tensor_parallel_degree: PositiveInt | None = Field(
        default=None,
        le=MAX_DEGREE,
        description="devices that share heads and features of each block, and so its weights",
    )
    ulysses_chunks: PositiveInt = Field(
        default=1,
        le=MAX_DEGREE,
        description="exchange the heads of a device in so many parts, each while attention of the one before is "
        "computed; 1: all at once, and nothing meanwhile",
    )

    def exchange_problems(self, *, ulysses: int, tensor: int) -> list[str]:
        """Return what has no effect on these devices, or cannot be."""
        problems = super().exchange_problems(ulysses=ulysses, tensor=tensor)
        if self.ulysses_chunks > 1:
            named = f"parallel.ulysses_chunks={self.ulysses_chunks}"
            if ulysses == 1:
                problems.append(f"{named} has no effect, since no tokens are exchanged for heads: leave it out")
            elif self.all_to_all is AllToAll.HIERARCHICAL:
                problems.append(f"{named} does not go with parallel.all_to_all=hierarchical: use one of them")
        return problems


def without_retired_keys(saved: Mapping[str, object]) -> Mapping[str, object]:
    """Return settings that an earlier version saved, without the keys that this version no longer has."""
    kept = dict(saved)
    for section, retired in _RETIRED_KEYS.items():
        values = saved.get(section)
        if isinstance(values, Mapping):
            kept[section] = {key: value for key, value in values.items() if key not in retired}
    return kept


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

    model_choice: ModelName = Field(
        default=ModelName.AUTO, description="auto: the best model that this machine can run"
    )
    attention: AttentionChoice = Field(
        default=AttentionChoice.AUTO,
        description="attention backend of the transformer; auto: the first of a fixed order that works on the device",
    )
    prompt_cache: bool = Field(
        default=True, description="keep embeddings of prompts in the user's cache folder, and read them from there"
    )
    prompt_cache_limit: ByteSize = Field(
        default=2 * 2**30,
        description="most that they take there, of which those used last stay; 2GiB hold about 500 prompts of the "
        "released model in bfloat16, 250 in float32",
    )


class MemorySettings(Section):
    """How a run is made to fit into the memory of its device. Only `fp8_storage` changes the result beyond rounding."""

    offload: OffloadMode = Field(default=OffloadMode.AUTO, description="auto: the least that fits")
    resident_blocks: PositiveInt | None = Field(
        default=None,
        le=10_000,
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
            if value is not None and self.offload in (OffloadMode.NONE, OffloadMode.MODEL):
                raise ValueError(f"memory.{name}={value} has no effect with memory.offload={self.offload}: use blocks")
        return self
