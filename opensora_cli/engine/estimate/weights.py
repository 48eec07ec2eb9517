"""Bytes of weights in the memory of a rank: whole, in 8 bits, streamed from the host, or mapped from their files.

A CPU computes with weights directly in the mapped file, if the file has their dtype. Other weights are cast when they
are loaded, or block by block when they are needed. Rearranged or dequantized weights are always copies.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch
from torch import nn

from opensora_cli.checkpoint.load import plan_tensors
from opensora_cli.core.choices import LinearProducts
from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.engine.components.architectures import mmdit_config, on_meta, one_block_of_each, text_tensors
from opensora_cli.engine.components.loras import LoraRanks, in_first_block
from opensora_cli.engine.components.weights import Component, Stamp, WeightFiles, stamp_of
from opensora_cli.engine.estimate.offload import OffloadPlan
from opensora_cli.engine.estimate.transformer import keep_largest_share
from opensora_cli.memory.eight_bit import StoredLinear
from opensora_cli.memory.host_weights import aligned, kept_blocks, slot_bytes, streaming_bytes
from opensora_cli.models.linears import Split
from opensora_cli.models.mmdit.blocks import RepeatedBlocks, modulation_layers, repeated_blocks
from opensora_cli.models.mmdit.config import MMDiTConfig
from opensora_cli.models.mmdit.layers import modulation_width
from opensora_cli.models.mmdit.layout import converter
from opensora_cli.settings.components import ModelSettings
from opensora_cli.settings.devices import OffloadMode
from opensora_cli.settings.generate import GenerateSettings

_RELEASED_DTYPE = torch.bfloat16
"""Dtype of the released model's files, for plans that are made before the download."""

# Weights of the transformer


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
    return rest + _held_slots(bytes_of_blocks(config, dtype, offload, tensor=tensor), factors, offload)


def transformer_on_cpu(
    config: MMDiTConfig,
    file: "FileWeights",
    dtype: torch.dtype,
    offload: OffloadPlan,
    *,
    tensor: int,
    loras: LoraRanks,
) -> tuple[int, int]:
    """Return the bytes of the transformer's weights in the memory of a rank on a CPU, and in the mapped file."""
    outside, factors = _factor_bytes(config, dtype, loras, tensor, False)
    whole = file.count * dtype.itemsize
    if offload.in_8_bits or tensor > 1:
        copies = replace(offload, mode=OffloadMode.NONE, modulation_on_host=False)
        return transformer_bytes(config, whole, dtype, copies, tensor=tensor, loras=loras), 0
    if offload.mode is not OffloadMode.BLOCKS:
        private, mapped = file.held(dtype)
        return private + outside + sum(factors), mapped
    slots = transformer_bytes(config, whole, dtype, offload, tensor=1, loras=()) + file.copied * dtype.itemsize
    return slots + outside + sum(factors), file.mapped_bytes


def streamed_bytes(config: MMDiTConfig, dtype: torch.dtype, offload: OffloadPlan, *, tensor: int) -> int:
    """Return the bytes that move to the device of a rank each time the model runs, adapters excluded."""
    if offload.mode is not OffloadMode.BLOCKS:
        return 0
    slots = bytes_of_blocks(config, dtype, offload, tensor=tensor)
    kept = kept_blocks(len(slots), resident=offload.resident_blocks or 1)
    return sum(slots) - sum(slots[index] for index in kept)


def modulation_bytes(config: MMDiTConfig, dtype: torch.dtype) -> int:
    """Return the bytes of the weights of all layers of modulation."""
    return modulation_width(config) * (config.hidden_size + 1) * dtype.itemsize


def largest_modulation_bytes(config: MMDiTConfig, dtype: torch.dtype) -> int:
    """Return the bytes of the weights of the largest layer of modulation."""
    blocks = _blocks(config, dtype)
    sizes = (_weight_bytes(block.get_submodule(path)) for stack, block in blocks for path in stack.modulation)
    return max(sizes, default=0)


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


def _held_slots(slots: Iterable[int], factors: Iterable[int], offload: OffloadPlan) -> int:
    """Return the bytes of blocks on the device, with their adapters."""
    blocks = [sum(pair) for pair in zip(slots, factors, strict=True)]
    if offload.mode is not OffloadMode.BLOCKS:
        return sum(blocks)
    return streaming_bytes(blocks, resident=offload.resident_blocks or 1)


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


# Files that a CPU maps


@dataclass(frozen=True, slots=True)
class FileWeights:
    """Weights of one component on a CPU, which maps its file."""

    count: int
    copied: int = 0
    """Number of the weights that are always copies, such as rearranged or dequantized ones."""
    dtype: torch.dtype | None = _RELEASED_DTYPE
    """Dtype of the other weights in the file."""

    @property
    def mapped_bytes(self) -> int:
        """Bytes of the weights that can stay in the mapped file."""
        return (self.count - self.copied) * self.dtype.itemsize if self.dtype is not None else 0

    def held(self, dtype: torch.dtype) -> tuple[int, int]:
        """Return the bytes in the process's own memory, and in the mapped file, of weights in `dtype`."""
        if dtype == self.dtype:
            return self.copied * dtype.itemsize, self.mapped_bytes
        return self.count * dtype.itemsize, 0

    def can_be_cast_later(self, dtype: torch.dtype) -> bool:
        """Return whether the cast to `dtype` can wait until a block computes."""
        return self.dtype not in (None, dtype)


def file_weights(
    settings: GenerateSettings, weights: WeightFiles, parameters: Mapping[Component, int], dtype: torch.dtype
) -> Mapping[Component, FileWeights]:
    """Return the weights of each component on a CPU that computes in `dtype`. No weight is read.

    Missing files count like the released ones, and broken files like copies, since loading reports them. `parameters`
    are those of `count_parameters`.
    """
    found = {}
    for component, count in parameters.items():
        path = weights.paths.get(component)
        found[component] = FileWeights(count)
        if component is Component.T5 and dtype is torch.float16:
            # Some of its weights are float32 then, so all are cast when they are loaded.
            found[component] = FileWeights(count, count, None)
        elif path is not None:
            found[component] = _of_file(component, settings.model, path, stamp_of(path), count, dtype)
    return found


@lru_cache(maxsize=64)
def _of_file(
    component: Component, model: ModelSettings, path: Path, stamp: Stamp, count: int, dtype: torch.dtype
) -> FileWeights:
    try:
        if component is Component.TRANSFORMER:
            tensors = plan_tensors(path, dtype=dtype, convert=converter(mmdit_config(model)))
        else:
            tensors = text_tensors(path, stamp) if path.is_dir() else plan_tensors(path, dtype=dtype)
    except CheckpointError:
        return FileWeights(count, count, None)
    sizes: Counter[torch.dtype] = Counter()
    for tensor in tensors:
        if tensor.is_mapped:
            sizes[tensor.dtype] += tensor.numel
    main = max(sizes, key=lambda dtype: sizes[dtype], default=None)
    copied = sum(tensor.numel for tensor in tensors if not tensor.is_mapped or tensor.dtype != main)
    return FileWeights(count, min(copied, count), main)
