"""What the weights of the transformer take of a device's memory."""

from copy import deepcopy
from dataclasses import replace
from functools import lru_cache

import torch
from torch import nn

from opensora_cli.engine.components.loras import LoraRanks, factor_sizes
from opensora_cli.engine.components.tensor_parallel import largest_share
from opensora_cli.engine.estimate.offload import OffloadPlan
from opensora_cli.memory.block_weights import ALIGNMENT, slot_bytes
from opensora_cli.memory.streaming import streaming_bytes
from opensora_cli.models.mmdit import MMDiT, MMDiTConfig
from opensora_cli.models.mmdit.blocks import RepeatedBlocks, repeated_blocks
from opensora_cli.settings.enums import OffloadMode


def transformer_bytes(
    config: MMDiTConfig, whole: int, dtype: torch.dtype, offload: OffloadPlan, *, tensor: int, loras: LoraRanks
) -> int:
    """Return what of the transformer's weights, adapters included, is on the device of a rank.

    Args:
        config: of the transformer.
        whole: bytes of all of its weights, without adapters.
        dtype: of the weights.
        offload: what is kept where.
        tensor: ranks that share the blocks.
        loras: the adapters.
    """
    stacks = _stacks(config, dtype)
    outside, factors = _factor_bytes(config, dtype, loras, tensor)
    if offload.mode is not OffloadMode.BLOCKS and not offload.fp8_storage and tensor == 1:
        return whole + outside + sum(factors)
    rest = whole + outside - sum(stack.count * _weight_bytes(block) for stack, block in stacks)
    weights = [
        size
        for stack, block in stacks
        for size in [round(_slot_bytes(block, fp8=offload.fp8_storage) * _share(stack, block, tensor))] * stack.count
    ]
    slots = [sum(pair) for pair in zip(weights, factors, strict=True)]
    if offload.mode is not OffloadMode.BLOCKS:
        return rest + sum(slots)
    return rest + streaming_bytes(slots, resident=offload.resident_blocks or 1)


@lru_cache(maxsize=16)
def _factor_bytes(
    config: MMDiTConfig, dtype: torch.dtype, loras: LoraRanks, tensor: int
) -> tuple[int, tuple[int, ...]]:
    """Return what adapters take outside the blocks, where each rank has them as a whole, and in each block."""
    outside = sum(factor_sizes(loras.outside_blocks(), _model(config))) * dtype.itemsize
    sizes = [
        factor_sizes(loras.in_block(stack.module_path, index), block, stack.linears, tensor=tensor)
        for stack, block in _stacks(config, dtype)
        for index in range(stack.count)
    ]
    return outside, tuple(sum(_aligned(size * dtype.itemsize) for size in each) for each in sizes)


def multiplied_out_bytes(config: MMDiTConfig, dtype: torch.dtype) -> int:
    """Return the bytes of the largest weight of a linear layer of the blocks: so much is multiplied out at a time."""
    return max(
        (weight.nbytes for _, block in _stacks(config, dtype) for weight in block.parameters() if weight.ndim == 2),
        default=0,
    )


def with_depth(config: MMDiTConfig, most: int) -> MMDiTConfig:
    """Return the sizes of a transformer with at most so many blocks in each stack."""
    return replace(config, depth=min(config.depth, most), depth_single_blocks=min(config.depth_single_blocks, most))


@lru_cache(maxsize=16)
def _model(config: MMDiTConfig) -> MMDiT:
    """Return the transformer without weights, and with at most one block in each stack."""
    with torch.device("meta"):
        return MMDiT(with_depth(config, 1))


@lru_cache(maxsize=16)
def _stacks(config: MMDiTConfig, dtype: torch.dtype) -> tuple[tuple[RepeatedBlocks, nn.Module], ...]:
    """Return every stack, and one of its blocks without weights."""
    model = deepcopy(_model(config)).to(dtype)
    return tuple(
        (stack, model.get_submodule(f"{stack.module_path}.0")) for stack in repeated_blocks(config) if stack.count
    )


def _share(stack: RepeatedBlocks, block: nn.Module, ranks: int) -> float:
    """Return which part of a block's weights the rank has that has the most of those that share it."""
    elsewhere = sum(
        _weight_bytes(block.get_submodule(linear.path)) * (1 - largest_share(linear, ranks)) for linear in stack.linears
    )
    return 1 - elsewhere / _weight_bytes(block)


def _weight_bytes(block: nn.Module) -> int:
    return sum(weight.nbytes for weight in block.parameters())


def _slot_bytes(block: nn.Module, *, fp8: bool) -> int:
    """Return the bytes of a block's weights in one run of memory; in 8 bits each row has a scale in fp32 beside it."""
    if not fp8:
        return slot_bytes(block)
    linears = [module for module in block.modules() if isinstance(module, nn.Linear)]
    in_8_bits = {id(linear.weight) for linear in linears}
    sizes = [weight.numel() if id(weight) in in_8_bits else weight.nbytes for weight in block.parameters()]
    sizes += [4 * linear.out_features for linear in linears]
    return sum(map(_aligned, sizes))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
