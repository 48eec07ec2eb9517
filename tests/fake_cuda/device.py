"""A GPU that is not there, as `torch.cuda` shows it."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from fake_cuda.log import Log
from fake_cuda.storages import Storages
from fake_cuda.streams import Queues
from torch.backends import cuda

GIB = 2**30
GPU_BYTES = 80 * GIB
PER_MACHINE = 8
_NAME, _CAPABILITY = "fake H100", (9, 0)
_ALREADY_REGISTERED, _NOT_REGISTERED = 712, 713  # of cudaError


class FakeGenerator(torch.Generator):
    """Stands in for a generator of random numbers on any device."""

    def __new__(cls, device: Any = "cpu") -> "FakeGenerator":
        made: FakeGenerator = super().__new__(cls, device="cpu")
        made.fake_device = torch.device(device)
        return made

    fake_device: torch.device


@contextmanager
def fake_gpu(memory_bytes: int, log: Log, storages: Storages, queues: Queues) -> Iterator[None]:
    """Let `torch.cuda` be a GPU with this memory inside the block."""
    shown = _functions(memory_bytes, log, storages, queues)
    with ExitStack() as patches:
        for name, stand_in in {**shown, "Stream": queues.stream, "Event": queues.event}.items():
            patches.enter_context(mock.patch.object(torch.cuda, name, stand_in))
        patches.enter_context(mock.patch.object(torch, "Generator", FakeGenerator))
        for name in ("is_flash_attention_available", "can_use_flash_attention", "can_use_efficient_attention"):
            patches.enter_context(mock.patch.object(cuda, name, _can))
        yield


def _can(*given: Any, **options: Any) -> bool:
    # A mock would keep the tensors that it is called with.
    return True


def _functions(memory_bytes: int, log: Log, storages: Storages, queues: Queues) -> dict[str, Callable[..., Any]]:
    state = SimpleNamespace(device=0, fraction=1.0)
    major, minor = _CAPABILITY
    properties = SimpleNamespace(
        name=_NAME, total_memory=memory_bytes, major=major, minor=minor, multi_processor_count=132
    )

    def live(device: Any = None) -> int:
        return log.live_bytes.get(queues.device, 0)

    def peak(device: Any = None) -> int:
        return log.peak_bytes.get(queues.device, 0)

    def reset_peak(device: Any = None) -> None:
        log.peak_bytes[queues.device] = live()

    def set_device(device: Any) -> None:
        index = device if isinstance(device, int) else torch.device(device).index
        state.device = state.device if index is None else index

    @contextmanager
    def on_device(device: Any) -> Iterator[None]:
        before = state.device
        set_device(device)
        try:
            yield
        finally:
            state.device = before

    def set_fraction(fraction: float, device: Any = None) -> None:
        state.fraction = fraction

    def register(address: int, num_bytes: int, flags: int) -> int:
        return 0 if storages.lock(address, num_bytes) else _ALREADY_REGISTERED

    def unregister(address: int) -> int:
        return 0 if storages.unlock(address) else _NOT_REGISTERED

    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: True,
        "device_count": lambda: PER_MACHINE,
        "current_device": lambda: state.device,
        "set_device": set_device,
        "device": on_device,
        "get_device_name": lambda device=None: _NAME,
        "get_device_capability": lambda device=None: _CAPABILITY,
        "get_device_properties": lambda device=None: properties,
        "mem_get_info": lambda device=None: (memory_bytes - live(), memory_bytes),
        "memory_allocated": live,
        "memory_reserved": live,
        "max_memory_allocated": peak,
        "max_memory_reserved": peak,
        "reset_peak_memory_stats": reset_peak,
        "get_per_process_memory_fraction": lambda device=None: state.fraction,
        "set_per_process_memory_fraction": set_fraction,
        "manual_seed_all": lambda seed: None,
        "empty_cache": lambda: None,
        "synchronize": lambda device=None: queues.synchronize(),
        "current_stream": lambda device=None: queues.current,
        "default_stream": lambda device=None: queues.default,
        "set_stream": queues.use,
        "stream": queues.using,
        "cudart": lambda: SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister),
    }
