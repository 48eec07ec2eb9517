"""Divide a model between ranks: the mesh, the exchange of tokens for heads, and the shares of weights."""

from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

import torch.distributed as dist

from opensora_cli.core.documents import Document
from opensora_cli.core.exceptions import RequestError
from opensora_cli.models.linears import ShardedLinear
from opensora_cli.models.mmdit.blocks import SEQUENCE_INPUTS, TEXT_SEQUENCE_INPUTS
from opensora_cli.models.mmdit.config import MMDiTConfig
from opensora_cli.models.text.encoders import T5Encoder
from opensora_cli.models.text.t5 import keep_heads, t5_linears
from opensora_cli.parallel.shares import ExchangePlan, MeshShape, Parts, SequenceLengths, WireFormat, shares, span
from opensora_cli.sampling.guidance import Branch, GuidanceScales, branches_needed, busiest
from opensora_cli.settings.devices import Compression, ExchangeSettings
from opensora_cli.settings.generate import GenerateSettings

if TYPE_CHECKING:
    from opensora_cli.models.mmdit.model import MMDiT
    from opensora_cli.parallel.collectives import Exchange
    from opensora_cli.parallel.mesh import ParallelMesh
    from opensora_cli.parallel.sequence import SequenceParallel

_EVEN = 1.05
"""Heads count as evenly divided if the busiest rank computes at most this many times the mean."""


