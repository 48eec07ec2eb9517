"""Bytes of weights in the memory of a rank: whole, in 8 bits, streamed from the host, or mapped from their files.

A CPU computes with weights directly in the mapped file, if the file has their dtype. Other weights are cast when they
are loaded, or block by block when they are needed. Rearranged or dequantized weights are always copies.
"""

from collections import Counter
from collections.abc import Mapping
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
from opensora_cli.engine.components.loras import LoraRanks
from opensora_cli.engine.components.weights import Component, Stamp, WeightFiles, stamp_of
from opensora_cli.engine.estimate.offload import OffloadPlan
from opensora_cli.engine.estimate.transformer import keep_largest_share, largest_ranks
from opensora_cli.memory.eight_bit import StoredLinear
from opensora_cli.memory.host_weights import kept_blocks, slot_bytes, streaming_bytes
from opensora_cli.models.linears import LowRankLinear
from opensora_cli.models.mmdit.blocks import RepeatedBlocks, modulation_layers, repeated_blocks
from opensora_cli.models.mmdit.config import MMDiTConfig
from opensora_cli.models.mmdit.layout import converter
from opensora_cli.settings.components import ModelSettings
from opensora_cli.settings.devices import OffloadMode
from opensora_cli.settings.generate import GenerateSettings

_RELEASED_DTYPE = torch.bfloat16
"""Dtype of the released model's files, for plans that are made before the download."""

Blocks = tuple[tuple[RepeatedBlocks, nn.Module], ...]
"""Every stack with one of its blocks."""

# Weights of the transformer


def transformer_bytes(
    config: MMDiTConfig, dtype: torch.dtype, offload: OffloadPlan, *, tensor: int = 1, loras: LoraRanks = ()
) -> int:
    """Return the bytes of the transformer's weights, adapters included, on the device of a rank.

    `tensor` ranks share the blocks.
    """
    outside, blocks = _stored(config, dtype, offload, tensor, loras)
    if offload.mode is not OffloadMode.BLOCKS and not offload.in_8_bits and tensor == 1:
        return outside + sum(stack.count * _weight_bytes(block) for stack, block in blocks)
    slots = [slot_bytes(block) for stack, block in blocks for _ in range(stack.count)]
    if offload.mode is not OffloadMode.BLOCKS:
        return outside + sum(slots)
    return outside + streaming_bytes(slots, resident=offload.resident_blocks or 1)


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
    if offload.in_8_bits or tensor > 1:
        copies = replace(offload, mode=OffloadMode.NONE, modulation_on_host=False)
        return transformer_bytes(config, dtype, copies, tensor=tensor, loras=loras), 0
    bare, adapted = (transformer_bytes(config, dtype, OffloadPlan(), loras=each) for each in ((), loras))
    private, mapped = file.held(dtype)
    if offload.mode is OffloadMode.BLOCKS:
        private = transformer_bytes(config, dtype, offload) + file.copied * dtype.itemsize
        mapped = file.mapped_bytes
    return private + adapted - bare, mapped


def streamed_bytes(config: MMDiTConfig, dtype: torch.dtype, offload: OffloadPlan, *, tensor: int) -> int:
    """Return the bytes that move to the device of a rank each time the model runs, adapters excluded."""
    if offload.mode is not OffloadMode.BLOCKS:
        return 0
    slots = bytes_of_blocks(config, dtype, offload, tensor=tensor)
    kept = kept_blocks(len(slots), resident=offload.resident_blocks or 1)
    return sum(slots) - sum(slots[index] for index in kept)


def bytes_of_blocks(config: MMDiTConfig, dtype: torch.dtype, offload: OffloadPlan, *, tensor: int = 1) -> list[int]:
    """Return the bytes that the weights of each block need in one run of memory on a rank, in the order of the blocks.
    Adapters are excluded.
    """
    _, blocks = _stored(config, dtype, offload, tensor)
    return [slot_bytes(block) for stack, block in blocks for _ in range(stack.count)]


def _stored(
    config: MMDiTConfig, dtype: torch.dtype, offload: OffloadPlan, tensor: int = 1, loras: LoraRanks = ()
) -> tuple[int, Blocks]:
    form = OffloadPlan(
        modulation_on_host=offload.modulation_on_host, fp8_storage=offload.fp8_storage, linear=offload.linear
    )
    return _stored_in(form, config, dtype, tensor, loras)


@lru_cache(maxsize=64)
def _stored_in(
    form: OffloadPlan, config: MMDiTConfig, dtype: torch.dtype, tensor: int, loras: LoraRanks
) -> tuple[int, Blocks]:
    """Return the bytes outside the blocks, and every stack with one of its blocks, as a rank with the largest share
    stores them, on the meta device. The block has the largest adapters of its stack.
    """
    model = deepcopy(one_block_of_each(config))
    with on_meta():
        keep_largest_share(model, tensor)
    model.to(dtype)
    for path in modulation_layers(model.config) if form.modulation_on_host else ():
        model.set_submodule(path, nn.Identity())
    blocks = tuple(
        (stack, model.get_submodule(f"{stack.module_path}.0")) for stack in repeated_blocks(config) if stack.count
    )
    for stack, block in blocks:
        multiplied = {each.path for each in stack.linears} if form.linear is not LinearProducts.EXACT else ()
        for path, layer in _linears(block).items():
            if form.fp8_storage or path in multiplied:
                values = torch.empty_like(layer.weight, dtype=torch.float8_e4m3fn)
                scale = torch.empty(layer.out_features, 1, device="meta")
                block.set_submodule(path, StoredLinear(layer, values, scale))
    for path, rank in largest_ranks(loras).items():
        if isinstance(base := model.get_submodule(path), nn.Linear):
            shapes = (rank, base.in_features), (base.out_features, rank)
            factors = (torch.empty(shape, dtype=dtype, device="meta") for shape in shapes)
            model.set_submodule(path, LowRankLinear(base, *factors))
    return _weight_bytes(model) - sum(_weight_bytes(block) for _, block in blocks), blocks


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
