"""Settings of training on several devices: which share the batch, and what each of them holds of the model."""

from enum import StrEnum
from math import prod
from typing import Self

from pydantic import Field, PositiveInt, model_validator

from opensora_cli.settings.devices import MAX_DEGREE, MAX_RANKS, ExchangeSettings
from opensora_cli.settings.enums import Compression

_INNER = ("ulysses_degree", "ring_degree", "tensor_parallel_degree")
"""Degrees of ranks that share one sample."""


class Strategy(StrEnum):
    """What each device holds of the weights, of their gradients, and of what the optimizer keeps for them."""

    DDP = "ddp"
    """All of it (DistributedDataParallel)."""
    ZERO1 = "zero1"
    """Its share of the optimizer's states (Rajbhandari et al. 2020, ZeRO); gradients are shared out once an update.

    FSDP2 without resharding after forward, as `zero2` is; weights are shares between two updates with both.
    """
    ZERO2 = "zero2"
    """Its share of gradients too: those of each micro-batch are shared out at once."""
    ZERO3 = "zero3"
    """Its share of the weights too: each block's are gathered for its forward, and again for its backward."""
    HYBRID = "hybrid"
    """As `zero3`, and several devices work on one sample: they share its tokens, or the heads and features."""

    @property
    def shards(self) -> bool:
        """Whether devices hold shares."""
        return self is not Strategy.DDP

    @property
    def means(self) -> str:
        """What it is in torch, for people."""
        return _MEANS[self]


_MEANS = {
    Strategy.DDP: "DistributedDataParallel",
    Strategy.ZERO1: "FSDP2 without resharding after forward, as zero2; gradients are shared out once an update",
    Strategy.ZERO2: "FSDP2 without resharding after forward, as zero1; gradients are shared out each micro-batch",
    Strategy.ZERO3: "FSDP2 with resharding after forward",
    Strategy.HYBRID: "FSDP2 with resharding after forward, around ranks that share a sample",
}