def choose_mesh(settings: GenerateSettings, *, video_tokens: int) -> MeshShape:
    """Return the axes along which ranks share the transformer: the degrees in `settings`, and the best for the rest.

    By default ranks share the tokens of one sample: as many ranks of a machine as divide the heads evenly with Ulysses,
    which moves the fewest bytes but needs fast links, the rest in a ring. Raises RequestError for more ranks than
    tokens.
    """
    parallel = settings.parallel
    tensor, guidance = parallel.tensor_parallel_degree or 1, parallel.cfg_parallel_degree or 1
    ulysses, ring = parallel.ulysses_degree, parallel.ring_degree
    rest = parallel.world_size // prod(parallel.degrees.values())
    if ulysses is None and ring is None:
        # Tensor parallel ranks are adjacent: if they fill a machine, or straddle two, Ulysses has no room.
        on_machine, left_over = divmod(parallel.ranks_per_node, tensor)
        on_machine = 1 if left_over else on_machine
        ulysses = _ulysses_degree(rest, heads=settings.model.num_heads // tensor, on_machine=on_machine)
        ring = rest // ulysses
    elif ulysses is None:
        ulysses = rest
    elif ring is None:
        ring = rest
    elif rest > 1:
        # Both token axes are set, so the rest shares branches of guidance if that degree is not set.
        if parallel.cfg_parallel_degree is not None or rest > len(Branch):
            named = ", ".join(f"parallel.{name}={degree}" for name, degree in parallel.degrees.items())
            raise RequestError(
                f"{named} leave {rest} of {parallel.world_size} devices without work: leave one of them out"
            )
        guidance = rest
    shape = MeshShape(guidance=guidance, ring=ring or 1, ulysses=ulysses or 1, tensor=tensor)
    if shape.ring * shape.ulysses > video_tokens:
        raise RequestError(
            f"{shape.ring * shape.ulysses} devices cannot share {video_tokens} tokens: use at most {video_tokens}",
            hint="--gpus N sets how many",
        )
    return shape


def _ulysses_degree(ranks: int, *, heads: int, on_machine: int) -> int:
    return max(
        degree
        for degree in range(1, min(ranks, heads) + 1)
        if ranks % degree == 0 and on_machine % degree == 0 and -(-heads // degree) * degree <= _EVEN * heads
    )


def require_branches(mesh: MeshShape, scales: Sequence[GuidanceScales]) -> None:
    """Raise RequestError if ranks would never compute a branch of guidance; `scales` has an entry for each step."""
    branches = len(branches_needed(busiest(scales)))
    if mesh.guidance > branches:
        raise RequestError(
            f"parallel.cfg_parallel_degree={mesh.guidance} is over the branches of guidance that a step has here, "
            f"{branches}: use at most {branches}"
        )


def describe_mesh(shape: MeshShape) -> str:
    """Return the mesh as text."""
    shared = {
        "Ulysses": shape.ulysses,
        "ring attention": shape.ring,
        "branches of guidance": shape.guidance,
        "tensor parallelism": shape.tensor,
    }
    return " x ".join(f"{name} {degree}" for name, degree in shared.items() if degree > 1) or "nothing is shared"


_WIRES: Mapping[Compression, WireFormat] = {Compression.BF16: "bf16", Compression.FP8: "fp8"}


def plan_exchange(parallel: ExchangeSettings, mesh: MeshShape, *, itemsize: int) -> ExchangePlan:
    """Return how the ranks of a mesh exchange tokens for heads; `itemsize` is the bytes of an exchanged element.

    Raises RequestError if a setting has no effect between these ranks, or is impossible.
    """
    problems = parallel.exchange_problems(ulysses=mesh.ulysses, tensor=mesh.tensor)
    if mesh.ulysses > 1 and parallel.compression is Compression.BF16 and itemsize <= 2:
        problems.append("parallel.compression=bf16 has no effect on a run in 16 bits: use fp8 or none")
    if problems:
        raise RequestError("\n".join(problems))
    return ExchangePlan(
        inner=parallel.inner_ranks(ulysses=mesh.ulysses, tensor=mesh.tensor),
        wire=_WIRES.get(parallel.compression),
    )


def exchanged_bytes(
    plan: ExchangePlan, mesh: MeshShape, config: MMDiTConfig, *, video_tokens: int, text_tokens: int, itemsize: int
) -> dict[str, int]:
    """Return the bytes that all ranks send in the exchanges of one forward pass, by stage; backward sends the same."""
    ranks, head_dim = mesh.ring * mesh.ulysses, config.head_dim
    # `SequenceParallel` divides tokens in the same way.
    cut = zip(shares(video_tokens, ranks), shares(text_tokens, ranks)[::-1], strict=True)
    tokens = [sum(of_rank) for of_rank in cut]
    found: Counter[str] = Counter()
    for heads in shares(config.num_heads, mesh.tensor):
        for place in range(mesh.ring):
            lengths = tuple(tokens[place * mesh.ulysses : (place + 1) * mesh.ulysses])
            of_ranks = shares(heads, mesh.ulysses)
            there = Parts(3 * head_dim, lengths, of_ranks, head_dim)
            back = Parts(head_dim, of_ranks, lengths, head_dim)
            for parts in (there, back):
                found.update(plan.stage_bytes(parts, itemsize))
    attentions = config.depth + config.depth_single_blocks
    return {stage: attentions * nbytes for stage, nbytes in found.items()}


class PlannedExchange(Document):
    """Exchange of tokens for heads between ranks, with its bytes."""

    how: str
    """Method: stages and compression."""
    bytes_per_evaluation: Mapping[str, int]
    """Bytes that all ranks send for one evaluation of the model: `sent`, or with two stages `inside` and `between`."""

    def line(self) -> str:
        """Return the exchange as a line of text."""
        stages = self.bytes_per_evaluation.items()
        sizes = (f"{size / 2**20:.2f} MiB{'' if stage == 'sent' else f' {stage}'}" for stage, size in stages)
        return f"{self.how}; all ranks send {' + '.join(sizes)} an evaluation"


def describe_exchange(parallel: ExchangeSettings, plan: ExchangePlan, mesh: MeshShape) -> str:
    """Return the method of an exchange as text."""
    stages = f", {mesh.ulysses // plan.inner} x {plan.inner} ranks" if plan.inner > 1 else ""
    words = [f"{parallel.all_to_all}{stages}"]
    if parallel.compression is not Compression.NONE:
        words.append(parallel.compression)
    return ", ".join(words)


def share_tokens(transformer: "MMDiT", mesh: "ParallelMesh", exchange: "Exchange | None" = None) -> "SequenceParallel":
    """Return a function like the transformer that computes this rank's share of the tokens.

    The transformer gets attention between ranks. `exchange` is that of `open_exchange`.
    """
    from opensora_cli.parallel.sequence import SequenceParallel, sequence_attention

    lengths = SequenceLengths.of_mesh(mesh)
    transformer.set_attention(sequence_attention(transformer.attention, mesh, lengths, exchange=exchange))
    return SequenceParallel(
        transformer,
        mesh.group("ring", "ulysses"),
        lengths,
        sequence_inputs=SEQUENCE_INPUTS,
        text_sequence_inputs=TEXT_SEQUENCE_INPUTS,
    )


def shard_t5(t5: T5Encoder, group: dist.ProcessGroup) -> None:
    """Keep this rank's share of the layers of a T5; the token embeddings and the norms stay whole, as CLIP does."""
    from opensora_cli.parallel.tensor import shard_linears

    sizes = t5.model.sizes
    linears = t5_linears(sizes)
    heads = span(shares(sizes.num_heads, dist.get_world_size(group)), dist.get_rank(group))
    for layer in t5.blocks:
        shard_linears(layer, linears, group)
        keep_heads(layer, heads)


def largest_share(linear: ShardedLinear, ranks: int) -> float:
    """Return the largest part of the features of a sharded layer that one rank has, from 0 to 1."""
    largest = sum(
        shares(piece // unit, ranks)[0] * unit for piece, unit in zip(linear.pieces, linear.units, strict=True)
    )
    return largest / sum(linear.pieces)
