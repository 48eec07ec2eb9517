"""Models of which each rank holds a share of the heads and features."""

import torch.distributed as dist

from opensora_cli.models.linears import ShardedLinear
from opensora_cli.models.mmdit import MMDiT
from opensora_cli.models.mmdit.blocks import repeated_blocks
from opensora_cli.models.text.encoders import T5Encoder
from opensora_cli.models.text.t5 import keep_heads, t5_linears
from opensora_cli.parallel.shares import shares, span
from opensora_cli.parallel.tensor import shard_linears


def shard_transformer(transformer: MMDiT, group: dist.ProcessGroup) -> None:
    """Leave a transformer this rank's share of its blocks; the rest stays whole.

    Args:
        transformer: the same on all ranks, on any device; before its blocks are stored in 8 bits or streamed.
        group: the ranks, at most as many as there are heads.

    Raises:
        RequestError: there are more ranks than heads.
    """
    for stack in repeated_blocks(transformer.config):
        for block in transformer.get_submodule(stack.module_path).children():
            shard_linears(block, stack.linears, group, used_by_all_heads=stack.used_by_all_heads)


def shard_t5(t5: T5Encoder, group: dist.ProcessGroup) -> None:
    """Leave a T5 this rank's share of its layers; the table of tokens and the norms stay whole.

    CLIP has a fortieth of its weights, which is not worth the exchanges: every rank has all of it.

    Args:
        t5: the same on all ranks, on any device; before its layers are streamed.
        group: the ranks, at most as many as there are heads.

    Raises:
        RequestError: there are more ranks than heads.
    """
    config = t5.model.config
    linears = t5_linears(config)
    heads = span(shares(config.num_heads, dist.get_world_size(group)), dist.get_rank(group))
    for layer in t5.blocks:
        shard_linears(layer, linears, group)
        keep_heads(layer, heads)


def largest_share(linear: ShardedLinear, ranks: int) -> float:
    """Return which part of a divided layer's features the rank has that has the most."""
    largest = sum(
        shares(piece // unit, ranks)[0] * unit for piece, unit in zip(linear.pieces, linear.units, strict=True)
    )
    return largest / sum(linear.pieces)
