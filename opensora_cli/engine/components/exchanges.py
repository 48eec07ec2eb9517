"""How ranks exchange tokens for heads: what settings mean between the ranks of a mesh, and the bytes that are sent."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from pydantic import Field

from opensora_cli.core.documents import Document
from opensora_cli.core.exceptions import RequestError
from opensora_cli.parallel.all_to_all import ExchangePlan, WireFormat
from opensora_cli.parallel.collectives import Parts
from opensora_cli.parallel.mesh import MeshShape
from opensora_cli.parallel.shares import shares
from opensora_cli.settings.devices import ExchangeSettings, ParallelSettings
from opensora_cli.settings.enums import AllToAll, Compression


def plan_exchange(parallel: ExchangeSettings, mesh: MeshShape, *, num_heads: int, itemsize: int) -> ExchangePlan:
    """Return how the ranks of a mesh exchange tokens for heads.

    `itemsize` is that of what is exchanged, in bytes. Raises RequestError if something that was asked for has no effect
    between these ranks, or cannot be.
    """
    problems = parallel.exchange_problems(ulysses=mesh.ulysses, tensor=mesh.tensor)
    chunks = parallel.ulysses_chunks if isinstance(parallel, ParallelSettings) else 1
    most = num_heads // mesh.tensor // mesh.ulysses
    if mesh.ulysses > 1 and chunks > most:
        problems.append(
            f"parallel.ulysses_chunks={chunks} must be at most the heads of a device, parallel.ulysses_degree="
            f"{mesh.ulysses} of {num_heads // mesh.tensor}: use at most {most}"
        )
    if mesh.ulysses > 1 and parallel.compression is Compression.BF16 and itemsize <= 2:
        problems.append("parallel.compression=bf16 has no effect on what is computed in 16 bits: use fp8 or none")
    if problems:
        raise RequestError("\n".join(problems))
    return ExchangePlan(
        inner=parallel.inner_ranks(ulysses=mesh.ulysses, tensor=mesh.tensor),
        wire=_WIRES[parallel.compression],
        chunks=chunks,
    )


_WIRES: Mapping[Compression, WireFormat | None] = {
    Compression.NONE: None,
    Compression.BF16: "bf16",
    Compression.FP8: "fp8",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSizes:
    """What of a model and a sample decides how much its attention exchanges."""

    attentions: int
    num_heads: int
    head_dim: int
    video_tokens: int
    text_tokens: int
    itemsize: int
    """Bytes of an element of q, k and v."""

    def exchanged_bytes(self, plan: ExchangePlan, mesh: MeshShape) -> dict[str, int]:
        """Return what all ranks that share a forward put on the wire in the exchanges of `UlyssesAttention`.

        In sum, or in two stages, as `ExchangePlan.stage_bytes`. A backward sends as much again, in the same dtype.
        """
        ranks = mesh.ring * mesh.ulysses
        # As `SequenceParallel` cuts them.
        cut = zip(shares(self.video_tokens, ranks), shares(self.text_tokens, ranks)[::-1], strict=True)
        tokens = [sum(of_rank) for of_rank in cut]
        found: Counter[str] = Counter()
        for heads in shares(self.num_heads, mesh.tensor):
            for place in range(mesh.ring):
                lengths = tuple(tokens[place * mesh.ulysses : (place + 1) * mesh.ulysses])
                of_ranks = shares(heads, mesh.ulysses)
                there = Parts(3 * self.head_dim, lengths, of_ranks, self.head_dim)
                back = Parts(self.head_dim, of_ranks, lengths, self.head_dim)
                for parts in (there, back):
                    found.update(plan.stage_bytes(parts, self.itemsize))
        return {stage: self.attentions * nbytes for stage, nbytes in found.items()}


class PlannedExchange(Document):
    """How ranks exchange tokens for heads."""

    all_to_all: AllToAll
    compression: Compression
    inner_ranks: int
    """Ranks inside of which the first of two stages stays; 1: one stage."""
    chunks: int
    """Parts in which the heads are exchanged."""
    bytes_per_evaluation: Mapping[str, int]
    """What all ranks send for one evaluation of the model: `sent`, or of two stages `inside` and `between`."""
    how: str = Field(exclude=True)
    """As `describe_exchange`."""

    @classmethod
    def of(cls, parallel: ExchangeSettings, plan: ExchangePlan, mesh: MeshShape, sizes: AttentionSizes) -> Self:
        """Return that of a plan."""
        return cls(
            all_to_all=parallel.all_to_all,
            compression=parallel.compression,
            inner_ranks=plan.inner,
            chunks=plan.chunks,
            bytes_per_evaluation=sizes.exchanged_bytes(plan, mesh),
            how=describe_exchange(parallel, plan, mesh),
        )

    def line(self) -> str:
        """Return it for people."""
        stages = self.bytes_per_evaluation.items()
        sizes = (f"{size / 2**20:.2f} MiB{'' if stage == 'sent' else f' {stage}'}" for stage, size in stages)
        return f"{self.how}; all ranks send {' + '.join(sizes)} an evaluation"


def describe_exchange(parallel: ExchangeSettings, plan: ExchangePlan, mesh: MeshShape) -> str:
    """Return it for people."""
    words = [str(parallel.all_to_all)]
    if plan.inner > 1:
        words = [f"{parallel.all_to_all}, {mesh.ulysses // plan.inner} x {plan.inner} ranks"]
    if parallel.compression.largest_error:
        words.append(f"{parallel.compression} ({parallel.compression.largest_error})")
    if plan.chunks > 1:
        words.append(f"in {plan.chunks} chunks of heads")
    return ", ".join(words)
