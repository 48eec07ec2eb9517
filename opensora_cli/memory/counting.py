"""Counter of the bytes that tensors hold: live, at the peak, over time, and by the modules that made them."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass,
)

NO_OWNER = ""
"""Owner of tensors that no watched module made."""

KeyT = TypeVar("KeyT")


@dataclass(frozen=True, slots=True)
class Change:
    """Allocation or release of bytes: one point of the timeline."""

    storage: int
    """Number of the storage, from 0 in the order of first appearance."""
    num_bytes: int
    """Change of the live bytes, negative for a release."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Named moment on the timeline."""

    name: str
    position: int
    """Number of earlier changes."""
    live_bytes: int
    peak_bytes: int
    """Peak since the previous mark, or since the beginning."""


@dataclass(slots=True)
class _Counted:
    """Live storage."""

    number: int
    num_bytes: int
    alive: "weakref.ref[torch.UntypedStorage]"
    """Weak reference whose callback counts the release of the storage."""


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's hook for subclasses is untyped
    """Mode that torch enters without importing its compiler, which takes a second."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # skipping would import dynamo


class TensorBytes(DispatchMode):
    """Counter of the storages of tensors that are made inside its context, and of added tensors.

    A storage with any number of views counts once, from the operation that makes it until its last tensor is freed,
    even after the context. It works in forward, backward and inference mode, on any device, and on meta tensors. For
    fake tensors, enter it inside their mode. Workspaces of kernels, and memory that an allocator rounds up or caches,
    do not count. A resized storage counts with its new size from the next operation on.

    Args:
        device_type: count only tensors on this type of device. None means all devices.
        limit: bytes above which an operation raises MemoryError after making its result. None means no limit.
        follow_sizes: also count changes by `UntypedStorage.resize_` inside the context, with which FSDP2 empties and
            fills storages.
    """

    def __init__(self, *, device_type: str | None = None, limit: int | None = None, follow_sizes: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.peak_bytes = 0
        """Peak since the beginning, or since `reset_peak`."""
        self.changes: list[Change] = []
        """All allocations and releases, in order."""
        self.marks: list[Mark] = []
        self._device_type = device_type
        self._limit = limit
        self._follow_sizes = follow_sizes
        self._counted: dict[int, _Counted] = {}
        self._owners: list[str] = []
        self._running: list[str] = []
        self._peak_position = 0
        self._peak_since_mark = 0
        self._entered: list[ExitStack] = []
        self._counts_fake = False

    def __enter__(self) -> Self:
        stack = ExitStack()
        if not self._entered:
            self._counts_fake = any(isinstance(mode, FakeTensorMode) for mode in _get_current_dispatch_mode_stack())
        # The counter is entered again inside itself, for the parts of an operation.
        if self._follow_sizes and not self._entered:
            stack.enter_context(_following_sizes(self._resized))
        self._entered.append(stack)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """Stop counting new tensors; counted tensors still count until they are freed."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._entered.pop().close()

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:  # called for every fake tensor, many times
            return args[0].device
        if any(map(is_wrapper, types)):
            # Its operations on the inner tensors also arrive here.
            return NotImplemented
        if torch.is_inference_mode_enabled() and _is_composite(func):
            # Outside of inference mode, autograd decomposes such operations first. Their parts also make tensors.
            with self:
                return func.decompose(*args, **kwargs)
        result = func(*args, **kwargs)
        is_fresh = func is torch.ops.aten.lift_fresh.default  # a result of `torch.tensor`
        if func.is_view and not is_fresh:
            return result
        given: set[int] | None = set() if is_fresh else None
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            counted = self._counted.get(storage._cdata)
            if counted is not None:
                self._resize(counted, storage.nbytes())
                continue
            if given is None:
                given = {part.untyped_storage()._cdata for part in _tensors((args, kwargs))}
            if storage._cdata not in given:
                self._count(tensor, storage)
        if self._limit is not None and self.live_bytes > self._limit:
            raise MemoryError(f"{self.live_bytes} bytes are over the limit of {self._limit}")
        return result

    def add(self, held: nn.Module | Tensor | Iterable[Tensor], owner: str | None = None) -> None:
        """Count existing tensors, and set their owner from the beginning on. None keeps the previous owner, if any."""
        if isinstance(held, nn.Module):
            held = [*held.parameters(), *held.buffers()]
        for tensor in _tensors(held if isinstance(held, Tensor) else list(held)):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._counted:
                self._count(tensor, storage, owner=owner)
            elif owner is not None:
                self._owners[self._counted[storage._cdata].number] = owner

    @contextmanager
    def watch(self, module: nn.Module, name: str = "") -> Iterator[None]:
        """Inside the context, assign tensors from forward passes of `module` and its submodules to these modules.

        `name` is the name of the root; names of submodules begin with it, as in `transformer.double_blocks.0`.
        """
        removers: list[Callable[[], None]] = []

        def enter(path: str) -> Callable[..., None]:
            return lambda *_: self._running.append(path)

        def leave(*_: object) -> None:
            self._running.pop()

        for path, part in module.named_modules(prefix=name):
            removers.append(part.register_forward_pre_hook(enter(path), prepend=True).remove)
            removers.append(part.register_forward_hook(leave, always_call=True).remove)
        try:
            yield
        finally:
            for remove in removers:
                remove()

    def mark(self, name: str) -> None:
        self.marks.append(Mark(name, len(self.changes), self.live_bytes, self._peak_since_mark))
        self._peak_since_mark = self.live_bytes

    def reset_peak(self) -> None:
        """Restart the search for the peak."""
        self.peak_bytes = self.live_bytes
        self._peak_position = len(self.changes)

    def peak_by_owner(self) -> dict[str, int]:
        """Return the live bytes by owner when the peak was first reached."""
        return self._live(self._peak_position, self._owners.__getitem__)

    def owners_at(self, mark: Mark) -> dict[str, int]:
        """Return the live bytes by owner at a mark."""
        return self._live(mark.position, self._owners.__getitem__)

    def storages_of(self, tensors: Iterable[Tensor]) -> set[int]:
        """Return the numbers of the storages of counted tensors among `tensors`."""
        found = (self._counted.get(tensor.untyped_storage()._cdata) for tensor in _tensors(list(tensors)))
        return {counted.number for counted in found if counted is not None}

    def live_at(self, position: int) -> dict[int, int]:
        """Return the live bytes by number of storage after `position` changes."""
        return self._live(position, lambda number: number)

    def repeated(self, times: Mapping[int, int], *, one_by_one: Iterable[Sequence[int]] = ()) -> "TensorBytes":
        """Return the timeline with storages repeated; `times` maps numbers of storages to counts.

        Inside a span of positions in `one_by_one`, only one copy is allocated or released. The other copies follow at
        the end of the span, releases first.
        """
        spans = {end: (begin, end) for begin, end in one_by_one}
        single = {position for span in spans.values() for position in range(*span)}
        marks, found = list(self.marks), TensorBytes()
        found._owners = list(self._owners)
        for position in range(len(self.changes) + 1):
            net: dict[int, int] = {}
            for change in self.changes[slice(*spans.get(position, (0, 0)))]:
                net[change.storage] = net.get(change.storage, 0) + change.num_bytes
            for storage, num_bytes in sorted(net.items(), key=lambda item: item[1]):
                found._change(storage, (times.get(storage, 1) - 1) * num_bytes)
            while marks and marks[0].position == position:
                found.mark(marks.pop(0).name)
            for change in self.changes[position : position + 1]:
                count = 1 if position in single else times.get(change.storage, 1)
                found._change(change.storage, count * change.num_bytes)
        return found

    def most_of(self, counts: Callable[[str], bool]) -> int:
        """Return the peak bytes, at any time, of all owners together for which `counts` is true."""
        live = most = 0
        counted = [counts(owner) for owner in self._owners]
        for change in self.changes:
            if counted[change.storage]:
                live += change.num_bytes
                most = max(most, live)
        return most

    def _live(self, position: int, key: Callable[[int], KeyT]) -> dict[KeyT, int]:
        totals: dict[KeyT, int] = {}
        for change in self.changes[:position]:
            name = key(change.storage)
            totals[name] = totals.get(name, 0) + change.num_bytes
        return {name: total for name, total in totals.items() if total}

    def _count(self, tensor: Tensor, storage: torch.UntypedStorage, *, owner: str | None = None) -> None:
        # DTensor computes shapes with whole fake tensors, which no rank holds.
        if isinstance(tensor, FakeTensor) and not self._counts_fake:
            return
        # Only a fake tensor itself knows its device; its storage does not.
        if self._device_type is not None and tensor.device.type != self._device_type:
            return
        key = storage._cdata
        number = len(self._owners)
        maker = self._running[-1] if self._running else NO_OWNER
        self._owners.append(maker if owner is None else owner)

        def forget(_: object) -> None:
            self._change(number, -self._counted.pop(key).num_bytes)

        self._counted[key] = _Counted(number, storage.nbytes(), weakref.ref(storage, forget))
        self._change(number, storage.nbytes())

    def _resize(self, counted: _Counted, num_bytes: int) -> None:
        if counted.num_bytes != num_bytes:
            self._change(counted.number, num_bytes - counted.num_bytes)
            counted.num_bytes = num_bytes

    def _resized(self, storage: torch.UntypedStorage) -> None:
        counted = self._counted.get(storage._cdata)
        if counted is not None:
            self._resize(counted, storage.nbytes())

    def _change(self, number: int, num_bytes: int) -> None:
        self.changes.append(Change(number, num_bytes))
        self.live_bytes += num_bytes
        self._peak_since_mark = max(self._peak_since_mark, self.live_bytes)
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes = self.live_bytes
            self._peak_position = len(self.changes)


@contextmanager
def _following_sizes(resized: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Call `resized` with each storage that `resize_` changes inside the context."""
    original = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        result = original(storage, size)
        resized(storage)
        return result

    torch.UntypedStorage.resize_ = resize_  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]


def _tensors(tree: object) -> Iterator[Tensor]:
    """Yield the plain tensors of nested containers, including tensors inside wrappers such as DTensor."""
    if isinstance(tree, Tensor):
        if is_wrapper(type(tree)) and is_traceable_wrapper_subclass(tree):
            names, _ = tree.__tensor_flatten__()
            yield from _tensors([getattr(tree, name) for name in names])
        elif tree.layout is torch.strided:
            yield tree
    elif isinstance(tree, (list, tuple)):
        for part in tree:
            if isinstance(part, (Tensor, list, tuple, dict)):
                yield from _tensors(part)
    elif isinstance(tree, dict):
        yield from _tensors(list(tree.values()))


@cache
def is_wrapper(kind: type) -> bool:
    """Return whether tensors of a class wrap others, such as DTensor."""
    return hasattr(kind, "__tensor_flatten__")


@cache
def _is_composite(func: Any) -> bool:
    return bool(func._can_decompose())
