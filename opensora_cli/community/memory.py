"""Functions for memory: offloaded and recomputed activations, streamed weights, the largest batch."""

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from opensora_cli.core.device import (
    free_and_total_bytes,
    has_peaks,
    peak_allocated_bytes,
    pick_device,
    reset_peaks,
    synchronize,
)
from opensora_cli.core.progress import SilentReporter
from opensora_cli.memory import activations, checkpointing
from opensora_cli.memory.activations import OffloadedActivation
from opensora_cli.memory.checkpointing import GradCheckpoint
from opensora_cli.memory.checkpointing import auto_grad_checkpoint as auto_grad_checkpoint
from opensora_cli.memory.counting import TensorBytes
from opensora_cli.memory.streaming import stream_model


class ActivationManager(activations.ActivationManager):
    """Stack of tensors in host memory. Without a buffer, `offload`, `onload` and `offloading` have no effect."""

    # Whether there is a buffer, its number of elements, and the flat buffer.
    enable, total_size = False, 0
    buffer: Tensor | None = None

    def setup_buffer(self, numel: int, dtype: torch.dtype, *, device: str = "cpu") -> None:
        """Allocate a buffer of `numel` elements, which replaces an earlier one."""
        super().setup_buffer(numel, dtype, device=device)
        assert self._stack is not None
        self.enable, self.buffer, self.total_size = True, self._stack.elements, numel

    @property
    def avail_offset(self) -> int:
        """Number of used elements of the buffer."""
        return self._stack.used if self._stack else 0

    def offload(self, x: Tensor) -> OffloadedActivation | None:  # type: ignore[override]
        """Move the data of `x` to the buffer, in place. `onload` of `x` or of the returned handle moves it back."""
        if not self.enable or x in self._ignored:
            return None
        handle = super().offload(x)
        synchronize(x.device)
        x.data = x.data if handle.host is None else handle.host
        self._moved.append((x, handle))
        return handle

    def onload(self, x: Tensor | OffloadedActivation) -> Tensor | None:  # type: ignore[override]
        """Move the last offloaded tensor back, and return it. Raises AssertionError for any other tensor."""
        if not self.enable or (isinstance(x, Tensor) and x in self._ignored):
            return None
        if not self._moved or not any(x is each for each in self._moved[-1]):
            raise AssertionError("wrong order: onload first what was offloaded last")
        tensor, handle = self._moved[-1]
        tensor.data = super().onload(handle)
        self._moved.pop()
        return tensor

    def is_top_tensor(self, x: Tensor) -> bool:
        """Return whether `x` was offloaded last."""
        return bool(self._moved) and self._moved[-1][0] is x

    def add_ignore_tensor(self, x: Tensor) -> None:
        """Never offload `x`."""
        self._ignored[x] = True

    @contextmanager
    def offloading(self) -> Iterator[None]:
        """Offload the tensors that autograd saves inside the block."""
        if self.enable:
            with super().offloading():
                yield
        else:
            yield

    def reset(self) -> None:
        """Release all space. The data of offloaded tensors is lost."""
        self._moved.clear()
        super().reset()

    @cached_property
    def _moved(self) -> list[tuple[Tensor, OffloadedActivation]]:
        return []

    @cached_property
    def _ignored(self) -> Any:
        return WeakTensorKeyDictionary()


def _used_and_total(device: torch.device) -> tuple[int, int]:
    """Return the used and the total bytes of a device, or on a CPU of the memory that this process can have."""
    free, total = free_and_total_bytes(device)
    return total - free, total


class DynamicActivationManager(ActivationManager):
    """Manager that offloads only while more than a share of the device's memory is in use.

    The share `threshold` is 0 to 1: 0 offloads everything, 1 nothing. Other values raise ValueError.
    """

    def __init__(
        self, threshold: float = 0.8, *, read_memory: Callable[[torch.device], tuple[int, int]] = _used_and_total
    ) -> None:
        super().__init__()
        if not 0 <= threshold <= 1:
            raise ValueError(f"threshold={threshold} must be a share of the device's memory: 0 to 1")
        self.threshold = threshold
        self._read_memory = read_memory
        self._history: deque[int] = deque(maxlen=10_000)
        self._peak = 0

    def adaptive_offload(self, x: Tensor) -> None:
        """Offload `x` if memory is short. The caller must call `onload(x)` in any case."""
        self.offload(x)

    def memory_profiling(self) -> dict[str, Any]:
        """Return the device's used bytes at the peak and at each offload decision, and the used share of the buffer."""
        return {
            "peak_memory": self._peak,
            "allocation_history": list(self._history),
            "buffer_utilization": self.used_bytes / max(self.buffer_bytes, 1),
        }

    def _stays(self, x: Tensor) -> bool:
        if super()._stays(x):
            return True
        used, total = self._read_memory(x.device)
        self._history.append(used)
        self._peak = max(self._peak, used)
        return used <= self.threshold * total


GLOBAL_ACTIVATION_MANAGER = ActivationManager()
"""Manager whose buffer, once set up, holds the inputs of this module's checkpoints."""


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
    of this package compute attention in fp32 by themselves; other modules have to read the attribute.
    """
    if model in _checkpointed:
        _checkpointed.pop(model).remove()
    wrappable = any(callable(vars(module).get("attention")) for module in model.modules())
    _checkpointed[model] = checkpointing.set_grad_checkpoint(
        model, use_fp32_attention and wrappable, gc_step, activations=GLOBAL_ACTIVATION_MANAGER
    )
    for module in model.modules():
        vars(module).update(grad_checkpointing=True, fp32_attention=use_fp32_attention, grad_checkpointing_step=gc_step)


@torch.no_grad()
def memory_offloading_inference(
    model: nn.Module, input_data: Any, *, device: torch.device | str | None = None, resident: int = 2
) -> Any:
    """Return `model(input_data)` on the CPU, computed on the GPU with the weights of few blocks at a time.

    Blocks are the modules in `ModuleList`s and `Sequential`s. The model is on the CPU afterwards.
    """
    chosen = pick_device("auto") if device is None else torch.device(device)
    with stream_model(model, device=chosen, resident=resident):
        output = model(tree_map_only(Tensor, lambda tensor: tensor.to(chosen), input_data))
    return tree_map_only(Tensor, lambda tensor: tensor.cpu(), output)


def adaptive_batch_size(model: nn.Module, input_shape: Sequence[int], max_memory_gb: float = 40) -> int:
    """Return the largest batch, 1 to 1024, of inputs (b, *input_shape) that the model evaluates in 0.8 of the memory.

    Gradients are disabled, and a GB is 2**30 bytes. The result is 1 even if not even one input fits.
    """
    from opensora_cli.engine.mem_profile.batch import largest_batch

    weight = next(model.parameters())
    limit = int(0.8 * max_memory_gb * 2**30)

    @torch.no_grad()
    def peak_of(size: int) -> int:
        inputs = torch.zeros(size, *input_shape, dtype=weight.dtype, device=weight.device)
        if has_peaks(weight.device):
            reset_peaks(weight.device)
            model(inputs)
            return peak_allocated_bytes(weight.device)
        with TensorBytes(limit=limit) as counter:
            counter.add(model)
            model(inputs)
        return int(counter.peak_bytes) + inputs.nbytes

    found = largest_batch(peak_of, of="samples", limit_bytes=limit, device=weight.device, reporter=SilentReporter())
    return max(found.batch_size, 1)
