"""How much each way to share a denoising step or an update sends, as formulas. Pure: sizes in, bytes out.

Bytes are the sum over all ranks, counted as `bench_comm.counting` does: an all-reduce as a ring's. A step evaluates the
model once for each branch of guidance. Nothing is computed twice: with checkpoints, what blocks exchange in their
forward is exchanged again.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from math import prod

import torch

from opensora_cli.engine.bench_comm.counting import Traffic
from opensora_cli.engine.train.parallelize import feature_cuts, norms_of_heads, row_sizes
from opensora_cli.models.linears import Split
from opensora_cli.models.mmdit.blocks import repeated_blocks
from opensora_cli.models.mmdit.config import MMDiTConfig
from opensora_cli.models.mmdit.model import MMDiT
from opensora_cli.parallel.shares import MeshShape, shares
from opensora_cli.settings.devices import Strategy


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
    sent = [traffic(scheme, sizes, shape) for scheme in Scheme]
    return Traffic(sum(each.num_bytes for each in sent), sum(each.collectives for each in sent))


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


_FP32 = 4
_FP64 = 8
_Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateBytes:
    """What all ranks send in one update, by reason."""

    weights: int
    """Rows of weights, all-gathered."""
    gradients: int
    """Reduce-scattered to their rows, and all-reduced between copies and between tensor-parallel ranks."""
    norm: int
    """Squares of the parts of the gradient, all-reduced."""
    tokens: int
    """By ranks that share the tokens of a sample: all-to-all, sends round the ring, and the gathered velocity."""
    features: int
    """By ranks that share features: all-reduces of activations and of their gradients."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.norm + self.tokens + self.features


def update_bytes(strategy: Strategy, shape: MeshShape, sizes: StepSizes, *, micro_batches: int) -> UpdateBytes:
    """Return what an update sends.

    Args:
        strategy: what each rank holds.
        shape: of the mesh of all ranks.
        sizes: of one micro-batch; `itemsize` is also that of gathered weights. Gradients are exchanged in fp32.
        micro_batches: of an update, over all ranks: a multiple of the data-parallel ones.
    """
    rounds = micro_batches // (shape.replicate * shape.shard)
    tokens, features = _exchanged_activations(shape, sizes)
    if not strategy.shards:
        gradients = 2 * (shape.replicate - 1) * _FP32 * sum(prod(weight) for weight in _shapes(sizes.config).values())
        return UpdateBytes(weights=0, gradients=gradients, norm=0, tokens=0, features=0)
    ranks = shape.shard * shape.ring * shape.ulysses
    exchanges = 1 if strategy is Strategy.ZERO1 else rounds
    twice = strategy in (Strategy.ZERO3, Strategy.HYBRID)
    gathered = scattered = 0
    for tensor_rank in range(shape.tensor):
        inside, outside = _padded(sizes.config, ranks, tensor_ranks=shape.tensor, tensor_rank=tensor_rank)
        gathered += (2 * inside + outside) * rounds if twice else inside + outside
        scattered += (inside + outside) * exchanges
    norms = _shapes(sizes.config)
    all_heads = sum(prod(norms[name]) for name in norms_of_heads(sizes.config))
    return UpdateBytes(
        weights=shape.replicate * (ranks - 1) * gathered * sizes.itemsize,
        gradients=(shape.replicate * (ranks - 1) + 2 * (shape.replicate - 1)) * scattered * _FP32
        + shape.replicate * 2 * (shape.tensor - 1) * all_heads * _FP32,
        norm=shape.replicate * 2 * (ranks * shape.tensor - 1) * _FP64,
        tokens=micro_batches * tokens,
        features=micro_batches * features,
    )


def _exchanged_activations(shape: MeshShape, sizes: StepSizes) -> tuple[int, int]:
    """Return what the ranks of one micro-batch send for its tokens and for its features, forward and backward."""
    of_sample = MeshShape(ring=shape.ring, ulysses=shape.ulysses, tensor=shape.tensor)
    # What is exchanged is exchanged back; the whole velocity is at hand already when its gradient comes.
    tokens = 2 * traffic(Scheme.ULYSSES, sizes, of_sample).num_bytes
    tokens += traffic(Scheme.VELOCITY, sizes, of_sample).num_bytes
    ring = traffic(Scheme.RING, sizes, of_sample).num_bytes
    if shape.ring > 1:
        # Keys and values go round once more, and behind them their gradients, which come home with one send more.
        gradients = ring // (shape.ring - 1) * shape.ring * _FP32 // sizes.itemsize
        tokens += 2 * ring + gradients
    features = traffic(Scheme.TENSOR, sizes, of_sample).num_bytes
    if shape.tensor > 1:
        of_sum = 2 * (shape.tensor - 1) * sizes.tokens * sizes.config.hidden_size * sizes.batch * sizes.itemsize
        features += of_sum * _sums_backward(sizes.config)
    return tokens, features


def _sums_backward(config: MMDiTConfig) -> int:
    """Return how often the gradient of all tokens is summed over ranks that have features of what came of them."""
    double, single = (
        sum(linear.split is Split.COLUMN for linear in stack.linears) * stack.count for stack in repeated_blocks(config)
    )
    # Of the layers of a double-stream block each sees either the text or the latents.
    return double // 2 + single


def _padded(config: MMDiTConfig, ranks: int, *, tensor_ranks: int, tensor_rank: int) -> tuple[int, int]:
    """Return the elements of the weights of a tensor-parallel rank inside and outside of blocks, rows padded."""
    cuts = feature_cuts(config, tensor_ranks)
    stacks = tuple(f"{stack.module_path}." for stack in repeated_blocks(config))
    inside = outside = 0
    for name, shape in _shapes(config).items():
        if name in cuts:
            cut = cuts[name]
            shape = (*shape[: cut.dim], cut.sizes[tensor_rank], *shape[cut.dim + 1 :])
        elements = ranks * row_sizes(shape[0], ranks)[0] * prod(shape[1:])
        if name.startswith(stacks):
            inside += elements
        else:
            outside += elements
    return inside, outside


def _shapes(config: MMDiTConfig) -> dict[str, _Shape]:
    with torch.device("meta"):
        return {name: tuple(weight.shape) for name, weight in MMDiT(config).named_parameters()}
