"""Activation checkpointing (Chen et al. 2016): blocks are recomputed in backward instead of saving their activations.

Blocks are wrapped from outside: the model's code and the names of its parameters stay unchanged. torch's own
non-reentrant checkpointing repeats dropout and autocast, so that gradients are bitwise identical to plain training. It
works inside DDP and FSDP2, in any order of wrapping.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from types import MethodType
from typing import Any, Protocol, Self

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

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


class Offload(Protocol):
    """Storage for the inputs of checkpoints, such as `HostActivations`."""

    def offloading(self) -> AbstractContextManager[object]:
        """Return a context that keeps the tensors that autograd saves inside it."""


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
        before = attributes.get(name)
        self._undo.append(
            partial(attributes.pop, name) if name not in attributes else partial(attributes.update, {name: before})
        )
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
    activations: Offload | None = None,
    keep_attention: bool = False,
) -> GradCheckpoint:
    """Checkpoint the blocks of a model, that is, the modules in its `ModuleList`s, and the modules at `others`.

    Checkpoints do not nest, and without gradients there are none.

    Args:
        depth: path of a `ModuleList` -> number of blocks to checkpoint, from the first. None, or no entry, means all.
            The last blocks are the best to skip: backward frees their activations before it recomputes the others.
        activations: storage for the inputs of checkpoints. None keeps them on their device.
        keep_attention: save the results of torch's own attention instead of recomputing them (selective checkpointing).

    Raises:
        ValueError: A path does not exist, a depth is not possible, or the model is already checkpointed.
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
    done = GradCheckpoint(_choose(model, depth or {}, others))
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


def _choose(model: nn.Module, depth: Mapping[str, int | None], others: Sequence[str]) -> list[str]:
    """Return the paths of the modules to wrap."""
    stacks: dict[str, list[str]] = {}
    for path, module in model.named_modules():
        # A stack within a block belongs to the block.
        is_inside = any(path.startswith(f"{block}.") for blocks in stacks.values() for block in blocks)
        if isinstance(module, nn.ModuleList) and not is_inside:
            stacks[path] = [f"{path}.{name}" if path else name for name, _ in module.named_children()]
    unknown = [path for path in depth if path not in stacks]
    unknown += [path for path in others if path not in dict(model.named_modules())]
    if unknown:
        raise ValueError(f"{type(model).__name__} has no {', '.join(unknown)}; its stacks are {', '.join(stacks)}")
    wrapped = []
    for path, blocks in stacks.items():
        count = depth.get(path)
        if count is not None and not 0 <= count <= len(blocks):
            raise ValueError(f"depth of {path!r} is {count}: use 0 to {len(blocks)}")
        wrapped += blocks[:count]
    return wrapped + list(others)


def run_checkpointed(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    activations: Offload | None = None,
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
