"""Estimated memory of each rank of a training run, from its real steps on fake tensors."""

from collections.abc import Sequence
from math import prod

import torch

from opensora_cli.core.documents import Document
from opensora_cli.core.exceptions import HardwareError
from opensora_cli.core.formatting import format_bytes
from opensora_cli.core.private_memory import read_private_memory
from opensora_cli.core.progress import Reporter, SilentReporter
from opensora_cli.engine.components.configs import mmdit_config
from opensora_cli.engine.components.hardware import OutOfMemoryError
from opensora_cli.engine.launch.rank import device_type
from opensora_cli.engine.train.activations import largest_batch_shape, layer_values
from opensora_cli.engine.train.build import count_parameters
from opensora_cli.engine.train.estimate import (
    ACTIVATIONS,
    AVERAGE,
    FROZEN,
    OPTIMIZER,
    WEIGHTS,
    TrainingMemory,
    estimate_training,
)
from opensora_cli.engine.train.fake_ranks import BUFFERS, GRADIENTS
from opensora_cli.engine.train.parallelize import feature_cuts, row_sizes
from opensora_cli.engine.train.ranks import mesh_shape
from opensora_cli.engine.train.transformer import empty_transformer
from opensora_cli.parallel.shares import shares
from opensora_cli.settings.train import TrainSettings

MIB = 2**20
_LAYERS = 1000
"""Number of layers that surely exceeds a step; the released transformer saves the values of 300 for backward."""
_COPIES = 8
"""Number of copies of the trained weights that surely exceeds gradients, buckets, averages and moments."""


class RankMemory(Document):
    """Memory of a rank in steps with the largest micro-batch: the peak of each kind at any time.

    `peak_bytes` is the peak of their sum, which is lower if the kinds have their peaks at different times.
    """

    rank: int
    weights_bytes: int
    gradients_bytes: int
    moments_bytes: int
    """State of the optimizer."""
    ema_bytes: int
    frozen_bytes: int
    """Frozen encoders."""
    activations_bytes: int
    """Activations saved for backward, and temporary results."""
    buffers_bytes: int
    """Gathered weights, gradients that are being reduced, and host buffers of offloaded activations."""
    peak_bytes: int
    """Peak on a CPU, where offloaded memory also counts."""
    device_peak_bytes: int
    """Peak on a GPU, without offloaded weights, averages, moments and activations."""

    @classmethod
    def of(cls, rank: int, memory: TrainingMemory) -> "RankMemory":
        """Return the document of an estimate or a measurement."""
        most = memory.most
        return cls(
            rank=rank,
            weights_bytes=most[WEIGHTS],
            gradients_bytes=most[GRADIENTS],
            moments_bytes=most[OPTIMIZER],
            ema_bytes=most[AVERAGE],
            frozen_bytes=most[FROZEN],
            activations_bytes=most[ACTIVATIONS],
            buffers_bytes=most[BUFFERS],
            peak_bytes=memory.peak_bytes,
            device_peak_bytes=memory.device_peak_bytes,
        )


def estimate_ranks(
    settings: TrainSettings, *, first: TrainingMemory | None = None, reporter: Reporter | None = None
) -> tuple[RankMemory, ...]:
    """Return the memory of every rank, in order; ranks with equal shares are estimated once.

    `first` is an earlier result of `estimate_training` for the first rank. Raises RequestError if sizes contradict each
    other, and RuntimeError in a process that is a rank itself.
    """
    alike = first_ranks(settings)
    kinds = sorted(set(alike))
    found = {} if first is None else {0: first}
    with (reporter or SilentReporter()).stage("estimate memory", total=len(kinds), unit="kinds of ranks") as progress:
        for rank in kinds:
            if rank not in found:
                found[rank] = estimate_training(settings, rank=rank)
            progress.advance()
    return tuple(RankMemory.of(rank, found[like]) for rank, like in enumerate(alike))


