"""Bytes of the transformer's weights on the device of a rank, whole, in 8 bits, or streamed from the host."""

from copy import deepcopy
from dataclasses import replace
from functools import lru_cache

import torch
from torch import nn

from opensora_cli.core.choices import LinearProducts
from opensora_cli.engine.components.architectures import on_meta, one_block_of_each
from opensora_cli.engine.components.loras import LoraRanks, in_first_block
from opensora_cli.engine.estimate.file_bytes import FileWeights
from opensora_cli.engine.estimate.offload import OffloadPlan
from opensora_cli.engine.estimate.transformer import keep_largest_share
from opensora_cli.memory.eight_bit import StoredLinear
from opensora_cli.memory.host_weights import aligned, kept_blocks, slot_bytes, streaming_bytes
from opensora_cli.models.linears import Split
from opensora_cli.models.mmdit.blocks import RepeatedBlocks, modulation_layers, repeated_blocks
from opensora_cli.models.mmdit.config import MMDiTConfig
from opensora_cli.models.mmdit.layers import modulation_width
from opensora_cli.settings.enums import OffloadMode


def transformer_bytes(
    config: MMDiTConfig, whole: int, dtype: torch.dtype, offload: OffloadPlan, *, tensor: int, loras: LoraRanks
) -> int:
    """Return the bytes of the transformer's weights, adapters included, on the device of a rank.

    `whole` counts all of its weights, without adapters; `tensor` ranks share the blocks.
    """
    on_host = offload.modulation_on_host
    if on_host:
        whole -= modulation_bytes(config, dtype)
    outside, factors = _factor_bytes(config, dtype, loras, tensor, on_host)
    if offload.mode is not OffloadMode.BLOCKS and not offload.in_8_bits and tensor == 1:
        return whole + outside + sum(factors)
    blocks = _blocks(config, dtype, without_modulation=on_host)
    rest = whole + outside - sum(stack.count * _weight_bytes(block) for stack, block in blocks)
    weights = bytes_of_blocks(config, dtype, offload, tensor=tensor)
    slots = [sum(pair) for pair in zip(weights, factors, strict=True)]
    if offload.mode is not OffloadMode.BLOCKS:
        return rest + sum(slots)
    return rest + streaming_bytes(slots, resident=offload.resident_blocks or 1)


def modulation_bytes(config: MMDiTConfig, dtype: torch.dtype) -> int:
    """Return the bytes of the weights of all layers of modulation."""
    return modulation_width(config) * (config.hidden_size + 1) * dtype.itemsize


def largest_modulation_bytes(config: MMDiTConfig, dtype: torch.dtype) -> int:
    """Return the bytes of the weights of the largest layer of modulation."""
    blocks = _blocks(config, dtype)
    sizes = (_weight_bytes(block.get_submodule(path)) for stack, block in blocks for path in stack.modulation)
    return max(sizes, default=0)


def transformer_on_cpu(
    config: MMDiTConfig, files: FileWeights, dtype: torch.dtype, offload: OffloadPlan, *, tensor: int, loras: LoraRanks
) -> tuple[int, int]:
    """Return the bytes of the private weights of a rank on a CPU, and of the mapped weights that it reads each time the
    model runs.

    Except for 8 bits, only blocks that are cast are streamed. Weights that ranks share are a copy on each rank.
    """
    # On a CPU adapters of modulation count, too.
    outside, factors = _factor_bytes(config, dtype, loras, tensor, False)
    private, mapped = files.outside.private + outside + sum(factors), files.outside.mapped
    streams = offload.mode is OffloadMode.BLOCKS
    private += files.modulation.copied if streams else files.modulation.private
    # In 8 bits modulation is a copy, like the rest of the blocks.
    offload = replace(offload, modulation_on_host=offload.modulation_on_host and not offload.fp8_storage)
    slots = bytes_of_blocks(config, dtype, offload, tensor=tensor)
    if offload.fp8_storage:
        return private + sum(slots), mapped
    whole, own = (_blocks(config, dtype, each, offload.modulation_on_host) for each in (1, tensor))
    shares_of_blocks = [
        _weight_bytes(part) / _weight_bytes(block)
        for (stack, block), (_, part) in zip(whole, own, strict=True)
        for _ in range(stack.count)
    ]
    kept = set(kept_blocks(len(slots), resident=offload.resident_blocks or 1)) if streams else set()
    for index, (held, share) in enumerate(zip(files.blocks, shares_of_blocks, strict=True)):
        in_file = held.mapped + (held.stored if streams else 0)
        copied = held.copied if streams else held.private
        if tensor > 1:
            private += round(share * (copied + in_file))
        else:
            private += copied
            mapped += 0 if index in kept else in_file
    if streams:
        slots = [sum(pair) for pair in zip(slots, factors, strict=True)]
        private += streaming_bytes(slots, resident=offload.resident_blocks or 1)
    return private, mapped


