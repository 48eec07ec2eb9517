"""Activation checkpointing (Chen et al. 2016): blocks are recomputed in backward instead of saving their activations.

Blocks are wrapped from outside: the model's code and the names of its parameters stay unchanged. torch's own
non-reentrant checkpointing repeats dropout and autocast, so that gradients are bitwise identical to plain training. It
works inside DDP and FSDP2, in any order of wrapping.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from types import MethodType
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
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
# Attribute of a checkpointed module with its `_Policy`.
_POLICY = "_grad_checkpoint"
_inside_checkpoint: ContextVar[bool] = ContextVar("inside_checkpoint", default=False)


class Offload(Protocol):
    """Storage for the inputs of checkpoints, such as `HostActivations`."""

    def offloading(self) -> AbstractContextManager[object]:
        """Return a context that keeps the tensors that autograd saves inside it."""


@dataclass(frozen=True, slots=True, eq=False)
class _Policy:
    """Options of checkpointing for a module."""

    gc_step: int
    activations: Offload | None
    keep_attention: bool


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
    use_fp32_attention: bool = False,
    gc_step: int = 1,
    *,
    depth: Mapping[str, int | None] | None = None,
    others: Sequence[str] = (),
    activations: Offload | None = None,
    keep_attention: bool = False,
) -> GradCheckpoint:
    """Checkpoint the blocks of a model, that is, the modules in its `ModuleList`s.

    Other modules of the model are checkpointed in calls through `auto_grad_checkpoint`. Checkpoints do not nest, and
    without gradients there are none.

    Args:
        use_fp32_attention: call the `attention` function of the checkpointed blocks in fp32 with autocast off, and cast
            its result back to the dtype of the values. A function that casts its arguments itself still does so.
        gc_step: number of blocks per checkpoint in a sequence that `auto_grad_checkpoint` runs. Blocks that a model
            calls one by one have a checkpoint each.
        depth: path of a `ModuleList` -> number of blocks to checkpoint, from the first. None, or no entry, means all.
            The last blocks are the best to skip: backward frees their activations before it recomputes the others.
        activations: storage for the inputs of checkpoints. None keeps them on their device.
        keep_attention: save the results of torch's own attention instead of recomputing them (selective checkpointing).

    Raises:
        ValueError: gc_step is under 1, a path does not exist, a depth is not possible, no attention can be wrapped, or
            the model is already checkpointed.
    """
    if gc_step < 1:
        raise ValueError(f"gc_step={gc_step} must be at least 1")
    wrapped, left_out = _choose(model, depth or {}, others)
    policy = _Policy(gc_step, activations, keep_attention)
    done = GradCheckpoint(wrapped)
    attentions = 0
    for path, module in model.named_modules():
        if any(_is_at_or_below(path, place) for place in left_out):
            continue
        if _POLICY in vars(module) or (path in wrapped and "forward" in vars(module)):
            done.remove()
            raise ValueError(f"{path or type(module).__name__} is wrapped already: undo that first, with remove()")
        # A module that contains blocks is no block itself.
        if path in wrapped or not any(_is_at_or_below(block, path) for block in wrapped):
            done.replace(module, _POLICY, policy)
        if path in wrapped:
            done.replace(module, "forward", MethodType(_checkpointed_forward, module))
        if use_fp32_attention and callable(vars(module).get("attention")):
            done.replace(module, "attention", _Float32Attention(vars(module)["attention"]))
            attentions += 1
    if use_fp32_attention and not attentions:
        done.remove()
        raise ValueError("use_fp32_attention: no checkpointed block has an attribute `attention` that is a function")
    return done


def auto_grad_checkpoint(module: nn.Module | Sequence[nn.Module], *args: Any, **kwargs: Any) -> Any:
    """Call a module, or modules one after the other, with the checkpoints that `set_grad_checkpoint` has set.

    In a sequence, the results of a block replace the first arguments of the next one; other arguments stay. So
    `auto_grad_checkpoint(model.double_blocks, latents, text, vector, rotary)` runs the whole stack. Every block gets
    `kwargs`.
    """
    if isinstance(module, nn.ModuleList | nn.Sequential | Sequence):
        return _run_sequence(list(module), args, kwargs)
    policy = _policy_of(module)
    if policy is None or "forward" in vars(module):
        return module(*args, **kwargs)
    return _run(module, policy, args, kwargs)


def is_checkpointed(module: nn.Module) -> bool:
    """Return whether direct calls of a module are checkpointed."""
    return _POLICY in vars(module) and "forward" in vars(module)


def _choose(model: nn.Module, depth: Mapping[str, int | None], others: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the paths of the modules to wrap, and the paths of the skipped blocks."""
    stacks: dict[str, list[str]] = {}
    for path, module in model.named_modules():
        # A stack within a block belongs to the block.
        if isinstance(module, nn.ModuleList) and not any(
            _is_at_or_below(path, b) for bs in stacks.values() for b in bs
        ):
            stacks[path] = [f"{path}.{name}" if path else name for name, _ in module.named_children()]
    wrapped, left_out = [], []
    for path, blocks in stacks.items():
        count = depth.get(path)
        if count is not None and not 0 <= count <= len(blocks):
            raise ValueError(f"depth of {path!r} is {count}: use 0 to {len(blocks)}")
        wrapped += blocks[:count]
        left_out += blocks[len(blocks) if count is None else count :]
    unknown = [path for path in depth if path not in stacks]
    unknown += [path for path in others if path not in dict(model.named_modules())]
    if unknown:
        raise ValueError(f"{type(model).__name__} has no {', '.join(unknown)}; its stacks are {', '.join(stacks)}")
    return wrapped + list(others), left_out


