"""How much an update sends with each strategy, as formulas. Pure: sizes in, bytes out.

Bytes are those of all ranks together, counted as `bench_comm.counting` does: an all-reduce as a ring's. Nothing is
computed twice: with checkpoints, what blocks exchange in their forward is exchanged once more.
"""

from dataclasses import dataclass
from math import prod

import torch

from opensora_cli.engine.bench_comm.wire import Scheme, StepSizes, traffic
from opensora_cli.engine.train.strategy.parts import feature_cuts, norms_of_heads, row_sizes
from opensora_cli.models.linears import Split
from opensora_cli.models.mmdit import MMDiT, MMDiTConfig
from opensora_cli.models.mmdit.blocks import repeated_blocks
from opensora_cli.parallel.mesh import MeshShape
from opensora_cli.settings.strategy import Strategy

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
