"""Streaming, strict, memory-mapped loading of a safetensors file into a module."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from opensora_cli.core.exceptions import CheckpointError

ConvertFn = Callable[[Mapping[str, Tensor]], Iterator[tuple[str, Tensor]]]
"""Turns a file's tensors into a module's, reading each when it is needed: mapping -> iterator of (key, tensor)."""

_LISTED = 3


class _FileTensors(Mapping[str, Tensor]):
    """The tensors of an open file; each is mapped when it is asked for, and none is kept."""

    def __init__(self, file: Any) -> None:  # safe_open has no public type for its handle
        self._file = file
        self._keys: list[str] = list(file.keys())

    def __getitem__(self, key: str) -> Tensor:
        tensor: Tensor = self._file.get_tensor(key)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


class _FileShapes(_FileTensors):
    """The same tensors on the meta device: a conversion runs over them without reading a weight."""

    def __getitem__(self, key: str) -> Tensor:
        return torch.empty(self._file.get_slice(key).get_shape(), device="meta")


def load_into_module(
    module_on_meta: nn.Module,
    path: str | Path,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    convert: ConvertFn | None = None,
    allowed_missing: Sequence[str] = (),
    advance: Callable[[int], None] | None = None,
) -> None:
    """Fill a module with the weights of a safetensors file, tensor by tensor.

    Keys and shapes are checked, conversion included, before the first weight is read. On the CPU a tensor that needs
    no other dtype stays a private map of the file: it costs no memory of its own until it is written to. Elsewhere
    only one tensor at a time is held beside the result.

    Args:
        module_on_meta: made under `torch.device("meta")`; parameters and buffers are replaced, `requires_grad` kept.
        path: the file.
        device: where the weights go.
        dtype: of all floating-point tensors; others keep theirs.
        convert: maps the file's tensors to the module's keys; None where they are the same. It must also run on tensors
            of the meta device.
        allowed_missing: patterns (as in shells: `cond_in.*`) of keys that the file may lack; on the meta device these
            start at zero, elsewhere they keep their values.
        advance: called with the bytes of each tensor as it is loaded, to show progress.

    Raises:
        CheckpointError: no such file, a file that is broken or no safetensors, or keys or shapes that don't fit the
            module.
        ValueError: the module has a non-persistent buffer on the meta device, which no file can fill.
    """
    path = Path(path)
    _refuse_unfillable(module_on_meta)
    expected = module_on_meta.state_dict()
    with _open(path) as file:
        read = convert or _as_is
        found = {key: tuple(tensor.shape) for key, tensor in read(_FileShapes(file))}
        _check(path, found, {key: tuple(t.shape) for key, t in expected.items()}, allowed_missing)
        for key, tensor in read(_FileTensors(file)):
            _assign(module_on_meta, key, _placed(tensor, device=device, dtype=dtype))
            if advance is not None:
                advance(tensor.nbytes)
    for key in expected.keys() - found.keys():
        if expected[key].is_meta:
            zeros = torch.zeros(expected[key].shape, dtype=expected[key].dtype, device=device)
            _assign(module_on_meta, key, _placed(zeros, device=device, dtype=dtype))


def _as_is(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for key in tensors:
        yield key, tensors[key]


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    """Open a safetensors file; whatever is wrong with it becomes one line that names it."""
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    if not path.is_file():
        raise CheckpointError(f"{path} is not a file")
    if path.stat().st_size == 0:
        raise CheckpointError(f"{path} is empty", hint="fetch it again")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except SafetensorError as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{path} is truncated or no safetensors file: {reason}", hint="fetch it again") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def _check(
    path: Path,
    found: Mapping[str, tuple[int, ...]],
    expected: Mapping[str, tuple[int, ...]],
    allowed_missing: Sequence[str],
) -> None:
    missing = [
        key
        for key in expected
        if key not in found and not any(fnmatchcase(key, pattern) for pattern in allowed_missing)
    ]
    unexpected = [key for key in found if key not in expected]
    wrong = [
        f"{key}: file {list(shape)}, model {list(expected[key])}"
        for key, shape in found.items()
        if key in expected and shape != expected[key]
    ]
    problems = [
        f"{len(keys)} {kind} ({_first_few(keys)})"
        for kind, keys in (("missing", missing), ("unexpected", unexpected), ("of another shape", wrong))
        if keys
    ]
    if problems:
        raise CheckpointError(f"{path} does not fit the model: {'; '.join(problems)}")


def _first_few(keys: Sequence[str]) -> str:
    rest = len(keys) - _LISTED
    return ", ".join(keys[:_LISTED]) + (f" and {rest} more" if rest > 0 else "")


def _placed(tensor: Tensor, *, device: torch.device | str, dtype: torch.dtype) -> Tensor:
    placed = tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else tensor.dtype).contiguous()
    # The format does not promise that data starts at a multiple of its item size, but kernels may rely on it.
    return placed.clone() if placed.device.type == "cpu" and placed.data_ptr() % placed.element_size() else placed


def _assign(module: nn.Module, key: str, tensor: Tensor) -> None:
    owner_path, _, name = key.rpartition(".")
    owner = module.get_submodule(owner_path)
    old = getattr(owner, name)
    if isinstance(old, nn.Parameter):
        setattr(owner, name, nn.Parameter(tensor, requires_grad=old.requires_grad))
    else:
        setattr(owner, name, tensor)


def _refuse_unfillable(module: nn.Module) -> None:
    persistent = module.state_dict().keys()
    left = [name for name, buffer in module.named_buffers() if buffer.is_meta and name not in persistent]
    if left:
        raise ValueError(f"non-persistent buffers on the meta device cannot be loaded: {_first_few(left)}")