class TrainParallelSettings(ExchangeSettings):
    """The devices of a run, and how many of them share what. Degrees that are not set follow from the rest."""

    degree_names = ("dp_replicate_degree", "dp_shard_degree", *_INNER)

    dp_replicate_degree: PositiveInt | None = Field(
        default=None, le=MAX_RANKS, description="copies of the weights, between which gradients are averaged"
    )
    dp_shard_degree: PositiveInt | None = Field(
        default=None, le=MAX_RANKS, description="devices with batches of their own between which one copy is divided"
    )
    ulysses_degree: PositiveInt | None = Field(
        default=None, le=MAX_DEGREE, description="with hybrid: devices that exchange the tokens of a sample for heads"
    )
    ring_degree: PositiveInt | None = Field(
        default=None,
        le=MAX_DEGREE,
        description="with hybrid: devices round which the keys and values of a sample are passed",
    )
    tensor_parallel_degree: PositiveInt | None = Field(
        default=None, le=MAX_DEGREE, description="with hybrid: devices that share heads and features of each block"
    )

    @model_validator(mode="after")
    def _all_devices_have_work(self) -> Self:
        if None not in (self.dp_replicate_degree, self.dp_shard_degree):
            product = prod(self.degrees.values())
            if product != self.world_size:
                raise ValueError(
                    f"{_named(self.degrees)} make use of {product} of {self.world_size} devices: "
                    "leave parallel.dp_replicate_degree or parallel.dp_shard_degree out"
                )
        return self

    def axes(self, strategy: Strategy) -> dict[str, int]:
        """Return how many ranks lie along each axis of the mesh: replicate, shard, ring, ulysses, tensor.

        The settings have to be without `strategy_problems`.
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
        """Return how many devices there are and how they share the work, for people."""
        along = " x ".join(f"{axis} {ranks}" for axis, ranks in self.axes(strategy).items() if ranks > 1)
        return f"{self.world_size}, {strategy} ({along}): {strategy.means}" if along else "1"

    def data_ranks(self, strategy: Strategy) -> int:
        """Return how many micro-batches are computed at a time."""
        axes = self.axes(strategy)
        return axes["replicate"] * axes["shard"]


def strategy_problems(
    strategy: Strategy,
    parallel: TrainParallelSettings,
    *,
    trains_transformer: bool,
    num_heads: int,
    micro_batches: int | None,
    compiles: bool,
    computes_in_fp32: bool,
    uses_muon: bool,
    uses_lora: bool,
    uses_fp8_linears: bool,
) -> list[str]:
    """Return contradictions between settings, each with its fix.

    `micro_batches` are those of an update, over all ranks; None: one for each data-parallel rank.
    """
    problems = [
        *_target_problems(strategy, compiles=compiles, trains_transformer=trains_transformer),
        *_degree_problems(strategy, parallel, num_heads=num_heads),
    ]
    if strategy.shards and uses_muon:
        problems.append(
            f"optimizer.name=muon needs whole matrices, not those of strategy={strategy}: use adamw, or ddp"
        )
    if strategy is Strategy.HYBRID and compiles:
        problems.append(
            "compile=true does not go with strategy=hybrid, whose blocks talk to others: use zero3, or false"
        )
    if parallel.tensor_parallel_degree not in (None, 1):
        named = f"parallel.tensor_parallel_degree={parallel.tensor_parallel_degree}"
        if uses_lora:
            problems.append(f"lora does not go with {named}: use parallel.ulysses_degree or ring_degree instead")
        if uses_fp8_linears:
            problems.append(f"precision.fp8_linears=true does not go with {named}: use one of them")
    problems += _exchange_problems(parallel, compiles=compiles, computes_in_fp32=computes_in_fp32)
    if not problems and micro_batches is not None and micro_batches % parallel.data_ranks(strategy):
        ranks = parallel.data_ranks(strategy)
        above = -(-micro_batches // ranks) * ranks
        problems.append(
            f"loop.micro_batches={micro_batches} must be a multiple of the {ranks} data-parallel ranks: use {above}"
        )
    return problems


def _exchange_problems(parallel: TrainParallelSettings, *, compiles: bool, computes_in_fp32: bool) -> list[str]:
    problems = []
    # On one device, torchrun may have started others: the plan of a run checks that.
    if parallel.world_size > 1:
        problems += parallel.exchange_problems(
            ulysses=parallel.ulysses_degree or 1, tensor=parallel.tensor_parallel_degree or 1
        )
    if parallel.compression is Compression.FP8:
        problems.append(
            "parallel.compression=fp8 would round gradients by up to 1/16, which is for generation: use bf16 or none"
        )
    if parallel.compression is Compression.BF16 and not computes_in_fp32:
        problems.append(
            "parallel.compression=bf16 has no effect on what is computed in 16 bits: use none, or "
            "precision.compute=fp32"
        )
    if parallel.watch and compiles:
        problems.append("parallel.watch=true does not go with compile=true, which would compile nothing: use one")
    return problems


def _target_problems(strategy: Strategy, *, compiles: bool, trains_transformer: bool) -> list[str]:
    if trains_transformer:
        return []
    problems = []
    if strategy.shards:
        problems.append(f"strategy={strategy} divides the blocks of the transformer: with other targets use ddp")
    if compiles:
        problems.append("compile=true is for the blocks of the transformer: with other targets use false")
    return problems


def _degree_problems(strategy: Strategy, parallel: TrainParallelSettings, *, num_heads: int) -> list[str]:
    set_degrees = {name: degree for name, degree in parallel.degrees.items() if degree > 1}
    inner = {name: degree for name, degree in set_degrees.items() if name in _INNER}
    problems = []
    if strategy is not Strategy.HYBRID and inner:
        problems.append(f"{_named(inner)} has no effect with strategy={strategy}: use hybrid")
    if strategy is Strategy.HYBRID and not inner:
        problems.append(
            "strategy=hybrid needs parallel.tensor_parallel_degree, ulysses_degree or ring_degree over 1: "
            "set one, or use zero3"
        )
    if strategy is Strategy.DDP and "dp_shard_degree" in set_degrees:
        problems.append(
            f"parallel.dp_shard_degree={parallel.dp_shard_degree} has no effect with strategy=ddp: use zero1 to zero3"
        )
    if strategy is Strategy.DDP and parallel.dp_replicate_degree not in (None, parallel.world_size):
        problems.append(
            f"parallel.dp_replicate_degree={parallel.dp_replicate_degree} must be the number of devices with "
            f"strategy=ddp: leave it out, or use {parallel.world_size}"
        )
    tensor = parallel.tensor_parallel_degree or 1
    if tensor > num_heads:
        problems.append(f"parallel.tensor_parallel_degree={tensor} must be at most model.num_heads={num_heads}")
    elif (parallel.ulysses_degree or 1) > num_heads // tensor:
        problems.append(
            f"parallel.ulysses_degree={parallel.ulysses_degree} must be at most the heads of a rank: "
            f"use {num_heads // tensor}, or parallel.ring_degree"
        )
    return problems


def _named(degrees: dict[str, int]) -> str:
    return " x ".join(f"parallel.{name}={degree}" for name, degree in degrees.items())
