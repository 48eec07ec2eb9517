"""Bytes of weights in the memory of a rank: whole, in 8 bits, streamed from the host, or mapped from their files.

A CPU computes with weights directly in the mapped file, if the file has their dtype. Other weights are cast when they
are loaded, or block by block when they are needed. Rearranged or dequantized weights are always copies.
"""

import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import astuple, dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path

import torch
from torch import nn

from opensora_cli.checkpoint.load import PlannedTensor, plan_tensors
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
from opensora_cli.models.text.sizes import T5Sizes
from opensora_cli.models.text.t5 import KEPT_IN_FP32, LAYERS
from opensora_cli.settings.components import ModelSettings
from opensora_cli.settings.devices import OffloadMode
from opensora_cli.settings.generate import GenerateSettings

_RELEASED_DTYPE = torch.bfloat16
"""Dtype of the released model's files, for plans that are made before the download."""

_IGNORED = {
    Component.T5: ("decoder.", "lm_head.", "encoder.embed_tokens."),
    Component.CLIP: ("vision_model.", "visual_projection.", "text_projection.", "logit_scale"),
}

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
    files: "FileWeights",
    dtype: torch.dtype,
    offload: OffloadPlan,
    *,
    tensor: int,
    loras: LoraRanks,
) -> tuple[int, int]:
    """Return the bytes of the private weights of a rank on a CPU, and of the mapped weights that it reads each time the
    model runs.

    Except for 8 bits, only blocks that are cast are streamed. Weights that ranks share are a copy on each rank.
    """
    # On a CPU adapters of modulation count, too.
    outside, factors = _factor_bytes(config, dtype, loras, tensor, False)
    streams = offload.mode is OffloadMode.BLOCKS
    private, mapped = files.outside.held()
    private += outside + files.modulation.held(streams)[0]
    # In 8 bits modulation is a copy, like the rest of the blocks.
    offload = replace(offload, modulation_on_host=offload.modulation_on_host and not offload.fp8_storage)
    slots = bytes_of_blocks(config, dtype, offload, tensor=tensor)
    if offload.fp8_storage:
        return private + sum(factors) + sum(slots), mapped
    kept = kept_blocks(len(slots), resident=offload.resident_blocks or 1) if streams else []
    whole, own = (_blocks(config, dtype, each, offload.modulation_on_host) for each in (1, tensor))
    shares = [
        _weight_bytes(part) / _weight_bytes(block)
        for (stack, block), (_, part) in zip(whole, own, strict=True)
        for _ in range(stack.count)
    ]
    for index, (block, share) in enumerate(zip(files.blocks, shares, strict=True)):
        copied, in_file = block.held(streams)
        if tensor > 1:
            private += round(share * (copied + in_file))
        else:
            private += copied
            mapped += 0 if index in kept else in_file
    return private + (_held_slots(slots, factors, offload) if streams else sum(factors)), mapped


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
class FileBytes:
    """Bytes of a set of weights, by their place in memory."""

    mapped: int = 0
    """Bytes of weights that are used directly in the mapped file."""
    stored: int = 0
    """Bytes of weights that are mapped in another dtype, and can stay mapped until they are cast."""
    cast: int = 0
    """Bytes of the `stored` weights after the cast."""
    copied: int = 0
    """Bytes of weights that are always copies, in the dtype of computation."""

    def held(self, casts_later: bool = False) -> tuple[int, int]:
        """Return the bytes in the process's own memory, and in mapped files."""
        if casts_later:
            return self.copied, self.mapped + self.stored
        return self.cast + self.copied, self.mapped

    def __add__(self, other: "FileBytes") -> "FileBytes":
        return FileBytes(*map(sum, zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True, slots=True)
class FileWeights:
    """Weights of one component."""

    outside: FileBytes
    """Bytes of the weights outside the blocks."""
    blocks: tuple[FileBytes, ...] = ()
    """Bytes of each block, in the order of execution."""
    modulation: FileBytes = FileBytes()
    """Bytes of a transformer's modulation, if it is read only before the first step. The blocks exclude it then."""

    @property
    def in_blocks(self) -> FileBytes:
        """Bytes of all blocks."""
        return sum(self.blocks, FileBytes())

    @property
    def total(self) -> FileBytes:
        """Bytes of all weights."""
        return self.outside + self.in_blocks + self.modulation


def file_weights(
    settings: GenerateSettings,
    weights: WeightFiles,
    parameters: Mapping[Component, int],
    dtype: torch.dtype,
    *,
    modulation_first: bool,
) -> Mapping[Component, FileWeights]:
    """Return the memory of each component on a CPU that computes in `dtype`. No weight is read.

    Missing files count like the released ones, and broken files like copies, since loading reports them. `parameters`
    are those of `count_parameters`. With `modulation_first`, modulation is read only before the first step.
    """
    found = {}
    for component, count in parameters.items():
        path = weights.paths.get(component)
        found[component] = _component(component, settings.model, path, stamp_of(path), count, dtype, modulation_first)
    return found


def can_be_cast_later(weights: FileWeights, dtype: torch.dtype, *, is_text: bool = False) -> bool:
    """Return whether blocks have weights whose cast to `dtype` can wait until the block computes.

    With float16 some of T5's weights are float32, so T5's weights are cast when they are loaded.
    """
    return bool(weights.in_blocks.stored) and not (is_text and dtype is torch.float16)


@lru_cache(maxsize=64)
def _component(
    component: Component,
    model: ModelSettings,
    path: Path | None,
    stamp: Stamp,
    count: int,
    dtype: torch.dtype,
    modulation_first: bool,
) -> FileWeights:
    config, stacks, layers = mmdit_config(model), [LAYERS], frozenset[str]()
    if component is Component.TRANSFORMER:
        stacks = [stack.module_path for stack in repeated_blocks(config)]
        layers = frozenset(modulation_layers(config) if modulation_first else ())
    tensors = _released(component, config, count)
    if path is not None:
        try:
            tensors = _read(component, config, path, stamp, dtype)
        except CheckpointError:
            tensors = [replace(tensor, is_mapped=False) for tensor in tensors]
    in_block = re.compile(rf"({'|'.join(map(re.escape, stacks))})\.\d+\.")
    outside, modulation, blocks = FileBytes(), FileBytes(), dict[str, FileBytes]()
    for tensor in tensors:
        size, block = _bytes_of(tensor, dtype), in_block.match(tensor.key)
        if tensor.key.rpartition(".")[0] in layers:
            modulation += size
        elif block is None:
            outside += size
        else:
            blocks[block[0]] = blocks.get(block[0], FileBytes()) + size
    return FileWeights(outside, tuple(blocks.values()), modulation)


def _read(
    component: Component, config: MMDiTConfig, path: Path, stamp: Stamp, dtype: torch.dtype
) -> list[PlannedTensor]:
    """Return the tensors of a file. Raises CheckpointError if it is broken."""
    if component is Component.TRANSFORMER:
        planned = {tensor.key: tensor for tensor in plan_tensors(path, dtype=dtype, convert=converter(config))}
        return [planned.get(tensor.key, tensor) for tensor in _released(component, config, 0)]
    tensors = text_tensors(path, stamp) if path.is_dir() else plan_tensors(path, dtype=dtype)
    kept = [tensor for tensor in tensors if not tensor.key.startswith(_IGNORED.get(component, ()))]
    if component is Component.T5 and dtype is torch.float16:
        return [replace(each, is_mapped=each.is_mapped and not _is_widened(each)) for each in kept]
    return kept


def _is_widened(tensor: PlannedTensor) -> bool:
    return fnmatchcase(tensor.key, KEPT_IN_FP32) and tensor.dtype is not torch.float32


def _released(component: Component, config: MMDiTConfig, count: int) -> list[PlannedTensor]:
    """Return the tensors of a released file with `count` numbers; of the transformer, those of one block of each stack,
    repeated: building all blocks takes a second.
    """
    sizes = {"": count}
    if component is Component.T5:
        released = T5Sizes()
        layer = sum(released.layer_weights.values())
        sizes = {f"{LAYERS}.{index}.": layer for index in range(released.num_layers)}
        sizes[""] = count - released.num_layers * layer
    elif component is Component.TRANSFORMER:
        sizes = {}
        counts = {f"{stack.module_path}.0.": stack.count for stack in repeated_blocks(config)}
        for key, tensor in one_block_of_each(config).state_dict().items():
            first = next((start for start in counts if key.startswith(start)), None)
            places = [""] if first is None else [f"{first[:-2]}{index}." for index in range(counts[first])]
            sizes |= {f"{place}{key.removeprefix(first or '')}": tensor.numel() for place in places}
    return [PlannedTensor(key, numel, _RELEASED_DTYPE, True) for key, numel in sizes.items()]


def _bytes_of(tensor: PlannedTensor, dtype: torch.dtype) -> FileBytes:
    held = tensor.numel * tensor.dtype.itemsize
    if not tensor.dtype.is_floating_point or tensor.dtype == dtype:
        return FileBytes(mapped=held) if tensor.is_mapped else FileBytes(copied=held)
    cast = tensor.numel * dtype.itemsize
    return FileBytes(stored=held, cast=cast) if tensor.is_mapped else FileBytes(copied=cast)
