"""A GPU that is not there, as `torch.cuda` shows it."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from fake_cuda.log import Log
from fake_cuda.storages import Storages
from fake_cuda.streams import FakeStream, Queues
from torch.backends import cuda

GIB = 2**30
_ALREADY_REGISTERED, _NOT_REGISTERED = 712, 713  # of cudaError


@dataclass(frozen=True, slots=True, kw_only=True)
class GPU:
    """What all GPUs of a machine are."""

    name: str = "fake H100"
    memory_bytes: int = 80 * GIB
    capability: tuple[int, int] = (9, 0)
    count: int = 8
    """On one machine."""
    pinnable_bytes: int = 2**62
    """Of the host's memory."""


class FakeGenerator(torch.Generator):
    """Stands in for a generator of random numbers on any device."""

    def __new__(cls, device: Any = "cpu") -> "FakeGenerator":
        """Make one of the CPU, which knows for which device it is asked."""
        made: FakeGenerator = super().__new__(cls, device="cpu")
        made.fake_device = torch.device(device)
        return made

    fake_device: torch.device


@contextmanager
def fake_gpu(gpu: GPU, log: Log, storages: Storages, queues: Queues) -> Iterator[None]:
    """Let `torch.cuda` be that GPU inside the block."""
    functions = _Functions(gpu, log, storages, queues)
    shown = {name: getattr(functions, name) for name in vars(_Functions) if not name.startswith("_")}
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


class _Functions:
    """Those of `torch.cuda`, by name."""

    def __init__(self, gpu: GPU, log: Log, storages: Storages, queues: Queues) -> None:
        self._gpu, self._log, self._storages, self._queues = gpu, log, storages, queues
        self._device = 0
        self._fraction = 1.0

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        return True

    def device_count(self) -> int:
        return self._gpu.count

    def current_device(self) -> int:
        return self._device

    def set_device(self, device: Any) -> None:
        self._device = self._index(device)

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before, self._device = self._device, self._index(device)
        try:
            yield
        finally:
            self._device = before

    def get_device_name(self, device: Any = None) -> str:
        return self._gpu.name

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        return self._gpu.capability

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        major, minor = self._gpu.capability
        return SimpleNamespace(
            name=self._gpu.name,
            total_memory=self._gpu.memory_bytes,
            major=major,
            minor=minor,
            multi_processor_count=132,
        )

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return self._gpu.memory_bytes - self._live(), self._gpu.memory_bytes

    def memory_allocated(self, device: Any = None) -> int:
        return self._live()

    def memory_reserved(self, device: Any = None) -> int:
        return self._live()

    def max_memory_allocated(self, device: Any = None) -> int:
        return self._log.peak_bytes.get(self._queues.device, 0)

    def max_memory_reserved(self, device: Any = None) -> int:
        return self.max_memory_allocated()

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        self._log.peak_bytes[self._queues.device] = self._live()

    def get_per_process_memory_fraction(self, device: Any = None) -> float:
        return self._fraction

    def set_per_process_memory_fraction(self, fraction: float, device: Any = None) -> None:
        self._fraction = fraction

    def manual_seed_all(self, seed: int) -> None:
        return None

    def empty_cache(self) -> None:
        return None

    def synchronize(self, device: Any = None) -> None:
        self._queues.synchronize()

    def current_stream(self, device: Any = None) -> FakeStream:
        return self._queues.current

    def default_stream(self, device: Any = None) -> FakeStream:
        return self._queues.default

    def set_stream(self, stream: FakeStream) -> None:
        self._queues.use(stream)

    @contextmanager
    def stream(self, stream: FakeStream | None) -> Iterator[None]:
        with self._queues.using(stream):
            yield

    def cudart(self) -> SimpleNamespace:
        return SimpleNamespace(cudaHostRegister=self._register, cudaHostUnregister=self._unregister)

    def _register(self, address: int, num_bytes: int, flags: int) -> int:
        if self._storages.locked_bytes + num_bytes > self._gpu.pinnable_bytes:
            return 2  # cudaErrorMemoryAllocation
        return 0 if self._storages.lock(address, num_bytes) else _ALREADY_REGISTERED

    def _unregister(self, address: int) -> int:
        return 0 if self._storages.unlock(address) else _NOT_REGISTERED

    def _live(self) -> int:
        return self._log.live_bytes.get(self._queues.device, 0)

    def _index(self, device: Any) -> int:
        if isinstance(device, int):
            return device
        index = torch.device(device).index
        return self._device if index is None else index