def refuse_lack_of_memory(settings: TrainSettings, *, rank: int, reporter: Reporter) -> None:
    """Raise OutOfMemoryError if this machine lacks the memory for a run on a CPU.

    The kernel kills a process that exceeds the memory without a message; on a GPU, a failed allocation is an error.
    Call this before a rank joins the others. Nothing is estimated if memory is plentiful. Raises RequestError if sizes
    contradict each other.
    """
    if device_type(settings.device_name) != "cpu":
        return
    free = read_private_memory().free_bytes // settings.parallel.ranks_per_node
    trained = count_parameters(settings)
    if free >= 4 * (_LAYERS * layer_values(settings) + _COPIES * trained):
        return
    try:
        with reporter.stage("estimate memory"), torch.random.fork_rng(devices=[]):
            memory = estimate_training(settings, rank=rank)
    except HardwareError as error:
        reporter.warn(error.message)
        return
    # Frozen weights may be mapped from their files.
    mapped = memory.at_peak[FROZEN] + (memory.at_peak[WEIGHTS] if settings.lora.is_on else 0)
    if (needed := memory.peak_bytes - mapped) > free:
        raise OutOfMemoryError(
            f"a step needs {format_bytes(needed)} of memory on each rank, and {format_bytes(free)} are free",
            hint="take smaller batches (data.buckets), or memory.checkpointing=full; --dry-run "
            "prints the memory of each rank",
        )


def first_ranks(settings: TrainSettings) -> list[int]:
    """Return for each rank the first rank with equal memory."""
    kinds: dict[object, int] = {}
    return [kinds.setdefault(kind, rank) for rank, kind in enumerate(_kinds_of_ranks(settings))]


def _kinds_of_ranks(settings: TrainSettings) -> list[object]:
    """Return a key for each rank that determines its memory: numbers of weights, tokens and heads."""
    shape = mesh_shape(settings.strategy, settings.parallel)
    if shape.size == 1 or not settings.strategy.shards:
        return [None] * shape.size
    cuts = feature_cuts(mmdit_config(settings.model), shape.tensor) if shape.tensor > 1 else {}
    weights = {name: tuple(weight.shape) for name, weight in empty_transformer(settings).named_parameters()}
    tokens = prod(largest_batch_shape(settings).token_grid(settings))
    row_ranks, sequence_ranks = shape.shard * shape.ring * shape.ulysses, shape.ring * shape.ulysses

    def kind(rank: int) -> object:
        place = shape.coordinates(rank)
        sequence_rank = place["ring"] * shape.ulysses + place["ulysses"]
        row_rank = place["shard"] * sequence_ranks + sequence_rank
        held = []
        for name, sizes in weights.items():
            own = list(sizes)
            if name in cuts:
                own[cuts[name].dim] = cuts[name].sizes[place["tensor"]]
            held.append(row_sizes(own[0], row_ranks)[row_rank] * prod(own[1:]))
        heads = shares(settings.model.num_heads, shape.tensor)[place["tensor"]]
        return (
            tuple(held),
            shares(tokens, sequence_ranks)[sequence_rank],
            shares(settings.text.t5_max_length, sequence_ranks)[::-1][sequence_rank],
            shares(heads, shape.ulysses)[place["ulysses"]],
            place["ring"] if shape.ring > 1 else 0,
        )

    return [kind(rank) for rank in range(shape.size)]


_COLUMNS = {
    "weights": "weights_bytes",
    "gradients": "gradients_bytes",
    "moments": "moments_bytes",
    "EMA": "ema_bytes",
    "frozen": "frozen_bytes",
    "activations": "activations_bytes",
    "buffers": "buffers_bytes",
    "peak": "peak_bytes",
}


def rank_lines(ranks: Sequence[RankMemory]) -> list[str]:
    """Return a table in MiB, with a line for consecutive ranks with equal memory."""
    columns = dict(_COLUMNS)
    if any(each.device_peak_bytes != each.peak_bytes for each in ranks):
        columns["on a GPU"] = "device_peak_bytes"
    found = [f"{'MiB a rank':12}" + "".join(f"{title:>13}" for title in columns)]
    first = 0
    for index, each in enumerate(ranks):
        is_last = index + 1 == len(ranks) or ranks[index + 1].model_copy(update={"rank": each.rank}) != each
        if is_last:
            name = f"rank {first}" if first == index else f"ranks {first}-{index}"
            sizes = (getattr(each, key) / MIB for key in columns.values())
            found.append(f"{name:12}" + "".join(f"{size:>13,.1f}" for size in sizes))
            first = index + 1
    return found
