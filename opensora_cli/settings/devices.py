"""Settings of devices: their number, their memory, and the work that each of them does."""

from collections.abc import Iterator
from enum import StrEnum
from math import prod
from typing import Annotated, ClassVar

from pydantic import Field, PositiveInt

from opensora_cli.core import device_names
from opensora_cli.core.section import ByteSize, Section, matching
from opensora_cli.models.registry import ARCHITECTURES, AUTO, ModelChoice

Degree = Annotated[int, Field(ge=1, le=65_536)]
"""Number of devices that share one video or sample."""
Copies = Annotated[int, Field(ge=1, le=1024 * 65_536)]
"""Number of groups of devices. The limit is that of devices per machine times that of machines."""
Blocks = Annotated[int, Field(ge=1, le=10_000)]
Threads = Annotated[int, Field(ge=1, le=1024)]
_Device = Annotated[int, Field(ge=0, le=1023)]

INNER_DEGREES = ("ulysses_degree", "ring_degree", "tensor_parallel_degree")
"""Degrees of devices that share a sample."""

DeviceName = Annotated[str, matching(device_names.PATTERN, device_names.RULE)]
DeviceKind = Annotated[str, matching(device_names.KIND_PATTERN, device_names.KIND_RULE)]
"""Type of the devices of all ranks."""

DType = StrEnum("DType", ["AUTO", "FLOAT32", "BFLOAT16", "FLOAT16"])
"""Floating point type of models. `auto` means bfloat16 on GPUs and float32 on a CPU."""

AttentionChoice = StrEnum(
    "AttentionChoice", ["AUTO", "SDPA", "CUDNN", "FLASH3", "FLASH4", "XFORMERS", "MATH", "BF16_PRODUCTS"]
)
"""Attention backend of the transformer (see `core.attention`). `auto` means the first one that works."""

OffloadMode = StrEnum("OffloadMode", ["AUTO", "NONE", "MODEL", "BLOCKS"])
"""Weights that wait in host memory until they are needed. `auto` means the fastest mode that fits in memory."""

AllToAll = StrEnum("AllToAll", ["DIRECT", "HIERARCHICAL"])
"""All-to-all algorithm of Ulysses attention: between all ranks, or inside machines and then between them."""


class HostWeights(StrEnum):
    """Location of offloaded blocks: a page-locked copy, or the mapped file, which is as fast as the disk."""

    PINNED = "pinned"
    MAPPED = "mapped"


class Compression(StrEnum):
    """Rounding of elements in the exchanges of Ulysses attention.

    The error of bf16 is at most 1/256 of an element. That of fp8 is at most 1/16 of an element, or 2^-18 of the largest
    element of its token and head.
    """

    NONE = "none"
    BF16 = "bf16"
    FP8 = "fp8"


class DeviceSettings(Section):
    """Devices that take part. Subclasses add degrees: how many devices share which work."""

    degree_names: ClassVar[tuple[str, ...]] = ()
    """Settings whose product must divide the number of devices."""

    gpus: PositiveInt | None = Field(None, le=1024, description="GPUs that share the work. None: 1, or devices.")
    devices: tuple[_Device, ...] | None = Field(
        None, min_length=1, max_length=1024, description="GPUs to use, as in 0,2. None: the first ones."
    )
    nnodes: PositiveInt = Field(1, le=65_536, description="Number of machines. torchrun and srun set it.")

    @property
    def ranks_per_node(self) -> int:
        """Number of processes on this machine, one for each device."""
        return self.gpus or len(self.devices or (0,))

    @property
    def world_size(self) -> int:
        """Number of processes on all machines."""
        return self.nnodes * self.ranks_per_node

    @property
    def degrees(self) -> dict[str, int]:
        """Degrees that are set."""
        return {name: degree for name in self.degree_names if (degree := getattr(self, name)) is not None}

    @property
    def named_degrees(self) -> str:
        """Degrees that are set as text."""
        return " x ".join(f"parallel.{name}={degree}" for name, degree in self.degrees.items())

    def rules(self) -> Iterator[str]:
        if self.devices is not None and len(set(self.devices)) < len(self.devices):
            yield f"parallel.devices={','.join(map(str, self.devices))} names a GPU twice"
        elif self.devices is not None and self.gpus not in (None, len(self.devices)):
            count = len(self.devices)
            yield f"parallel.gpus={self.gpus} must be the number of parallel.devices, {count}: drop one of them"
        if self.world_size % prod(self.degrees.values()):
            yield f"{self.named_degrees} must divide the {self.world_size} devices: use degrees whose product does"


