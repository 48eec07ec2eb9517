"""Functions for memory: offloaded and recomputed activations, streamed weights, the largest batch."""

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from opensora_cli.core.device import current_device, free_and_total_bytes, has_gpu, release_memory
from opensora_cli.engine.components.hardware import unless_out_of_memory
from opensora_cli.memory import checkpointing
from opensora_cli.memory.checkpointing import GradCheckpoint, HostActivations, run_checkpointed
from opensora_cli.memory.monitor import peak_bytes
from opensora_cli.memory.streaming import stream_model

_THRESHOLD = 0.8


class ActivationManager(HostActivations):
    """Stack of tensors in a host buffer. Before `setup_buffer`, no method has an effect."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer = torch.empty(0)
        # Whether there is a buffer, its number of elements, and how many of them are in use.
        self.enable, self.total_size, self.avail_offset = False, 0, 0
        self._moved: list[tuple[Tensor, torch.device | None]] = []
        self._ignored: Any = WeakTensorKeyDictionary()

    def setup_buffer(self, numel: int, dtype: torch.dtype) -> None:
        """Use a buffer of `numel` elements. It replaces an earlier one, whose tensors stay in that."""
        self.buffer = torch.empty(numel, dtype=dtype, pin_memory=has_gpu())
        self.enable, self.total_size, self.avail_offset = True, numel, 0
        self._moved.clear()

    def offload(self, x: Tensor) -> Tensor | None:
        """Move the data of `x` to the buffer, in place, and return `x`. Raises RuntimeError if it does not fit."""
        if not self.enable or x in self._ignored:
            return None
        start, stop = self.avail_offset, self.avail_offset + x.numel()
        if stop > self.total_size or x.dtype != self.buffer.dtype:
            raise RuntimeError(
                f"the activation buffer has {self.total_size - start} elements of {self.buffer.dtype} left, and "
                f"{x.numel()} of {x.dtype} are needed: call setup_buffer with more, or with this dtype"
            )
        host = self.buffer[start:stop].as_strided(x.shape, torch.empty_like(x, device="meta").stride())
        self._moved.append((x, x.device))
        x.data, self.avail_offset = host.copy_(x.detach()), stop
        return x

    def onload(self, x: Tensor) -> Tensor | None:
        """Move the last offloaded tensor back, and return it. Raises AssertionError for any other tensor."""
        if not self.enable or x in self._ignored:
            return None
        if not self.is_top_tensor(x):
            raise AssertionError("wrong order: onload first what was offloaded last")
        _, device = self._moved.pop()
        if device is not None:
            self.avail_offset -= x.numel()
            x.data = torch.empty_like(x.data, device=device).copy_(x.data)
        return x

    def is_top_tensor(self, x: Tensor) -> bool:
        """Return whether `x` was offloaded last."""
        return bool(self._moved) and self._moved[-1][0] is x

    def add_ignore_tensor(self, x: Tensor) -> None:
        """Never offload `x`."""
        self._ignored[x] = True

    def offloading(self) -> AbstractContextManager[object]:
        """Return a context that keeps the tensors that autograd saves inside it on the host, in memory of their own."""
        return super().offloading() if self.enable else nullcontext()


class DynamicActivationManager(ActivationManager):
    """Manager that offloads only while more than 0.8 of the device's memory is in use."""

    def __init__(self) -> None:
        super().__init__()
        self._history: deque[int] = deque(maxlen=10_000)

    def adaptive_offload(self, x: Tensor) -> None:
        """Offload `x` if memory of its device is short. The caller must call `onload(x)` in any case."""
        free, total = free_and_total_bytes(x.device)
        self._history.append(total - free)
        if total - free > _THRESHOLD * total:
            self.offload(x)
        elif self.enable and x not in self._ignored:
            self._moved.append((x, None))

    def memory_profiling(self) -> dict[str, Any]:
        """Return the device's used bytes at the peak and at each offload decision, and the used share of the buffer."""
        return {
            "peak_memory": max(self._history, default=0),
            "allocation_history": list(self._history),
            "buffer_utilization": self.avail_offset / max(self.total_size, 1),
        }


GLOBAL_ACTIVATION_MANAGER = ActivationManager()
"""Manager of the inputs of this module's checkpoints, which it offloads after `setup_buffer`."""


class CheckpointFunctionWithOffload(torch_checkpoint.CheckpointFunction):
    """Reentrant checkpoint whose inputs are offloaded."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Call `args[0]` with `args[2:]`. `args[1]` is whether the recomputation restores the random state."""
        with GLOBAL_ACTIVATION_MANAGER.offloading():
            return super().apply(*args)  # type: ignore[no-untyped-call]


