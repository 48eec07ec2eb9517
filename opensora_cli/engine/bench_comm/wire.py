"""How much each way to share a denoising step sends, as formulas. Pure: sizes in, bytes out.

Bytes are those of all ranks together, counted as `counting` does. A step evaluates the model once for each branch of
guidance.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import product

from opensora_cli.models.mmdit import MMDiTConfig
from opensora_cli.parallel.mesh import MeshShape
from opensora_cli.parallel.shares import shares


class Scheme(StrEnum):
    """A reason to send."""

    ULYSSES = "ulysses"
    """Tokens for heads, before and after each attention (Jacobs et al. 2023)."""
    RING = "ring"
    """Keys and values, round a ring (Liu et al. 2023)."""
    TENSOR = "tensor"
    """Sums after row-parallel layers (Shoeybi et al. 2019)."""
    VELOCITY = "velocity"
    """The shares of the result, gathered along tokens."""
    GUIDANCE = "guidance"
    """The results of the branches, from who computed them to who did not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSizes:
    """What a step computes."""

    config: MMDiTConfig
    batch: int
    text_tokens: int
    latent_tokens: int
    itemsize: int
    """Bytes of an element, in the model and in its result."""
    branches: int = 1

    @property
    def tokens(self) -> int:
        """Of the joint sequence."""
        return self.text_tokens + self.latent_tokens

    @property
    def attentions(self) -> int:
        """How often attention is computed."""
        return self.config.depth + self.config.depth_single_blocks


@dataclass(frozen=True, slots=True)
class Traffic:
    """What is sent."""

    num_bytes: int
    """By all ranks."""
    collectives: int
    """The calls of the rank that has most."""

    def __add__(self, other: "Traffic") -> "Traffic":
        """Return both together."""
        return Traffic(self.num_bytes + other.num_bytes, self.collectives + other.collectives)


def wire_bytes(scheme: Scheme, sizes: StepSizes, shape: MeshShape) -> int:
    """Return the bytes that all ranks send in a step for a reason."""
    return traffic(scheme, sizes, shape).num_bytes


def traffic(scheme: Scheme, sizes: StepSizes, shape: MeshShape) -> Traffic:
    """Return what a step sends for a reason.

    Args:
        scheme: the reason.
        sizes: what is computed.
        shape: of the ranks that compute it; `replicate` and `shard` do not count.
    """
    if scheme is Scheme.GUIDANCE:
        return _guidance(sizes, shape)
    once = _OF_EVALUATION[scheme](sizes, shape)
    return Traffic(once.num_bytes * sizes.branches, once.collectives * shares(sizes.branches, shape.guidance)[0])


def step_traffic(sizes: StepSizes, shape: MeshShape) -> Traffic:
    """Return what a step sends for all reasons."""
    return sum((traffic(scheme, sizes, shape) for scheme in Scheme), Traffic(0, 0))


def _guidance(sizes: StepSizes, shape: MeshShape) -> Traffic:
    if shape.guidance == 1:
        return Traffic(0, 0)
    velocity = sizes.latent_tokens * sizes.config.in_channels * sizes.batch * sizes.itemsize
    groups = shape.ring * shape.ulysses * shape.tensor
    return Traffic(sizes.branches * (shape.guidance - 1) * velocity * groups, sizes.branches)


def _ulysses(sizes: StepSizes, shape: MeshShape) -> Traffic:
    degree = shape.ulysses
    if degree == 1:
        return Traffic(0, 0)
    lengths = _tokens_of_ranks(sizes, shape)
    moved = 0
    for own_heads, place in product(shares(sizes.config.num_heads, shape.tensor), range(shape.ring)):
        heads, of_place = shares(own_heads, degree), lengths[place * degree : (place + 1) * degree]
        # All but what stays: rank u has the heads h_u of its own tokens already. Back it is as much.
        stays = sum(tokens * share for tokens, share in zip(of_place, heads, strict=True))
        moved += sum(of_place) * own_heads - stays
    exchanged = 4 * moved * sizes.config.head_dim * sizes.batch * sizes.itemsize
    return Traffic(exchanged * sizes.attentions, 2 * sizes.attentions)


def _ring(sizes: StepSizes, shape: MeshShape) -> Traffic:
    steps = shape.ring - 1
    keys_and_values = 2 * sizes.tokens * sizes.config.hidden_size * sizes.batch * sizes.itemsize
    return Traffic(steps * keys_and_values * sizes.attentions, 2 * steps * sizes.attentions)


def _tensor(sizes: StepSizes, shape: MeshShape) -> Traffic:
    if shape.tensor == 1:
        return Traffic(0, 0)
    # Double-stream blocks sum after attention and after the MLP, of both streams; single-stream ones once.
    sums = 2 * sizes.config.depth + sizes.config.depth_single_blocks
    calls = 4 * sizes.config.depth + sizes.config.depth_single_blocks
    summed = sizes.tokens * sizes.config.hidden_size * sizes.batch * sizes.itemsize
    return Traffic(2 * (shape.tensor - 1) * summed * sums, calls)


def _velocity(sizes: StepSizes, shape: MeshShape) -> Traffic:
    ranks = shape.ring * shape.ulysses
    if ranks == 1:
        return Traffic(0, 0)
    # Uneven shares travel padded to the longest.
    share = shares(sizes.latent_tokens, ranks)[0] * sizes.config.in_channels * sizes.batch * sizes.itemsize
    return Traffic(ranks * (ranks - 1) * share * shape.tensor, 1)


_OF_EVALUATION: Mapping[Scheme, Callable[[StepSizes, MeshShape], Traffic]] = {
    Scheme.ULYSSES: _ulysses,
    Scheme.RING: _ring,
    Scheme.TENSOR: _tensor,
    Scheme.VELOCITY: _velocity,
}


def _tokens_of_ranks(sizes: StepSizes, shape: MeshShape) -> list[int]:
    """Return the joint tokens of each rank of the sequence: its share of the text and its share of the latents."""
    ranks = shape.ring * shape.ulysses
    # As `SequenceParallel` cuts them: who has a latent token more has a text token less.
    both = zip(shares(sizes.text_tokens, ranks)[::-1], shares(sizes.latent_tokens, ranks), strict=True)
    return [text + latents for text, latents in both]
