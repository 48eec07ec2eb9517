"""Streaming, strict, memory-mapped loading of a checkpoint into a module."""

import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import Tensor, nn

from opensora_cli.checkpoint.lazy import LazyTensor
from opensora_cli.checkpoint.opening import Checkpoint, open_checkpoint
from opensora_cli.checkpoint.transforms import dequantize
from opensora_cli.core.exceptions import CheckpointError, HardwareError
from opensora_cli.core.formatting import first_few
from opensora_cli.core.reading import is_lack_of_memory

ConvertFn = Callable[[Mapping[str, Tensor]], Iterator[tuple[str, Tensor]]]
"""Converts a file's tensors to a module's, reading each when it is needed: mapping -> iterator of (key, tensor)."""

Shape = tuple[int, ...]
_WRAPPERS = ("model.diffusion_model.", "diffusion_model.", "_orig_mod.", "module.", "model.")
"""Prefixes of names from ComfyUI, `torch.compile`, DDP and trainers. No model of ours has a part of these names."""
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """Tensor that loading makes from a checkpoint for one key of a module."""

    key: str
    numel: int
    dtype: torch.dtype
    """Dtype of the tensor when it is read, before the cast."""
    is_mapped: bool
    """Whether the tensor is a part of the mapped file instead of a copy."""


def plan_tensors(
    path: str | Path, *, dtype: torch.dtype, convert: ConvertFn | None = None
) -> tuple[PlannedTensor, ...]:
    """Return the tensors that `load_into_module` would read on a CPU, from the headers of a checkpoint alone.

    `dtype` and `convert` are its arguments. Raises CheckpointError for a file that is missing or broken.
    """
    tensors = OpenTensors(_weights(open_checkpoint(Path(path)), dtype), meta=True)
    return tuple(
        PlannedTensor(key, tensor.numel(), tensor.dtype, tensors.is_view(tensor))
        for key, tensor in (convert or _as_is)(tensors)
    )


def load_into_module(
    module_on_meta: nn.Module,
    path: str | Path,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    convert: ConvertFn | None = None,
    keep_on_host: Sequence[str] = (),
    keep_dtype: Sequence[str] = (),
    keep_fp32: Sequence[str] = (),
    blocks: Sequence[str] = (),
    finish_block: Callable[[str], None] | None = None,
    hold: Callable[[Tensor], Tensor] | None = None,
    advance: Callable[[int], None] | None = None,
) -> None:
    """Fill a module with the weights of a checkpoint, tensor by tensor.

    Keys and shapes are checked, conversion included, before the first weight is read. On the CPU a tensor that keeps
    its dtype stays a private map of the file: it costs no memory of its own until it is written to. On other devices
    only one tensor at a time is held beside the result.

    Args:
        module_on_meta: made under `torch.device("meta")`; parameters and buffers are replaced, `requires_grad` stays.
        path: the file or folder, in any of the formats.
        device: the device of the weights.
        dtype: dtype of all floating-point tensors; others keep theirs.
        convert: maps the file's tensors to the module's keys; None means that the keys are the same. It must also run
            on tensors of the meta device.
        keep_on_host: shell-style patterns of keys (`double_blocks.*`) that stay on the CPU, whatever `device` is.
        keep_dtype: patterns of keys that keep the file's dtype if they stay a map of it.
        keep_fp32: patterns of keys that are fp32, whatever `dtype` is.
        blocks: paths of modules inside the module that are filled one after the other.
        finish_block: called with the path of each complete block of `blocks`; it may change the block in place.
        hold: called with each tensor on the CPU that is no map of the file and in no block of `finish_block`. It
            returns the tensor that the module gets instead.
        advance: called with the bytes of each tensor as it is loaded, to show progress.

    Raises:
        CheckpointError: the file is missing, broken or of no known format, or its keys or shapes don't fit the
            module.
        ValueError: the module has a non-persistent buffer on the meta device, which no file can fill.
    """
    persistent = module_on_meta.state_dict().keys()
    left = [name for name, buffer in module_on_meta.named_buffers() if buffer.is_meta and name not in persistent]
    if left:
        raise ValueError(f"non-persistent buffers on the meta device cannot be loaded: {first_few(left)}")
    tensors, mapped = _open_fitting(module_on_meta, path, dtype, convert, in_order=bool(blocks))
    block_of = {key: block for block in blocks for key in persistent if key.startswith(f"{block}.")}
    waiting = Counter(block_of.values())
    for key, tensor in tensors:
        size = tensor.nbytes
        is_view = tensor.is_contiguous() and mapped.has_mapped(tensor)
        keeps_dtype = not tensor.is_floating_point() or (is_view and _matches(key, keep_dtype))
        held_dtype = tensor.dtype if keeps_dtype else torch.float32 if _matches(key, keep_fp32) else dtype
        placed = tensor.to(device="cpu" if _matches(key, keep_on_host) else device, dtype=held_dtype).contiguous()
        is_changed = finish_block is not None and key in block_of
        if hold is not None and not is_changed and placed.device.type == "cpu" and not mapped.has_mapped(placed):
            placed = hold(placed)
        _assign(module_on_meta, key, placed)
        del tensor, placed
        if finish_block is not None and key in block_of:
            waiting[block_of[key]] -= 1
            if not waiting[block_of[key]]:
                finish_block(block_of[key])
        if advance is not None:
            advance(size)


