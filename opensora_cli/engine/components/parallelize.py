"""How ranks share a model: the mesh, chosen before anything starts, and each rank's share of heads and features."""

from collections.abc import Sequence
from math import prod

import torch.distributed as dist
from torch import nn

from opensora_cli.core.exceptions import RequestError
from opensora_cli.models.linears import ShardedLinear
from opensora_cli.models.mmdit import MMDiT
from opensora_cli.models.mmdit.blocks import RepeatedBlocks, repeated_blocks
from opensora_cli.models.text.encoders import T5Encoder
from opensora_cli.models.text.t5 import keep_heads, t5_linears
from opensora_cli.parallel.mesh import MeshShape
from opensora_cli.parallel.shares import shares, span
from opensora_cli.parallel.tensor import shard_linears
from opensora_cli.sampling.guidance import Branch, GuidanceScales, branches_needed, busiest
from opensora_cli.settings.generate import GenerateSettings

_EVEN = 1.05
"""Heads count as evenly divided where the rank with the most computes no more than this over the mean."""


def choose_mesh(settings: GenerateSettings, *, video_tokens: int) -> MeshShape:
    """Return the axes along which ranks share the transformer's work: what was asked for, and the best of the rest.

    Ranks that nothing was asked for share the tokens of one sample. By Ulysses as many as divide the heads evenly and
    are on one machine, since that moves the fewest bytes, in bursts that want fast links; the rest by ring attention,
    which works for any number and computes while it waits. More ranks than tokens are a RequestError.
    """
    parallel = settings.parallel
    tensor, guidance = parallel.tensor_parallel_degree or 1, parallel.cfg_parallel_degree or 1
    ulysses, ring = parallel.ulysses_degree, parallel.ring_degree
    rest = parallel.world_size // prod(parallel.degrees.values())
    if ulysses is None and ring is None:
        # Those that share heads and features lie inside: where they fill a machine, or straddle two, there is no room.
        on_machine, left_over = divmod(parallel.ranks_per_node, tensor)
        on_machine = 1 if left_over else on_machine
        ulysses = _ulysses_degree(rest, heads=settings.model.num_heads // tensor, on_machine=on_machine)
        ring = rest // ulysses
    elif ulysses is None:
        ulysses = rest
    elif ring is None:
        ring = rest
    elif rest > 1:
        # All that share tokens are named: what is left shares branches, if that was left open.
        if parallel.cfg_parallel_degree is not None or rest > len(Branch):
            raise RequestError(
                f"{_named(settings)} leave {rest} of {parallel.world_size} devices without work: leave one of them out"
            )
        guidance = rest
    shape = MeshShape(guidance=guidance, ring=ring or 1, ulysses=ulysses or 1, tensor=tensor)
    if shape.ring * shape.ulysses > video_tokens:
        raise RequestError(
            f"{shape.ring * shape.ulysses} devices cannot share {video_tokens} tokens: use at most {video_tokens}",
            hint="--gpus N sets how many",
        )
    return shape


def describe_mesh(shape: MeshShape) -> str:
    """Return it for people."""
    shared = {
        "Ulysses": shape.ulysses,
        "ring attention": shape.ring,
        "branches of guidance": shape.guidance,
        "tensor parallelism": shape.tensor,
    }
    return " x ".join(f"{name} {degree}" for name, degree in shared.items() if degree > 1) or "nothing is shared"


def _ulysses_degree(ranks: int, *, heads: int, on_machine: int) -> int:
    candidates = [
        degree
        for degree in range(1, min(ranks, heads) + 1)
        if ranks % degree == 0 and on_machine % degree == 0 and -(-heads // degree) * degree <= _EVEN * heads
    ]
    return max(candidates)


def _named(settings: GenerateSettings) -> str:
    return ", ".join(f"parallel.{name}={degree}" for name, degree in settings.parallel.degrees.items())


def shard_transformer(transformer: MMDiT, group: dist.ProcessGroup) -> None:
    """Leave a transformer this rank's share of its blocks; the rest stays whole.

    The transformer is the same on all ranks, on any device, and its blocks are not yet stored in 8 bits or streamed.
    More ranks than heads are a RequestError.
    """
    for stack in repeated_blocks(transformer.config):
        for block in transformer.get_submodule(stack.module_path).children():
            shard_block(block, stack, group)


def shard_block(block: nn.Module, stack: RepeatedBlocks, group: dist.ProcessGroup) -> None:
    """Leave one block of a stack this rank's share; as `shard_transformer`."""
    shard_linears(block, stack.linears, group, used_by_all_heads=stack.used_by_all_heads)


def shard_t5(t5: T5Encoder, group: dist.ProcessGroup) -> None:
    """Leave a T5 this rank's share of its layers; the table of tokens and the norms stay whole.

    The T5 is the same on all ranks, on any device, and its layers are not yet streamed. More ranks than heads are a
    RequestError. CLIP has a fortieth of its weights, which is not worth the exchanges: every rank has all of it.
    """
    sizes = t5.model.sizes
    linears = t5_linears(sizes)
    heads = span(shares(sizes.num_heads, dist.get_world_size(group)), dist.get_rank(group))
    for layer in t5.blocks:
        shard_linears(layer, linears, group)
        keep_heads(layer, heads)


def largest_share(linear: ShardedLinear, ranks: int) -> float:
    """Return which part of a divided layer's features the rank has that has the most."""
    largest = sum(
        shares(piece // unit, ranks)[0] * unit for piece, unit in zip(linear.pieces, linear.units, strict=True)
    )
    return largest / sum(linear.pieces)


def require_branches(mesh: MeshShape, scales: Sequence[GuidanceScales]) -> None:
    """Raise a RequestError for ranks that would never have a branch of guidance to compute; `scales` of each step."""
    branches = len(branches_needed(busiest(scales)))
    if mesh.guidance > branches:
        raise RequestError(
            f"parallel.cfg_parallel_degree={mesh.guidance} is over the branches of guidance that a step has here, "
            f"{branches}: use at most {branches}"
        )
