"""Settings of training on several devices: the strategy, and the degrees of parallelism."""

from collections.abc import Iterator
from enum import StrEnum
from math import prod

from pydantic import Field

from opensora_cli.settings.devices import Copies, Degree, ExchangeSettings

INNER_DEGREES = ("ulysses_degree", "ring_degree", "tensor_parallel_degree")
"""Degrees of devices that share a sample."""


class Strategy(StrEnum):
    """Sharding of weights, gradients and optimizer states over devices."""

    DDP = "ddp"
    """No sharding (DistributedDataParallel)."""
    ZERO1 = "zero1"
    """Sharded optimizer states (Rajbhandari et al. 2020, ZeRO). Gradients are reduced once an update.

    It is FSDP2 without resharding after forward, as `zero2` is. Both shard the weights between updates.
    """
    ZERO2 = "zero2"
    """Sharded gradients too. The gradients of each micro-batch are reduced at once."""
    ZERO3 = "zero3"
    """Sharded weights too. The weights of a block are gathered for its forward and again for its backward."""
    HYBRID = "hybrid"
    """`zero3`, with several devices for each sample. They share its tokens, or heads and features."""

    @property
    def shards(self) -> bool:
        """Whether devices hold shards."""
        return self is not Strategy.DDP

    @property
    def means(self) -> str:
        """The strategy in the terms of torch."""
        return _MEANS[self]


_MEANS = {
    Strategy.DDP: "DistributedDataParallel",
    Strategy.ZERO1: "FSDP2 without resharding after forward, as zero2; gradients are reduced once an update",
    Strategy.ZERO2: "FSDP2 without resharding after forward, as zero1; gradients are reduced each micro-batch",
    Strategy.ZERO3: "FSDP2 with resharding after forward",
    Strategy.HYBRID: "FSDP2 with resharding after forward, around ranks that share a sample",
}


class TrainParallelSettings(ExchangeSettings):
    """Devices of a training run. Degrees that are not set follow from the others."""

    degree_names = ("dp_replicate_degree", "dp_shard_degree", *INNER_DEGREES)

    dp_replicate_degree: Copies | None = Field(
        default=None, description="Copies of the weights, between which gradients are averaged."
    )
    dp_shard_degree: Copies | None = Field(
        default=None, description="Data-parallel devices between which one copy of the weights is sharded."
    )
    ulysses_degree: Degree | None = Field(
        default=None, description="Devices that exchange the tokens of a sample for heads, with hybrid."
    )
    ring_degree: Degree | None = Field(default=None, description="Devices in the ring of a sample, with hybrid.")
    tensor_parallel_degree: Degree | None = Field(
        default=None, description="Devices that share the heads and features of each block, with hybrid."
    )

    def rules(self) -> Iterator[str]:
        """Yield one line for each broken rule between these settings."""
        yield from super().rules()
        if None not in (self.dp_replicate_degree, self.dp_shard_degree):
            product = prod(self.degrees.values())
            if product < self.world_size and not self.world_size % product:
                named = " x ".join(f"parallel.{name}={degree}" for name, degree in self.degrees.items())
                yield (
                    f"{named} make use of {product} of {self.world_size} devices: "
                    "leave parallel.dp_replicate_degree or parallel.dp_shard_degree out"
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
        return f"{self.world_size}, {strategy} ({along}): {strategy.means}" if along else "1"

    def data_ranks(self, strategy: Strategy) -> int:
        """Return the number of micro-batches that are computed at a time."""
        axes = self.axes(strategy)
        return axes["replicate"] * axes["shard"]