def _is_at_or_below(path: str, place: str) -> bool:
    return path == place or not place or path.startswith(f"{place}.")


def _checkpointed_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    # Look up forward in the class: the copy of a module calls its own forward, and FSDP2 may change the class.
    forward, recomputing = partial(type(self).forward, self), vars(self).get(RECOMPUTING)
    return _run(forward, vars(self)[_POLICY], args, kwargs, recomputing=recomputing)


def _run_sequence(blocks: Sequence[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    outputs: Any = args[0] if len(args) == 1 else args
    for policy, alike in groupby(blocks, key=_policy_of):
        stack = list(alike)
        step = policy.gc_step if policy else len(stack)
        for start in range(0, len(stack), step):
            run = partial(_run_chain, stack[start : start + step])
            outputs = _run(run, policy, args, kwargs) if policy else run(*args, **kwargs)
            args = _next_arguments(args, outputs)
    return outputs


def _policy_of(module: nn.Module) -> _Policy | None:
    return vars(module).get(_POLICY)


def _run_chain(blocks: Sequence[nn.Module], /, *args: Any, **kwargs: Any) -> Any:
    outputs = None
    for block in blocks:
        outputs = block(*args, **kwargs)
        args = _next_arguments(args, outputs)
    return outputs


def _next_arguments(args: tuple[Any, ...], outputs: Any) -> tuple[Any, ...]:
    replaced = outputs if isinstance(outputs, tuple) else (outputs,)
    return (*replaced, *args[len(replaced) :])


def _run(
    function: Callable[..., Any],
    policy: _Policy,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    recomputing: Callable[[], AbstractContextManager[None]] | None = None,
) -> Any:
    """Call a function inside a checkpoint, unless it is already in one."""
    if _inside_checkpoint.get() or not torch.is_grad_enabled():
        return function(*args, **kwargs)
    # Autograd saves only tensors that are arguments themselves, and the rotary tables are in a tuple.
    leaves, structure = tree_flatten((args, kwargs))

    def run(*leaves: Any) -> Any:
        args, kwargs = tree_unflatten(list(leaves), structure)
        token = _inside_checkpoint.set(True)
        try:
            return function(*args, **kwargs)
        finally:
            _inside_checkpoint.reset(token)

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        first, second = nullcontext(), nullcontext()
        if policy.keep_attention:
            first, second = create_selective_checkpoint_contexts(_ATTENTION)  # type: ignore[no-untyped-call]
        return first, second if recomputing is None else _within(recomputing, second)

    with nullcontext() if policy.activations is None else policy.activations.offloading():
        return checkpoint(run, *leaves, use_reentrant=False, context_fn=contexts)


@contextmanager
def _within(outer: Callable[[], AbstractContextManager[None]], inner: AbstractContextManager[None]) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(outer())
        stack.enter_context(inner)
        yield


class _Float32Attention:
    """Attention that computes in fp32 for arguments of any dtype."""

    def __init__(self, attention: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        self._attention = attention

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, /) -> Tensor:
        with torch.autocast(q.device.type, enabled=False):
            return self._attention(q.float(), k.float(), v.float()).to(v.dtype)
