"""Memory of weights on a CPU: memory of the process, and mapped files.

A CPU computes with weights directly in the mapped file, if the file has their dtype. Other weights are cast when they
are loaded, or block by block when they are needed. Rearranged or dequantized weights are always copies.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path

import torch

from opensora_cli.checkpoint.load import PlannedTensor, plan_tensors
from opensora_cli.checkpoint.opening import open_checkpoint
from opensora_cli.core.choices import Rotary
from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.engine.components.architectures import mmdit_config, one_block_of_each
from opensora_cli.engine.components.text_encoders import text_tensors
from opensora_cli.engine.components.weights import Component, Stamp, WeightFiles, stamp_of
from opensora_cli.models.mmdit.blocks import modulation_layers, repeated_blocks
from opensora_cli.models.mmdit.config import MMDiTConfig
from opensora_cli.models.mmdit.layout import converter, find_rotary
from opensora_cli.models.text.t5 import KEPT_IN_FP32, LAYERS
from opensora_cli.settings.components import ModelSettings
from opensora_cli.settings.generate import GenerateSettings

RELEASED_DTYPE = torch.bfloat16
"""Dtype of the released model's files, for plans that are made before the download."""

_IGNORED = {
    Component.T5: ("decoder.", "lm_head.", "encoder.embed_tokens."),
    Component.CLIP: ("vision_model.", "visual_projection.", "text_projection.", "logit_scale"),
}
_T5_NUMBERS_OUTSIDE = 4096 * (32_128 + 1)
_T5_LAYERS = 24


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

    @property
    def private(self) -> int:
        """Bytes of the process's own memory if all weights are cast."""
        return self.cast + self.copied

    def __add__(self, other: "FileBytes") -> "FileBytes":
        return FileBytes(
            self.mapped + other.mapped, self.stored + other.stored, self.cast + other.cast, self.copied + other.copied
        )


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
    are counts, see `count_parameters`. With `modulation_first`, modulation is read only before the first step.
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
    config, prefixes, layers = mmdit_config(model), [f"{LAYERS}."], frozenset[str]()
    if component is Component.TRANSFORMER:
        prefixes = [f"{stack.module_path}." for stack in repeated_blocks(config)]
        layers = frozenset(modulation_layers(config) if modulation_first else ())
    tensors: Iterable[PlannedTensor] = _released(component, config, count)
    if path is not None:
        try:
            tensors = _read(component, config, path, stamp, dtype)
        except CheckpointError:
            tensors = [replace(tensor, is_mapped=False) for tensor in tensors]
    outside, modulation = FileBytes(), FileBytes()
    blocks: dict[tuple[int, int], FileBytes] = {}
    for tensor in tensors:
        size, block = _bytes_of(tensor, dtype), _block(tensor.key, prefixes)
        if tensor.key.rpartition(".")[0] in layers:
            modulation += size
        elif block is None:
            outside += size
        else:
            blocks[block] = blocks.get(block, FileBytes()) + size
    return FileWeights(outside, tuple(blocks[block] for block in sorted(blocks)), modulation)


def _block(key: str, prefixes: list[str]) -> tuple[int, int] | None:
    """Return the number of a tensor's stack and of its block in the stack; None outside the blocks."""
    for number, prefix in enumerate(prefixes):
        index = key.removeprefix(prefix).partition(".")[0]
        if key.startswith(prefix) and index.isdigit():
            return number, int(index)
    return None


def _read(
    component: Component, config: MMDiTConfig, path: Path, stamp: Stamp, dtype: torch.dtype
) -> Iterable[PlannedTensor]:
    """Return the tensors of a file. Raises CheckpointError if it is broken."""
    if component is Component.TRANSFORMER:
        checkpoint = open_checkpoint(path)
        rotary = find_rotary(checkpoint.entries, checkpoint.metadata)
        convert = converter(config, interleaved=rotary is Rotary.INTERLEAVED)
        planned = {tensor.key: tensor for tensor in plan_tensors(path, dtype=dtype, convert=convert)}
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
        layer = (count - _T5_NUMBERS_OUTSIDE) // _T5_LAYERS
        sizes = {f"{LAYERS}.{index}.": layer for index in range(_T5_LAYERS)}
        sizes[""] = count - sum(sizes.values())
    elif component is Component.TRANSFORMER:
        sizes = {}
        counts = {f"{stack.module_path}.0.": stack.count for stack in repeated_blocks(config)}
        for key, tensor in one_block_of_each(config).state_dict().items():
            first = next((start for start in counts if key.startswith(start)), None)
            places = [""] if first is None else [f"{first[:-2]}{index}." for index in range(counts[first])]
            sizes |= {f"{place}{key.removeprefix(first or '')}": tensor.numel() for place in places}
    return [PlannedTensor(key, numel, RELEASED_DTYPE, True) for key, numel in sizes.items()]


def _bytes_of(tensor: PlannedTensor, dtype: torch.dtype) -> FileBytes:
    held = tensor.numel * tensor.dtype.itemsize
    if not tensor.dtype.is_floating_point or tensor.dtype == dtype:
        return FileBytes(mapped=held) if tensor.is_mapped else FileBytes(copied=held)
    cast = tensor.numel * dtype.itemsize
    return FileBytes(stored=held, cast=cast) if tensor.is_mapped else FileBytes(copied=cast)