def read_weights(
    module_on_meta: nn.Module,
    path: str | Path,
    *,
    dtype: torch.dtype,
    convert: ConvertFn | None = None,
    allowed_missing: Sequence[str] = (),
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a checkpoint that a module needs, for callers that use a part of each.

    Each item is a key of the module and its whole tensor on the CPU, either a private map of the file or a copy.
    `convert` and the CheckpointError are the same as for `load_into_module`. `allowed_missing` are shell-style patterns
    such as `cond_in.*` of keys that the file may lack; these tensors are zeros. The module does not change, and `dtype`
    only applies to 8-bit tensors of the file.
    """
    left = module_on_meta.state_dict()
    for key, tensor in _open_fitting(module_on_meta, path, dtype, convert, allowed_missing)[0]:
        del left[key]
        yield key, tensor
    for key, lacking in left.items():
        yield key, torch.zeros(lacking.shape, dtype=lacking.dtype)


def fill_module(
    module: nn.Module, checkpoint: Checkpoint, *, device: torch.device | str = "cpu", strict: bool = True
) -> None:
    """Fill a module with the weights of an open checkpoint. Existing weights are overwritten in place.

    Raises:
        CheckpointError: keys or shapes don't fit the module, or a file cannot be read.
    """
    entries = _weights(checkpoint, torch.get_default_dtype())
    expected = module.state_dict()
    shapes = {key: tuple(entry.shape) for key, entry in entries.items()}
    problems = differences(shapes, {key: tuple(tensor.shape) for key, tensor in expected.items()})
    misfit = any(key in expected and shape != expected[key].shape for key, shape in shapes.items())
    message = f"{checkpoint.path} does not fit the model: {'; '.join(problems)}"
    if misfit or (strict and problems):
        raise CheckpointError(message)
    if problems:
        warnings.warn(message, stacklevel=3)
    tensors = OpenTensors(entries)
    for key in expected.keys() & entries.keys():
        if expected[key].is_meta:
            _assign(module, key, tensors[key].to(device))
        else:
            expected[key].copy_(tensors[key])


def _open_fitting(
    module: nn.Module,
    path: str | Path,
    dtype: torch.dtype,
    convert: ConvertFn | None,
    allowed_missing: Sequence[str] = (),
    *,
    in_order: bool = False,
) -> tuple[Iterator[tuple[str, Tensor]], "OpenTensors"]:
    """Return a file's tensors by the module's keys, to be read one by one, and the maps of the file.

    The tensors come in the order of the file. With `in_order` they are sorted by name, numbers by value, so that the
    tensors of a module follow one another. Raises CheckpointError if the file does not fit.
    """
    entries = _weights(open_checkpoint(Path(path)), dtype)
    if in_order:
        entries = dict(sorted(entries.items(), key=lambda named: _NUMBER.sub(lambda n: n[0].zfill(9), named[0])))
    read = convert or _as_is
    found = {key: tuple(tensor.shape) for key, tensor in read(OpenTensors(entries, meta=True))}
    required = {
        key: tuple(tensor.shape)
        for key, tensor in module.state_dict().items()
        if key in found or not _matches(key, allowed_missing)
    }
    if problems := differences(found, required):
        raise CheckpointError(f"{path} does not fit the model: {'; '.join(problems)}")
    mapped = OpenTensors(entries)
    return read(mapped), mapped


def _weights(checkpoint: Checkpoint, dtype: torch.dtype) -> Mapping[str, LazyTensor]:
    """Return the weights without prefixes of wrappers; 8-bit weights are multiplied by their scales, in `dtype`."""
    entries = checkpoint.entries
    while entries and (
        prefix := next((each for each in _WRAPPERS if all(key.startswith(each) for key in entries)), "")
    ):
        entries = {key.removeprefix(prefix): entry for key, entry in entries.items()}
    return dequantize(entries, dtype)


def _matches(key: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in patterns)


def _as_is(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for key in tensors:
        yield key, tensors[key]


def _assign(module: nn.Module, key: str, tensor: Tensor) -> None:
    owner_path, _, name = key.rpartition(".")
    owner = module.get_submodule(owner_path)
    old = getattr(owner, name)
    if isinstance(old, nn.Parameter):
        setattr(owner, name, nn.Parameter(tensor, requires_grad=old.requires_grad))
    else:
        setattr(owner, name, tensor)


def differences(found: Mapping[str, Shape], expected: Mapping[str, Shape]) -> list[str]:
    """Return how the names and shapes of tensors differ from `expected`, one line for each kind of difference."""
    missing = [key for key in expected if key not in found]
    unexpected = [key for key in found if key not in expected]
    wrong = [
        f"{key}: file {list(shape)}, model {list(expected[key])}"
        for key, shape in found.items()
        if key in expected and shape != expected[key]
    ]
    kinds = (("missing", missing), ("unexpected", unexpected), ("of another shape", wrong))
    return [f"{len(names)} {kind} ({first_few(names)})" for kind, names in kinds if names]


class OpenTensors(Mapping[str, Tensor]):
    """Tensors of an open checkpoint. Each is mapped or read on access, and none is cached.

    With `meta` they are on the meta device: a conversion of them reads no weight.
    """

    def __init__(self, entries: Mapping[str, LazyTensor], *, meta: bool = False) -> None:
        self._entries = entries
        self._meta = meta
        self._last: Tensor | None = None
        self._maps: dict[Path, torch.UntypedStorage] = {}

    def __getitem__(self, key: str) -> Tensor:
        entry = self._entries[key]
        extent = entry.extent
        # Formats do not promise that data starts at a multiple of its item size, but kernels rely on it.
        if extent is not None and (extent.offset % entry.dtype.itemsize or not extent.length):
            extent = None
        if self._meta:
            tensor = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
            self._last = None if extent is None else tensor
            return tensor
        if extent is None:
            return entry.read()
        if extent.path not in self._maps:
            self._maps[extent.path] = _map(extent.path)
        whole = torch.empty(0, dtype=torch.uint8).set_(self._maps[extent.path])
        if extent.offset + extent.length > whole.numel():
            raise CheckpointError(f"{extent.path} has become shorter while it was read")
        return whole[extent.offset : extent.offset + extent.length].view(entry.dtype).view(entry.shape)

    def has_mapped(self, tensor: Tensor) -> bool:
        """Return whether `tensor` is a part of a file that is mapped here."""
        start = tensor.untyped_storage().data_ptr()
        return any(start == storage.data_ptr() for storage in self._maps.values())

    def is_view(self, tensor: Tensor) -> bool:
        """Return whether a meta tensor, made from the last accessed one, is a contiguous part of a mapped file."""
        if self._last is None or not tensor.is_contiguous():
            return False
        return bool(tensor.untyped_storage()._cdata == self._last.untyped_storage()._cdata)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def _map(path: Path) -> torch.UntypedStorage:
    """Map a file privately. Other maps of the file share its pages until they are written to."""
    try:
        storage = torch.UntypedStorage.from_file(str(path), shared=False, nbytes=path.stat().st_size)
    except (OSError, RuntimeError) as error:
        if is_lack_of_memory(error):
            raise HardwareError(f"there is not enough memory to map {path}") from error
        raise CheckpointError(f"{path} cannot be mapped: {' '.join(str(error).split())}") from error
    assert isinstance(storage, torch.UntypedStorage)
    return storage
