"""Devices of this machine: the choice of a device, its memory, peak memory, TF32, and out-of-memory errors."""

import gc
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # it ships none
import torch

import opensora_cli
from opensora_cli.core.dtypes import torch_dtype
from opensora_cli.core.exceptions import HardwareError
from opensora_cli.core.private_memory import read_private_memory
from opensora_cli.core.reading import is_lack_of_memory

GIB = 2**30
_TF32_FROM = (8, 0)
_FORGET_PEAK = Path("/proc/self/clear_refs")
"""Linux: writing 5 resets the peak of the process to its current memory."""

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

    The device `auto` is CUDA if there is a GPU, else the CPU; the dtype `auto` is bfloat16 on CUDA, float32 on a CPU.
    Raises HardwareError if there is no such device.
    """
    chosen = _device(device)
    is_cuda = chosen.type == "cuda"
    if dtype == "auto":
        dtype = "bfloat16" if is_cuda else "float32"
    if is_cuda:
        free, total = torch.cuda.mem_get_info(chosen)
        # Memory that the allocator caches after earlier work is free for the next.
        free += torch.cuda.memory_reserved(chosen) - torch.cuda.memory_allocated(chosen)
        name = torch.cuda.get_device_name(chosen)
    else:
        memory = read_private_memory()
        free, total = memory.free_bytes, memory.total_bytes
        name = platform.processor() or platform.machine() or "CPU"
    return Hardware(chosen, name, torch_dtype(dtype), free, total)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    if name == "cpu":
        return torch.device("cpu")
    match = re.fullmatch(r"cuda(?::(\d+))?", name)
    if match is None:
        raise HardwareError(f"device={name} is not a device: use auto, cpu, cuda or cuda:N")
    if not torch.cuda.is_available():
        if torch.version.cuda:
            cause, hint = "no usable NVIDIA GPU was found", "use --device cpu, or fix the driver"
        else:
            cause = f"this is a torch without CUDA ({torch.__version__})"
            hint = "use --device cpu, or install a torch with CUDA"
        raise HardwareError(f"device={name} is not there: {cause}", hint=hint)
    index, count = int(match[1] or 0), torch.cuda.device_count()
    if index >= count:
        raise HardwareError(
            f"device={name} is not there: this machine has {', '.join(f'cuda:{i}' for i in range(count))}"
        )
    return torch.device("cuda", index)


@contextmanager
def limited_memory(device: torch.device, limit: int | None) -> Iterator[None]:
    """Limit this process to `limit` bytes of a CUDA device inside the block; a CPU has no limit."""
    if limit is None or device.type != "cuda":
        yield
        return
    total = torch.cuda.get_device_properties(device).total_memory
    before = torch.cuda.get_per_process_memory_fraction(device)
    torch.cuda.set_per_process_memory_fraction(min(limit / total, 1.0), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)


@contextmanager
def tf32_products(allowed: bool | None, device: torch.device, *, note: Callable[[str], None]) -> Iterator[None]:
    """Allow or forbid TF32 in float32 matmuls and convolutions inside the block; None changes nothing.

    A CPU has no TF32: `note` gets a line that the setting has no effect. The end of the block restores the switches.
    """
    if allowed is not None and device.type != "cuda":
        note(f"precision.tf32={str(allowed).lower()} has no effect on the device {device}")
    if allowed is None or device.type != "cuda":
        yield
        return
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    switches = (matmul, cudnn.conv, cudnn.rnn)  # type: ignore[attr-defined]  # made at run time
    before = [switch.fp32_precision for switch in switches]

    def allow(products: bool, convolutions: bool) -> None:
        # Not through `fp32_precision`: after that torch 2.13 refuses to read these two, and torch.compile reads them.
        matmul.allow_tf32, cudnn.allow_tf32 = products, convolutions

    allow(allowed, allowed)
    try:
        yield
    finally:
        allow(before[0] == "tf32", before[1] == "tf32")
        for switch, precision in zip(switches, before, strict=True):
            switch.fp32_precision = precision


def multiplies_bf16(device: torch.device) -> bool:
    """Return whether a device has native bfloat16 matmul; without it, float32 is far faster."""
    return device.type != "cpu" or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def tf32_in_use(device: torch.device) -> dict[str, bool] | None:
    """Return whether float32 matmuls and convolutions use TF32 now, or None on a device without TF32."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < _TF32_FROM:
        return None
    convolutions = torch.backends.cudnn.conv  # type: ignore[attr-defined]  # made at run time
    kinds = {"products": torch.backends.cuda.matmul, "convolutions": convolutions}
    return {name: kind.fp32_precision == "tf32" for name, kind in kinds.items()}


def start_peak_memory(device: torch.device) -> bool:
    """Reset the peak that `peak_memory_gib` returns; return False if only the peak since process start is known.

    On a CPU this needs Linux.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        _FORGET_PEAK.write_text("5")
    except OSError:
        return False
    return True


def peak_memory_gib(device: torch.device) -> dict[str, float]:
    """Return the peak of memory since `start_peak_memory`, or else since process start, under its name.

    The name is `peak_allocated_gib` on CUDA. On a CPU it is `peak_resident_gib`, of the whole process, with mapped
    files of weights.
    """
    if device.type == "cuda":
        return {"peak_allocated_gib": round(torch.cuda.max_memory_allocated(device) / GIB, 3)}
    return {"peak_resident_gib": round(peak_resident_bytes() / GIB, 3)}


def timed(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds until `run` has returned and the device has finished its work."""
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def peak_resident_bytes() -> int:
    """Return the peak of resident memory of this process, with mapped files; see `peak_memory_gib`."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    if sys.platform == "linux":
        # getrusage starts with the peak of the process that this one was forked from.
        peak = re.search(r"^VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
        if peak is not None:
            return int(peak[1]) * 1024
    import resource

    # Kilobytes on Linux, bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def release_memory(device: torch.device) -> None:
    """Free unreferenced memory for the next stage."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an exception means that a device ran out of memory."""
    if isinstance(error, torch.OutOfMemoryError) or is_lack_of_memory(error):
        return True
    return any(text in str(error) for text in _NO_DEVICE_MEMORY)


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