def streamed_bytes(config: MMDiTConfig, dtype: torch.dtype, offload: OffloadPlan, *, tensor: int) -> int:
    """Return the bytes that move to the device of a rank each time the model runs, adapters excluded."""
    if offload.mode is not OffloadMode.BLOCKS:
        return 0
    slots = bytes_of_blocks(config, dtype, offload, tensor=tensor)
    kept = kept_blocks(len(slots), resident=offload.resident_blocks or 1)
    return sum(slots) - sum(slots[index] for index in kept)


@lru_cache(maxsize=16)
def _factor_bytes(
    config: MMDiTConfig, dtype: torch.dtype, loras: LoraRanks, tensor: int, modulation_on_host: bool
) -> tuple[int, tuple[int, ...]]:
    """Return the bytes of adapters outside the blocks, which are whole on every rank, and in each block."""
    model, stacks = one_block_of_each(config), repeated_blocks(config)
    splits = {f"{stack.module_path}.0.{linear.path}": linear.split for stack in stacks for linear in stack.linears}
    in_blocks = {f"{stack.module_path}.{index}": 0 for stack in stacks for index in range(stack.count)}
    outside, on_host = 0, modulation_layers(config) if modulation_on_host else ()
    for path, rank in loras:
        if path in on_host:
            continue
        first = in_first_block(path)
        layer, split, block = model.get_submodule(first), splits.get(first), ".".join(path.split(".")[:2])
        assert isinstance(layer, nn.Linear)
        a, b = rank * layer.in_features, rank * layer.out_features
        if block in in_blocks:
            a, b = a // tensor if split is Split.ROW else a, b // tensor if split is Split.COLUMN else b
            in_blocks[block] += aligned(a * dtype.itemsize) + aligned(b * dtype.itemsize)
        else:
            outside += (a + b) * dtype.itemsize
    return outside, tuple(in_blocks.values())


def bytes_of_blocks(config: MMDiTConfig, dtype: torch.dtype, offload: OffloadPlan, *, tensor: int = 1) -> list[int]:
    """Return the bytes that the weights of each block need in one run of memory on a rank, in the order of the blocks.
    Adapters are excluded.
    """
    blocks = _stored_blocks(config, dtype, offload, tensor)
    return [slot_bytes(block) for stack, block in blocks for _ in range(stack.count)]


def dequantized_bytes(config: MMDiTConfig, dtype: torch.dtype, offload: OffloadPlan, *, tensor: int) -> int:
    """Return the bytes of the largest dequantized weight of a linear layer in the blocks, on one of `tensor` ranks.
    Weights are dequantized one at a time.
    """
    sizes = [0]
    for stack, block in _stored_blocks(config, dtype, offload, tensor) if offload.fp8_storage else ():
        multiplied = [linear.path for linear in stack.linears] if offload.linear is not LinearProducts.EXACT else []
        dequantized = (layer for path, layer in _linears(block).items() if path not in multiplied)
        sizes += [layer.in_features * layer.out_features * dtype.itemsize for layer in dequantized]
    return max(sizes)


def _stored_blocks(
    config: MMDiTConfig, dtype: torch.dtype, offload: OffloadPlan, tensor: int
) -> tuple[tuple[RepeatedBlocks, nn.Module], ...]:
    return _blocks(config, dtype, tensor, offload.modulation_on_host, offload.fp8_storage, offload.linear)


@lru_cache(maxsize=64)
def _blocks(
    config: MMDiTConfig,
    dtype: torch.dtype,
    tensor: int = 1,
    without_modulation: bool = False,
    fp8_storage: bool = False,
    linear: LinearProducts = LinearProducts.EXACT,
) -> tuple[tuple[RepeatedBlocks, nn.Module], ...]:
    """Return every stack with one of its blocks, as a rank with the largest share stores it, on the meta device."""
    model = deepcopy(one_block_of_each(config))
    with on_meta():
        keep_largest_share(model, tensor)
    model.to(dtype)
    blocks = tuple(
        (stack, model.get_submodule(f"{stack.module_path}.0")) for stack in repeated_blocks(config) if stack.count
    )
    for stack, block in blocks:
        for path in stack.modulation if without_modulation else ():
            block.set_submodule(path, nn.Identity())
        for path, layer in _linears(block).items():
            if fp8_storage or (linear is not LinearProducts.EXACT and path in {each.path for each in stack.linears}):
                values = torch.empty_like(layer.weight, dtype=torch.float8_e4m3fn)
                scale = torch.empty(layer.out_features, 1, device="meta")
                block.set_submodule(path, StoredLinear(layer, values, scale))
    return blocks


def _weight_bytes(block: nn.Module) -> int:
    return sum(weight.nbytes for weight in block.parameters())


def _linears(block: nn.Module) -> dict[str, nn.Linear]:
    return {path: module for path, module in block.named_modules() if isinstance(module, nn.Linear)}
