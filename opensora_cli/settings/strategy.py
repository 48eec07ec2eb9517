"""Settings of training on several devices: the strategy, and the degrees of parallelism."""

from collections.abc import Iterator
from enum import StrEnum
from math import prod
from typing import Self

from pydantic import Field

from opensora_cli.settings.devices import Copies, ExchangeSettings

INNER_DEGREES = ("ulysses_degree", "ring_degree", "tensor_parallel_degree")
"""Degrees of devices that share a sample."""


class Strategy(StrEnum):
    """Sharding of weights, gradients and optimizer states over devices (Rajbhandari et al. 2020, ZeRO).

    Each row has the name, the strategy in the terms of torch, and the three properties below.
    """

    means: str
    shards: bool
    """Whether devices hold shards of the weights between updates."""
    gathers_twice: bool
    """Whether the weights of a block are gathered for its forward and again for its backward."""
    reduces_once: bool
    """Whether gradients are reduced once an update instead of after each micro-batch."""

    DDP = "ddp", "DistributedDataParallel", False, False, True
    ZERO1 = "zero1", "FSDP2 without resharding after forward; gradients are reduced once an update", True, False, True
    ZERO2 = (
        "zero2",
        "FSDP2 without resharding after forward; gradients are reduced each micro-batch",
        True,
        False,
        False,
    )
    ZERO3 = "zero3", "FSDP2 with resharding after forward", True, True, False
    HYBRID = "hybrid", "FSDP2 with resharding after forward, around ranks that share a sample", True, True, False

    def __new__(cls, name: str, means: str, shards: bool, gathers_twice: bool, reduces_once: bool) -> Self:
        member = str.__new__(cls, name)
        member._value_ = name
        member.means, member.shards = means, shards
        member.gathers_twice, member.reduces_once = gathers_twice, reduces_once
        return member


class TrainParallelSettings(ExchangeSettings):
    """Devices of a training run. Degrees that are not set follow from the others."""

    degree_names = ("dp_replicate_degree", "dp_shard_degree", *INNER_DEGREES)

    dp_replicate_degree: Copies | None = Field(default=None, description="Copies of the weights.")
    dp_shard_degree: Copies | None = Field(default=None, description="Devices that share one copy of the weights.")

    def rules(self) -> Iterator[str]:
        yield from super().rules()
        if None not in (self.dp_replicate_degree, self.dp_shard_degree):
            product = prod(self.degrees.values())
            if product < self.world_size and not self.world_size % product:
                named = " x ".join(f"parallel.{name}={degree}" for name, degree in self.degrees.items())
                yield (
                    f"{named} use {product} of {self.world_size} devices: drop parallel.dp_replicate_degree or "
                    "parallel.dp_shard_degree"
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