def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool | None = None, **kwargs: Any) -> Any:
    """Return `function(*args)`, recomputed in backward, with its inputs offloaded; None means not reentrant."""
    with GLOBAL_ACTIVATION_MANAGER.offloading():
        return torch_checkpoint.checkpoint(function, *args, use_reentrant=bool(use_reentrant), **kwargs)


_checkpointed: weakref.WeakKeyDictionary[nn.Module, GradCheckpoint] = weakref.WeakKeyDictionary()


def set_grad_checkpoint(model: nn.Module, use_fp32_attention: bool = False, gc_step: int = 1) -> None:
    """Checkpoint the blocks of a model, with their inputs offloaded; a second call replaces the first.

    Every module gets the attributes `grad_checkpointing`, `fp32_attention` and `grad_checkpointing_step`. Only blocks
    of this package compute attention in fp32 by themselves; other modules have to read the attribute. `gc_step` is the
    number of blocks per checkpoint in a sequence that `auto_grad_checkpoint` runs.
    """
    if gc_step < 1:
        raise ValueError(f"gc_step={gc_step} must be at least 1")
    if model in _checkpointed:
        _checkpointed.pop(model).remove()
    done = _checkpointed[model] = checkpointing.set_grad_checkpoint(model, activations=GLOBAL_ACTIVATION_MANAGER)
    for module in model.modules():
        if use_fp32_attention and callable(attention := vars(module).get("attention")):
            done.replace(module, "attention", partial(_attention_in_fp32, attention))
        vars(module).update(grad_checkpointing=True, fp32_attention=use_fp32_attention, grad_checkpointing_step=gc_step)


def auto_grad_checkpoint(module: nn.Module | Sequence[nn.Module], *args: Any, **kwargs: Any) -> Any:
    """Call a module, or modules one after the other, with the checkpoints that `set_grad_checkpoint` has set.

    In a sequence, the results of a block replace the first arguments of the next one; other arguments stay.
    """
    blocks = list(module) if isinstance(module, nn.ModuleList | nn.Sequential | Sequence) else [module]
    is_on = bool(blocks) and getattr(blocks[0], "grad_checkpointing", False)
    count = int(getattr(blocks[0], "grad_checkpointing_step", 1)) if is_on else max(len(blocks), 1)
    outputs: Any = args[0] if len(args) == 1 else args
    for start in range(0, len(blocks), count):
        run = partial(_run_chain, blocks[start : start + count])
        offload = GLOBAL_ACTIVATION_MANAGER
        outputs = run_checkpointed(run, args, kwargs, activations=offload) if is_on else run(*args, **kwargs)
        args = _next_arguments(args, outputs)
    return outputs


def _run_chain(blocks: Sequence[nn.Module], /, *args: Any, **kwargs: Any) -> Any:
    outputs = None
    for block in blocks:
        outputs = block(*args, **kwargs)
        args = _next_arguments(args, outputs)
    return outputs


def _next_arguments(args: tuple[Any, ...], outputs: Any) -> tuple[Any, ...]:
    replaced = outputs if isinstance(outputs, tuple) else (outputs,)
    return (*replaced, *args[len(replaced) :])


def _attention_in_fp32(attention: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, /) -> Tensor:
    with torch.autocast(q.device.type, enabled=False):
        return attention(q.float(), k.float(), v.float()).to(v.dtype)


@torch.no_grad()
def memory_offloading_inference(model: nn.Module, input_data: Any) -> Any:
    """Return `model(input_data)` on the CPU, computed on the GPU with the weights of few blocks; see `stream_model`."""
    device = current_device()
    with stream_model(model, device=device, resident=2):
        output = model(tree_map_only(Tensor, lambda tensor: tensor.to(device), input_data))
    return tree_map_only(Tensor, lambda tensor: tensor.cpu(), output)


def adaptive_batch_size(model: nn.Module, input_shape: Sequence[int], max_memory_gb: float = 40) -> int:
    """Return the largest batch, 1 to 1024, of inputs (b, *input_shape) that fits in 0.8 of the memory."""
    from opensora_cli.engine.mem_profile.profile import largest_batch

    weight = next(model.parameters())
    held = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    limit = int(_THRESHOLD * max_memory_gb * 2**30)

    @torch.no_grad()
    def evaluate(size: int) -> None:
        model(torch.zeros(size, *input_shape, dtype=weight.dtype, device=weight.device))

    def peak_of(size: int) -> int | None:
        added = unless_out_of_memory(
            lambda: peak_bytes(lambda: evaluate(size), device=weight.device, limit=limit - held)
        )
        release_memory(weight.device)
        return None if added is None else held + added

    return max(largest_batch(peak_of, limit_bytes=limit).batch_size, 1)
