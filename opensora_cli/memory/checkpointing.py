"""Activation checkpointing (Chen et al. 2016): blocks are recomputed in backward instead of saving their activations.

Blocks are wrapped from outside, inside DDP and FSDP2 too: the model's code and the names of its parameters stay.
Gradients are bitwise identical to plain training. The inputs of checkpoints can be in host memory until backward.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from types import MethodType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from opensora_cli.core.device import is_gpu

RECOMPUTING = "_recomputing"
"""Optional attribute of a module: function that returns the context for recomputing its checkpoint in backward."""
_ATTENTION = [
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
]
"""Operations whose results selective checkpointing saves: attention takes most operations per byte of its result."""
_OURS = "checkpoints"
"""Attribute of a function that checkpoints a module."""
_inside_checkpoint: ContextVar[bool] = ContextVar("inside_checkpoint", default=False)


class HostActivations:
    """Host copies of the tensors that autograd saves inside `offloading`: around checkpoints, the inputs of blocks.

    A tensor that is saved several times, such as the rotary tables of all blocks, is copied once in each direction.
    Parameters and their views stay on their device. A saved tensor must not be changed in place. A copy is freed with
    the graph that needs it. `on_copy` is called with each copy.
    """

    def __init__(self, *, on_copy: Callable[[Tensor], object] = lambda copy: None) -> None:
        self._on_copy = on_copy
        self._saved: weakref.WeakValueDictionary[object, _Saved] = weakref.WeakValueDictionary()

    def offloading(self) -> AbstractContextManager[object]:
        return saved_tensors_hooks(self._pack, self._unpack)

    @torch.no_grad()
    def _pack(self, x: Tensor) -> "Tensor | _Saved":
        # A wrapper such as DTensor has no single storage to copy.
        if isinstance(x, nn.Parameter) or isinstance(x._base, nn.Parameter) or hasattr(x, "__tensor_flatten__"):
            return x
        storage = x.untyped_storage()
        key = (storage._cdata, x.storage_offset(), x.shape, x.stride(), x.dtype, x._version)
        saved = self._saved.get(key)
        # Another storage may have the address of a freed one.
        if saved is None or saved.storage() is not storage:
            saved = self._saved[key] = _Saved(x)
            self._on_copy(saved.copy)
        return saved

    @torch.no_grad()
    def _unpack(self, saved: "Tensor | _Saved") -> Tensor:
        return saved if isinstance(saved, Tensor) else saved.fetch()


class _Saved:
    """Saved tensor, on the host until backward needs it."""

    def __init__(self, x: Tensor) -> None:
        self.storage = weakref.ref(x.untyped_storage())
        self._device = x.device
        # Copies from and to locked pages run in the order of the device's own work, without the host.
        self.copy = torch.empty_like(x, device="cpu", pin_memory=is_gpu(x.device)).copy_(x, non_blocking=True)
        self._fetched: Tensor | None = None

    def fetch(self) -> Tensor:
        if self._fetched is None:
            self._fetched = torch.empty_like(self.copy, device=self._device).copy_(self.copy, non_blocking=True)
        return self._fetched


class GradCheckpoint:
    """Checkpointing of the modules at `paths`. `remove`, or the end of a `with` block, undoes it."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = tuple(paths)
        self._undo: list[Callable[[], object]] = []

    def remove(self) -> None:
        """Undo the checkpointing. A second call has no effect."""
        while self._undo:
            self._undo.pop()()

    def replace(self, module: nn.Module, name: str, value: object) -> None:
        """Set an attribute of a module until `remove`."""
        attributes = vars(module)
        if name in attributes:
            self._undo.append(partial(attributes.update, {name: attributes[name]}))
        else:
            self._undo.append(partial(attributes.pop, name))
        attributes[name] = value

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def set_grad_checkpoint(
    model: nn.Module,
    *,
    depth: Mapping[str, int | None] | None = None,
    others: Sequence[str] = (),
    activations: HostActivations | None = None,
    keep_attention: bool = False,
) -> GradCheckpoint:
    """Checkpoint the blocks of a model, that is, the modules in its `ModuleList`s, and the modules at `others`.

    Checkpoints do not nest, and without gradients there are none. Raises ValueError if the model has checkpoints.

    Args:
        depth: path of a `ModuleList` -> number of blocks to checkpoint, from the first. None, or no entry, means all.
            The last blocks are the best to skip: backward frees their activations before it recomputes the others.
        activations: storage for the inputs of checkpoints. None keeps them on their device.
        keep_attention: save the results of torch's own attention instead of recomputing them (selective checkpointing).
    """

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Look up forward in the class: the copy of a module calls its own forward, and FSDP2 may change the class.
        return run_checkpointed(
            partial(type(self).forward, self),
            args,
            kwargs,
            activations=activations,
            keep_attention=keep_attention,
            recomputing=vars(self).get(RECOMPUTING),
        )

    vars(forward)[_OURS] = True
    done = GradCheckpoint([*(path for path in blocks_of(model) if _has_checkpoint(path, depth or {})), *others])
    for path in done.paths:
        module = model.get_submodule(path)
        if "forward" in vars(module):
            done.remove()
            raise ValueError(f"{path} is wrapped already: undo that first, with remove()")
        done.replace(module, "forward", MethodType(forward, module))
    return done


def is_checkpointed(module: nn.Module) -> bool:
    """Return whether direct calls of a module are checkpointed."""
    forward = vars(module).get("forward")
    return isinstance(forward, MethodType) and _OURS in vars(forward.__func__)


def blocks_of(model: nn.Module, name: str = "") -> dict[str, nn.Module]:
    """Return the blocks of a model, the entries of its outermost `ModuleList`s, by paths that begin with `name`."""
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules(prefix=name):
        is_inside = any(f"{path}.".startswith(f"{block}.") for block in found)
        if isinstance(module, nn.ModuleList) and not is_inside:
            found |= {f"{path}.{index}".lstrip("."): block for index, block in enumerate(module)}
    return found


def _has_checkpoint(path: str, depth: Mapping[str, int | None]) -> bool:
    stack, _, index = path.rpartition(".")
    count = depth.get(stack)
    return count is None or int(index) < count


def run_checkpointed(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    activations: HostActivations | None = None,
    keep_attention: bool = False,
    recomputing: Callable[[], AbstractContextManager[None]] | None = None,
) -> Any:
    """Call a function inside a checkpoint, unless it is already in one.

    `recomputing` returns the context for its recomputation in backward; see `set_grad_checkpoint` for the others.
    """
    if _inside_checkpoint.get() or not torch.is_grad_enabled():
        return function(*args, **kwargs)
    # Autograd saves only tensors that are arguments themselves, and the rotary tables are in a tuple.
    leaves, structure = tree_flatten((tuple(args), dict(kwargs)))

    def run(*leaves: Any) -> Any:
        args, kwargs = tree_unflatten(list(leaves), structure)
        token = _inside_checkpoint.set(True)
        try:
            return function(*args, **kwargs)
        finally:
            _inside_checkpoint.reset(token)

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        first, second = nullcontext(), nullcontext()
        if keep_attention:
            first, second = create_selective_checkpoint_contexts(_ATTENTION)  # type: ignore[no-untyped-call]
        return first, second if recomputing is None else _within(recomputing, second)

    with nullcontext() if activations is None else activations.offloading():
        return checkpoint(run, *leaves, use_reentrant=False, context_fn=contexts)


@contextmanager
def _within(outer: Callable[[], AbstractContextManager[None]], inner: AbstractContextManager[None]) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(outer())
        stack.enter_context(inner)
        yield