class ExchangeSettings(DeviceSettings):
    """Devices that share a video or sample, and their exchange of tokens for heads."""

    ulysses_degree: Degree | None = Field(None, description="Devices that exchange tokens for heads.")
    ring_degree: Degree | None = Field(None, description="Devices in the ring of keys and values.")
    tensor_parallel_degree: Degree | None = Field(None, description="Devices that share each block's features.")
    all_to_all: AllToAll = Field(AllToAll.DIRECT, description="Exchange of tokens for heads in ulysses_degree.")
    fast_link_ranks: int | None = Field(
        None, ge=2, le=65_536, description="Neighbors with fast links. None: a machine."
    )
    compression: Compression = Field(
        Compression.NONE, description="Rounding of exchanged elements: bf16 by up to 1/256, fp8 by up to 1/16."
    )

    def exchange_problems(self, *, ulysses: int, tensor: int) -> list[str]:
        """Return one line for each setting that has no effect, or cannot work, with these ranks along the axes."""
        given = self.model_dump(include={"all_to_all", "compression"}, exclude_defaults=True)
        if ulysses == 1:
            return [
                f"parallel.{name}={value} has no effect, since no tokens are exchanged for heads: "
                "use parallel.ulysses_degree over 1, or drop it"
                for name, value in given.items()
            ]
        is_split = 1 < self.inner_ranks(ulysses=ulysses, tensor=tensor) < ulysses
        if self.all_to_all is AllToAll.DIRECT or is_split:
            return []
        return [
            f"parallel.all_to_all=hierarchical cannot divide parallel.ulysses_degree={ulysses} into equal parts of "
            f"{self.fast_link_ranks or self.ranks_per_node} devices: use direct, or another parallel.fast_link_ranks"
        ]

    def head_problems(self, num_heads: int) -> Iterator[str]:
        """Yield a line if more devices exchange heads than the model has for them."""
        heads = num_heads // (self.tensor_parallel_degree or 1)
        if self.ulysses_degree is not None and self.ulysses_degree > max(heads, 1):
            yield (
                f"parallel.ulysses_degree={self.ulysses_degree} must be at most the {heads} heads of a device: "
                "use parallel.ring_degree for more"
            )

    def inner_ranks(self, *, ulysses: int, tensor: int) -> int:
        """Return the number of ranks of a Ulysses group with fast links, or 1 if the exchange cannot be split.

        The `tensor` ranks that share heads and features are consecutive, and so are the ranks of a machine.
        """
        fast = self.fast_link_ranks or self.ranks_per_node
        if self.all_to_all is AllToAll.DIRECT or fast % tensor or ulysses % (fast // tensor):
            return 1
        return fast // tensor


class ParallelSettings(ExchangeSettings):
    """Devices that make videos. Degrees that are not set are chosen."""

    degree_names = tuple(
        f"{name}_degree" for name in ("data_parallel", "ulysses", "ring", "cfg_parallel", "tensor_parallel")
    )

    data_parallel_degree: Copies | None = Field(None, description="Groups that share the rows of --prompts. None: all.")
    cfg_parallel_degree: PositiveInt | None = Field(None, le=3, description="Devices that share CFG branches.")


class Strategy(StrEnum):
    """Sharding of weights, gradients and optimizer states over devices (Rajbhandari et al. 2020, ZeRO).

    All but ddp are FSDP2: zero3 and hybrid reshard after the forward, zero1 reduces gradients once an update.
    """

    DDP = "ddp"
    ZERO1 = "zero1"
    ZERO2 = "zero2"
    ZERO3 = "zero3"
    HYBRID = "hybrid"

    @property
    def shards(self) -> bool:
        """Whether devices hold shards of the weights between updates."""
        return self is not Strategy.DDP

    @property
    def gathers_twice(self) -> bool:
        """Whether the weights of a block are gathered for its forward and again for its backward."""
        return self in (Strategy.ZERO3, Strategy.HYBRID)

    @property
    def reduces_once(self) -> bool:
        """Whether gradients are reduced once an update instead of after each micro-batch."""
        return self in (Strategy.DDP, Strategy.ZERO1)


class TrainParallelSettings(ExchangeSettings):
    """Devices of a training run. Degrees that are not set follow from the others."""

    degree_names = ("dp_replicate_degree", "dp_shard_degree", *INNER_DEGREES)

    dp_replicate_degree: Copies | None = Field(None, description="Copies of the weights.")
    dp_shard_degree: Copies | None = Field(None, description="Devices that share one copy of the weights.")

    def rules(self) -> Iterator[str]:
        yield from super().rules()
        product = prod(self.degrees.values())
        is_complete = None not in (self.dp_replicate_degree, self.dp_shard_degree)
        if is_complete and product < self.world_size and not self.world_size % product:
            yield (
                f"{self.named_degrees} use {product} of {self.world_size} devices: drop parallel.dp_replicate_degree "
                "or parallel.dp_shard_degree"
            )

    def axes(self, strategy: Strategy) -> dict[str, int]:
        """Return the number of ranks along each axis of the mesh: replicate, shard, ring, ulysses, tensor.

        The settings must be valid for `strategy`.
        """
        inner = {
            "ring": self.ring_degree or 1,
            "ulysses": self.ulysses_degree or 1,
            "tensor": self.tensor_parallel_degree or 1,
        }
        data = self.world_size // prod(inner.values())
        if not strategy.shards:
            replicate = data
        elif self.dp_shard_degree is not None:
            replicate = data // self.dp_shard_degree
        else:
            replicate = self.dp_replicate_degree or 1
        return {"replicate": replicate, "shard": data // replicate, **inner}

    def describe(self, strategy: Strategy) -> str:
        """Return the number of devices and their axes as text."""
        along = " x ".join(f"{axis} {ranks}" for axis, ranks in self.axes(strategy).items() if ranks > 1)
        return f"{self.world_size}, {strategy} ({along})" if along else "1"

    def data_ranks(self, strategy: Strategy) -> int:
        """Return the number of micro-batches that are computed at a time."""
        axes = self.axes(strategy)
        return axes["replicate"] * axes["shard"]


class PlacementSettings(Section):
    """Weights, device and precision of any model."""

    weights: str | None = Field(None, description="Weights folder. None: OSORA_WEIGHTS, ./ckpts or Hugging Face cache.")
    device: DeviceName = Field("auto", description=device_names.HELP)
    dtype: DType = Field(DType.AUTO, description="auto means bfloat16 on GPUs and float32 on a CPU.")
    threads: Threads | None = Field(None, description="CPU threads. None: OMP_NUM_THREADS, or by work and cores.")


class RuntimeSettings(PlacementSettings):
    """Model, weights, device and precision of generation."""

    model_choice: ModelChoice = Field(
        AUTO, description=f"Model: auto (the best that can run here), {', '.join(ARCHITECTURES)}."
    )
    attention: AttentionChoice = Field(AttentionChoice.AUTO, description="Attention backend. auto: by device.")


class MemorySettings(Section):
    """Memory use of generation. Only `fp8_storage` changes the result beyond rounding."""

    offload: OffloadMode = Field(OffloadMode.AUTO, description="Weights on the host: auto, none, model or blocks.")
    resident_blocks: Blocks | None = Field(None, description="Offloaded blocks on the device. None: as many as fit.")
    limit: ByteSize | None = Field(None, description="Most GPU memory to use, as in 24GiB. None: free memory.")
    host_weights: HostWeights | None = Field(None, description="Location of offloaded blocks. None: by memory.")
    fp8_storage: bool = Field(False, description="Store block weights in 8 bits, which changes the result.")
