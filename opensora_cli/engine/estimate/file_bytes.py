"""Memory of weights on a CPU: memory of the process, and mapped files.

A CPU computes with weights directly in the mapped file, if the file has their dtype. Other weights are cast when they
are loaded, or block by block when they are needed. Rearranged or dequantized weights are always copies.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

import torch

from opensora_cli.checkpoint.load import PlannedTensor, plan_tensors
from opensora_cli.checkpoint.opening import open_checkpoint
from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.core.weight_choices import Rotary
from opensora_cli.engine.components.configs import mmdit_config, one_block_of_each
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

_T5_IGNORED = ("decoder.", "lm_head.", "encoder.embed_tokens.")
_T5_NUMBERS_OUTSIDE = 4096 * (32_128 + 1)
_T5_LAYERS = 24
_T5_LAYER = f"{LAYERS}."
_CLIP_IGNORED = ("vision_model.", "visual_projection.", "text_projection.", "logit_scale")


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
    are counts, see `configs.count_parameters`. With `modulation_first`, modulation is read only before the first step.
    """
    found: dict[Component, FileWeights] = {}
    for component, count in parameters.items():
        path = weights.paths.get(component)
        if component is Component.TRANSFORMER:
            found[component] = _transformer(settings.model, path, stamp_of(path), dtype, modulation_first)
        elif component is Component.T5:
            found[component] = _t5(path, stamp_of(path), count, dtype)
        else:
            found[component] = _whole(path, stamp_of(path), count, dtype)
    return found


def can_be_cast_later(weights: FileWeights, dtype: torch.dtype, *, is_text: bool = False) -> bool:
    """Return whether blocks have weights whose cast to `dtype` can wait until the block computes.

    With float16 some of T5's weights are float32, so T5's weights are cast when they are loaded.
    """
    return bool(weights.in_blocks.stored) and not (is_text and dtype is torch.float16)


@lru_cache(maxsize=16)
def _transformer(
    model: ModelSettings, path: Path | None, stamp: Stamp, dtype: torch.dtype, modulation_first: bool
) -> FileWeights:
    config = mmdit_config(model)
    stacks = repeated_blocks(config)
    ends = accumulate(stack.count for stack in stacks)
    starts = {stack.module_path: end - stack.count for stack, end in zip(stacks, ends, strict=True)}

    def block_of(key: str) -> int | None:
        stack, index = (*key.split(".", 2), "", "")[:2]
        return starts[stack] + int(index) if stack in starts and index.isdigit() else None

    tensors = _released(config)
    try:
        if path is not None:
            checkpoint = open_checkpoint(path)
            rotary = find_rotary(checkpoint.entries, checkpoint.metadata)
            convert = converter(config, interleaved=rotary is Rotary.INTERLEAVED)
            planned = {tensor.key: tensor for tensor in plan_tensors(path, dtype=dtype, convert=convert)}
            tensors = [planned.get(tensor.key, tensor) for tensor in tensors]
    except CheckpointError:
        tensors = _released(config, is_mapped=False)
    layers = frozenset(modulation_layers(config) if modulation_first else ())
    grouped = _grouped(
        (tensor for tensor in tensors if _layer(tensor) not in layers),
        dtype,
        block_of=block_of,
        count=sum(stack.count for stack in stacks),
    )
    modulation = (_bytes_of(tensor, dtype) for tensor in tensors if _layer(tensor) in layers)
    return replace(grouped, modulation=sum(modulation, FileBytes()))


def _layer(tensor: PlannedTensor) -> str:
    return tensor.key.rpartition(".")[0]


def _released(config: MMDiTConfig, *, is_mapped: bool = True) -> list[PlannedTensor]:
    """Return the tensors of a transformer's file, from one block of each stack: building all blocks takes a second."""
    counts = {f"{stack.module_path}.0.": stack.count for stack in repeated_blocks(config)}
    tensors = []
    for key, tensor in one_block_of_each(config).state_dict().items():
        first = next((start for start in counts if key.startswith(start)), None)
        keys = [key] if first is None else [f"{first[:-2]}{i}.{key.removeprefix(first)}" for i in range(counts[first])]
        tensors += [PlannedTensor(each, tensor.numel(), RELEASED_DTYPE, is_mapped) for each in keys]
    return tensors


@lru_cache(maxsize=16)
def _t5(path: Path | None, stamp: Stamp, count: int, dtype: torch.dtype) -> FileWeights:
    def block_of(key: str) -> int | None:
        index = key.removeprefix(_T5_LAYER).partition(".")[0]
        return int(index) if key.startswith(_T5_LAYER) and index.isdigit() else None

    if path is None:
        layer = (count - _T5_NUMBERS_OUTSIDE) // _T5_LAYERS
        tensors = [PlannedTensor(f"{_T5_LAYER}{index}.", layer, RELEASED_DTYPE, True) for index in range(_T5_LAYERS)]
        tensors.append(PlannedTensor("", count - _T5_LAYERS * layer, RELEASED_DTYPE, True))
        return _grouped(tensors, dtype, block_of=block_of, count=_T5_LAYERS)
    try:
        tensors = [each for each in text_tensors(path, stamp) if not each.key.startswith(_T5_IGNORED)]
    except CheckpointError:
        return FileWeights(FileBytes(copied=count * dtype.itemsize))
    if dtype is torch.float16:
        tensors = [replace(each, is_mapped=each.is_mapped and not _is_widened(each)) for each in tensors]
    return _grouped(
        tensors, dtype, block_of=block_of, count=1 + max((block_of(t.key) or 0 for t in tensors), default=0)
    )


def _is_widened(tensor: PlannedTensor) -> bool:
    return fnmatchcase(tensor.key, KEPT_IN_FP32) and tensor.dtype is not torch.float32


@lru_cache(maxsize=16)
def _whole(path: Path | None, stamp: Stamp, count: int, dtype: torch.dtype) -> FileWeights:
    """Return the weights of a component that is loaded as a whole: CLIP or the autoencoder."""
    if path is None:
        tensors: Iterable[PlannedTensor] = [PlannedTensor("", count, RELEASED_DTYPE, True)]
    else:
        try:
            tensors = text_tensors(path, stamp) if path.is_dir() else plan_tensors(path, dtype=dtype)
        except CheckpointError:
            return FileWeights(FileBytes(copied=count * dtype.itemsize))
    kept = (tensor for tensor in tensors if not tensor.key.startswith(_CLIP_IGNORED))
    return _grouped(kept, dtype, block_of=lambda _: None, count=0)


def _grouped(
    tensors: Iterable[PlannedTensor], dtype: torch.dtype, *, block_of: Callable[[str], int | None], count: int
) -> FileWeights:
    outside, blocks = FileBytes(), [FileBytes()] * count
    for tensor in tensors:
        size = _bytes_of(tensor, dtype)
        index = block_of(tensor.key)
        if index is None or index >= count:
            outside += size
        else:
            blocks[index] += size
    return FileWeights(outside, tuple(blocks))


def _bytes_of(tensor: PlannedTensor, dtype: torch.dtype) -> FileBytes:
    held = tensor.numel * tensor.dtype.itemsize
    if not tensor.dtype.is_floating_point or tensor.dtype == dtype:
        return FileBytes(mapped=held) if tensor.is_mapped else FileBytes(copied=held)
    cast = tensor.numel * dtype.itemsize
    return FileBytes(stored=held, cast=cast) if tensor.is_mapped else FileBytes(copied=cast)
