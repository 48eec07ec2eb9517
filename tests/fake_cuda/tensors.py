"""Tensors of a GPU that is not there: torch's fake ones, each operation of which is logged."""

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import torch
from fake_cuda.collectives import Collectives
from fake_cuda.log import Copy, Log, Operand, Operation, Synchronized
from fake_cuda.storages import Storages
from fake_cuda.streams import Queues
from fake_cuda.values import UNKNOWN, compute, give, value_of
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

_aten = torch.ops.aten
_COPIES = frozenset({"_to_copy", "copy_", "_foreach_copy_"})
_UPSAMPLING = {
    _aten.upsample_nearest2d.vec: _aten.upsample_nearest2d.default,
    _aten.upsample_nearest3d.vec: _aten.upsample_nearest3d.default,
}
"""One kernel each, which torch would take apart into several that need more memory."""
_SHAPED = frozenset({"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"})
_FLASH_HEAD_DIM = 256
_HALF = (torch.float16, torch.bfloat16)


class LoggedTensors(FakeTensorMode):
    """Inside its block tensors have sizes and no memory, on the CPU and on `cuda`, and every operation is logged.

    So it is in threads: where the mode is not active, a fake tensor that takes part activates it. Mapped files stay as
    they are until something other than a view is made of them. Small tensors of the CPU have their values, too.
    """

    avoid_device_init = True

    def __init__(self, log: Log, storages: Storages, queues: Queues, collectives: Collectives, memory: int) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._log, self._storages, self._queues, self._collectives = log, storages, queues, collectives
        self._memory = memory
        self._is_inside = False

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_inside or func.namespace == "prim":
            return super().__torch_dispatch__(func, types, args, kwargs)
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a DTensor takes itself apart
        if func in _UPSAMPLING:
            func, args, kwargs = _with_sizes(
                func, **dict(zip(("input", "output_size", "scale_factors"), args, strict=False)), **kwargs
            )
        elif torch.is_inference_mode_enabled() and func._can_decompose():
            with self:
                return func.decompose(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func.is_view and func is not _aten.lift_fresh.default and tensors and not any(map(_is_fake, tensors)):
            with _disable_current_modes():
                return func(*args, **kwargs)
        args, kwargs = tree_map(self._faked, args), tree_map(self._faked, kwargs)
        if func.namespace == "c10d":
            return self._collectives.run(func, args, kwargs)
        return self._logged(func, types, args, kwargs)

    def unlogged(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function inside of which nothing is logged: it asks only for shapes."""

        def run(*arguments: Any, **options: Any) -> Any:
            was_inside, self._is_inside = self._is_inside, True
            try:
                return function(*arguments, **options)
            finally:
                self._is_inside = was_inside

        return run

    def _faked(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or _is_fake(leaf):
            return leaf
        fake = self.fake_tensor_converter.from_real_tensor(self, leaf)
        give(fake, leaf)
        return fake

    def _logged(self, func: Any, types: Iterable[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        for tensor in given:
            self._storages.see(tensor)
        if _needs_values(func, args):
            self._wait_for(func, given)
            if func is _aten._local_scalar_dense.default:
                value = value_of(args[0])
                return UNKNOWN.get(args[0].dtype, 1.0) if value is None else value.item()
        if kwargs.get("generator") is not None:
            kwargs = {**kwargs, "generator": None}  # see `DeviceFunctions`
        if func is _aten.lift_fresh.default:
            return args[0]
        value = compute(func, args, kwargs)
        if value is not None and not func.is_view and not func._schema.is_mutable:
            result = tree_map(self._faked, value)  # also where its shape depends on values
        else:
            self._is_inside = True
            try:
                result = super().__torch_dispatch__(func, types, args, kwargs)
            finally:
                self._is_inside = False
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if value is not None:
            for fake, real in zip(made, tree_leaves(value), strict=True):
                give(fake, real)
        if not func.is_view:
            self._log_operation(func, args, kwargs, given, made)
        return result

    def _log_operation(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor], made: list[Tensor]
    ) -> None:
        is_on_device = any(tensor.device.type == "cuda" for tensor in (*given, *made))
        queue = self._queues.current.queue if is_on_device else None
        mutated = list(_mutated(func, args, kwargs))
        changed = {id(tensor) for tensor in mutated}
        # What only names a shape is not read.
        names_shape = "empty" in func._opname or func._opname in _SHAPED
        read = [] if names_shape else [tensor for tensor in given if id(tensor) not in changed]
        own = {id(tensor) for tensor in given}
        reads = tuple(map(self._storages.operand, read))
        fresh = [tensor for tensor in made if id(tensor) not in own]
        pins = bool(kwargs.get("pin_memory"))
        for tensor in fresh:
            self._storages.see(tensor, queue=queue, pinned=pins)
        writes = [*mutated, *(() if "empty" in func._opname else fresh)]
        self._log_one(func, args, kwargs, queue, reads, tuple(map(self._storages.operand, writes)))
        device = self._queues.device
        if self._log.live_bytes.get(device, 0) > self._memory:
            raise torch.OutOfMemoryError(f"CUDA out of memory: {device} has {self._memory} bytes")

    def _log_one(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        queue: str | None,
        reads: tuple[Operand, ...],
        writes: tuple[Operand, ...],
    ) -> None:
        if not (reads or writes):
            return
        devices = {operand.device for operand in (*reads, *writes)}
        name = func._opname
        if name in _COPIES and len(devices) > 1:
            blocks = not (kwargs.get("non_blocking") or (name != "_to_copy" and len(args) > 2 and args[2]))
            self._log.asked(Copy, name, queue, reads, writes, blocks)
        else:
            self._log.asked(Operation, name, queue, reads, writes)

    def _wait_for(self, func: Any, given: list[Tensor]) -> None:
        if any(tensor.device.type == "cuda" for tensor in given):
            queue = self._queues.current.queue
            self._log.asked(Synchronized, func._opname, None, (queue,))


class DeviceFunctions(TorchFunctionMode):
    """Takes the kernels of attention that a GPU takes: torch asks the device which, and there is none. Takes the memory
    that an H100's convolutions take. Refuses a generator of another device, as a GPU does.
    """

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is functional.scaled_dot_product_attention and args[0].device.type == "cuda":
            return _attend(*args, **(kwargs or {}))
        if func in _CONVOLUTIONS and args[0].device.type == "cuda":
            return _convolve(func, *args, **(kwargs or {}))
        generator = (kwargs or {}).get("generator")
        if generator is not None:
            _require_device(generator, [arg for arg in args if isinstance(arg, Tensor)], kwargs or {})
        return func(*args, **(kwargs or {}))


_CONVOLUTIONS = (functional.conv2d, functional.conv3d)


def _convolve(convolve: Any, clip: Tensor, kernel: Tensor, *options: Any, **named: Any) -> Tensor:
    out: Tensor = convolve(clip, kernel, *options, **named)
    if kernel[0, 0].numel() > 1:
        out.new_empty(clip.nbytes + out.nbytes, dtype=torch.uint8)
    return out


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    assert not enable_gqa
    if attn_mask is None and query.dtype in _HALF and query.shape[-1] <= _FLASH_HEAD_DIM:
        out: Tensor = _aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
        return out
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, float("-inf"))
    bias = None if attn_mask is None else attn_mask.expand(*query.shape[:-1], key.shape[-2])
    records = torch.is_grad_enabled() and query.requires_grad
    out = _aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, records, dropout_p, is_causal, scale=scale
    )[0]
    return out


def of_memory(tensor: Tensor, source: Any, *layout: Any) -> Tensor:
    """Stand in for `Tensor.set_`: return a tensor of memory that is there, such as that of a mapped file."""
    if layout or not isinstance(source, torch.UntypedStorage) or source.device.type != "cpu":
        return Tensor.set_(tensor, source, *layout)
    with _disable_current_modes():
        return torch.empty(0, dtype=tensor.dtype).set_(source)


def moved(module: nn.Module, *arguments: Any, leaves_frozen: bool = False, **options: Any) -> nn.Module:
    """Stand in for `nn.Module.to`, which cannot give a fake parameter another device in place."""
    device, dtype, *_ = torch._C._nn._parse_to(*arguments, **options)
    made: dict[int, Tensor] = {}
    for part in module.modules():
        for held in (part._parameters, part._buffers):
            for name, old in held.items():
                if old is None or (leaves_frozen and isinstance(old, nn.Parameter) and not old.requires_grad):
                    continue
                if id(old) not in made:
                    new = old.detach().to(device, dtype if old.is_floating_point() else None)
                    made[id(old)] = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
                held[name] = made[id(old)]
    return module


def _with_sizes(
    func: Any, input: Tensor, output_size: list[int] | None, scale_factors: list[float] | None
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    factors = scale_factors or [None, None]
    size = output_size or [int(length * factor) for length, factor in zip(input.shape[2:], factors, strict=True)]
    return _UPSAMPLING[func], (input, size, *factors), {}


def _is_fake(tensor: Tensor) -> bool:
    return isinstance(tensor, FakeTensor)


def _needs_values(func: Any, args: tuple[Any, ...]) -> bool:
    if func._opname in ("index", "index_put", "index_put_", "_unsafe_index"):
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


@cache
def _places(func: Any) -> tuple[tuple[int, str], ...]:
    return tuple(
        (index, argument.name)
        for index, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _mutated(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    for index, name in _places(func):
        given = args[index] if index < len(args) else kwargs.get(name)
        yield from (leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor))


def _require_device(generator: torch.Generator, given: list[Tensor], kwargs: dict[str, Any]) -> None:
    device = torch.device(kwargs.get("device") or (given[0].device if given else "cpu"))
    own = getattr(generator, "fake_device", generator.device)
    if own.type != device.type:
        raise RuntimeError(f"Expected a '{device.type}' device type for generator but found '{own.type}'")
