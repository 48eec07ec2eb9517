"""Hardware of a run: its device, memory and precision, and out-of-memory errors."""

import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

import opensora_cli
from opensora_cli.core.device import device_name, free_and_total_bytes, is_accelerator, pick_device, torch_dtype
from opensora_cli.core.device_names import indexed
from opensora_cli.core.exceptions import HardwareError
from opensora_cli.core.reading import is_lack_of_memory
from opensora_cli.settings.generate import GenerateSettings

T = TypeVar("T")

# Messages of CUDA when it loads a kernel or locks memory, and of its libraries.
_NO_DEVICE_MEMORY = ("CUDA error: out of memory", "STATUS_ALLOC_FAILED")


class OutOfMemoryError(HardwareError):
    """A stage needs more memory than the device has."""


UNKNOWN_BYTES = sys.maxsize
"""Stands for the memory of an unknown device, in which everything fits."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """Device and precision of a run."""

    device: torch.device
    device_name: str
    dtype: torch.dtype
    free_bytes: int
    """`UNKNOWN_BYTES` if the device was not asked, or is not in this machine."""
    total_bytes: int
    host_bytes: int | None = None
    """Host memory of another machine that a run is planned for; None means this machine."""

    @property
    def is_here(self) -> bool:
        """Whether the run is on this machine."""
        return self.host_bytes is None

    @property
    def memory_is_known(self) -> bool:
        """Whether the device was asked for its memory."""
        return self.free_bytes < UNKNOWN_BYTES

    @property
    def dtype_name(self) -> str:
        """Name of the dtype, such as bfloat16."""
        return str(self.dtype).removeprefix("torch.")


def pick_hardware(device: str, dtype: str) -> Hardware:
    """Return the device and dtype that `runtime.device` and `runtime.dtype` mean on this machine.

    The dtype `auto` is bfloat16 on accelerators, float32 on a CPU. Raises HardwareError if there is no such device.
    """
    chosen = pick_device(device)
    is_cpu = chosen.type == "cpu"
    if dtype == "auto":
        dtype = "float32" if is_cpu else "bfloat16"
    name = platform.processor() or platform.machine() or "CPU" if is_cpu else device_name(chosen)
    return Hardware(chosen, name, torch_dtype(dtype), *free_and_total_bytes(chosen))


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an exception means that a device ran out of memory."""
    if isinstance(error, torch.OutOfMemoryError) or is_lack_of_memory(error):
        return True
    return any(text in str(error) for text in _NO_DEVICE_MEMORY)


def unless_out_of_memory(run: Callable[[], T]) -> T | None:
    """Return the result of `run`, or None if memory was not enough; the memory of `run` can be released afterwards."""
    try:
        return run()
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return None


@contextmanager
def out_of_memory_reported(where: str = "", *, hint: str) -> Iterator[None]:
    """Turn an out-of-memory error of any device inside the block into an OutOfMemoryError that names `where`."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemoryError(f"out of memory{where}: {' '.join(str(error).split())[:200]}", hint=hint) from error


def versions() -> dict[str, str]:
    """Return the versions that decide results."""
    return {
        "osora": opensora_cli.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def rank_hardware(settings: GenerateSettings, *, device: str | None = None) -> Hardware:
    """Return the device of a rank, by default that of `settings`; ranks on the CPU of a machine share its memory."""
    parallel = settings.parallel
    if device is None and parallel.devices is not None and parallel.world_size == 1:
        device = indexed(parallel.devices[0])
    hardware = pick_hardware(device or settings.runtime.device, settings.runtime.dtype)
    if is_accelerator(hardware.device):
        return hardware
    return replace(hardware, free_bytes=hardware.free_bytes // parallel.ranks_per_node)
