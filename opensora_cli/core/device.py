"""Devices: their choice, memory, precision, streams, events, and page-locked memory of their copies.

Besides attention backends and env-check, no other module calls the functions that torch has for one vendor. torch gives
those of each type of accelerator the same names, in `torch.cuda`, `torch.xpu`, `torch.npu` and `torch.mps`.
`torch.accelerator` knows only the current type, and lacks names, limits, and events with times.
"""

import gc
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil  # type: ignore[import-untyped]  # it ships none
import torch
from torch import Tensor

from opensora_cli.core.device_names import ACCELERATORS, GPU
from opensora_cli.core.exceptions import HardwareError, RequestError
from opensora_cli.core.limits import read_private_memory

GIB = 2**30
_PORTABLE = 1  # cudaHostRegisterPortable: valid for every device
_RESET_PEAK = Path("/proc/self/clear_refs")
"""Linux: writing 5 resets the peak of the process to its current memory."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_DTYPES |= {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


# Choice.


def pick_device(name: str) -> torch.device:
    """Return the device for a valid name, or raise HardwareError if this machine lacks it.

    `auto` is the first GPU if there is one, else the CPU.
    """
    if name == "cpu" or (name == "auto" and not has_gpu()):
        return torch.device("cpu")
    kind, _, number = (GPU if name == "auto" else name).partition(":")
    count, index = device_count(kind), int(number or 0)
    if not count:
        cause, hint = _why_absent(kind)
        raise HardwareError(f"device={name} is not there: {cause}", hint=hint)
    if index >= count:
        there = ", ".join(f"{kind}:{each}" for each in range(count))
        raise HardwareError(f"device={name} is not there: this machine has {there}")
    return torch.device(kind, index)


def _why_absent(kind: str) -> tuple[str, str]:
    if kind != GPU:
        return f"torch {torch.__version__} finds none", "use --device cpu, or install the torch of its vendor"
    if torch.version.cuda:
        return "no usable NVIDIA GPU was found", "use --device cpu, or fix the driver"
    return f"this is a torch without CUDA ({torch.__version__})", "use --device cpu, or install a torch with CUDA"


def has_gpu() -> bool:
    return torch.cuda.is_available()


def device_count(kind: str = GPU) -> int:
    module: ModuleType | None = getattr(torch, kind, None)
    return 0 if module is None else int(module.device_count())


def is_accelerator(device: torch.device) -> bool:
    """Return whether a device has memory of its own and works asynchronously."""
    return device.type in ACCELERATORS


def is_gpu(device: torch.device) -> bool:
    return device.type == GPU


def device_name(device: torch.device) -> str:
    read: Callable[[torch.device], str] | None = getattr(device_module(device), "get_device_name", None)
    return device.type if read is None else read(device)


def capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def use_device(device: torch.device) -> None:
    """Make an accelerator the current device of this process; no effect for the CPU."""
    if is_accelerator(device) and device.type != "mps":
        device_module(device).set_device(device)


def current_gpu() -> torch.device:
    return torch.device(GPU, torch.cuda.current_device())


def current_device() -> torch.device:
    return current_gpu() if has_gpu() else torch.device("cpu")


def collective_backends(kind: str) -> str:
    """Return the backends for `dist.init_process_group`: gloo for CPUs, and additionally that of the accelerator.

    With both, each collective uses the backend for the device of its tensor, so that small messages of the host need
    no GPU.
    """
    own = {GPU: "nccl", "xpu": "xccl", "npu": "hccl"}.get(kind)
    return "gloo" if own is None else f"cpu:gloo,{kind}:{own}"


def device_module(device: torch.device) -> Any:
    """Return the module of torch for the type of a device, such as `torch.cuda`."""
    return torch.get_device_module(device)


# Memory.


def free_and_total_bytes(device: torch.device) -> tuple[int, int]:
    """Return the free bytes, with those that the allocator caches, and the total bytes of a device or the host."""
    if not is_accelerator(device):
        memory = read_private_memory()
        return memory.free_bytes, memory.total_bytes
    if device.type == "mps":
        total = torch.mps.recommended_max_memory()
        return total - allocated_bytes(device), total
    module = device_module(device)
    free, total = module.mem_get_info(device)
    return free + module.memory_reserved(device) - module.memory_allocated(device), total


def allocated_bytes(device: torch.device) -> int:
    if device.type == "mps":
        return int(torch.mps.current_allocated_memory())
    return int(device_module(device).memory_allocated(device))


def reserved_bytes(device: torch.device) -> int:
    if device.type == "mps":
        return int(torch.mps.driver_allocated_memory())
    return int(device_module(device).memory_reserved(device))


def has_peaks(device: torch.device) -> bool:
    return is_accelerator(device) and device.type != "mps"


def peak_allocated_bytes(device: torch.device) -> int:
    return int(device_module(device).max_memory_allocated(device))


def peak_reserved_bytes(device: torch.device) -> int:
    return int(device_module(device).max_memory_reserved(device))


def start_peak_memory(device: torch.device) -> bool:
    """Reset the peaks of memory; return False if only the peak since process start is known: not Linux."""
    if has_peaks(device):
        device_module(device).reset_peak_memory_stats(device)
        return True
    try:
        _RESET_PEAK.write_text("5")
    except OSError:
        return False
    return True


def peak_memory_gib(device: torch.device) -> dict[str, float]:
    """Return the peak of memory since `start_peak_memory`, or else since process start, under its name.

    On a CPU it is that of the whole process, with mapped files of weights.
    """
    if has_peaks(device):
        return {"peak_allocated_gib": round(peak_allocated_bytes(device) / GIB, 3)}
    return {"peak_resident_gib": round(peak_resident_bytes() / GIB, 3)}


def peak_resident_bytes() -> int:
    """Return the peak of resident memory of this process, with mapped files; see `peak_memory_gib`.

    Without a known peak, as on macOS, it is the present memory.
    """
    status = Path("/proc/self/status").read_text() if sys.platform == "linux" else ""
    if peak := re.search(r"^VmHWM:\s*(\d+) kB", status, re.MULTILINE):
        return int(peak[1]) * 1024
    memory = psutil.Process().memory_info()
    return int(getattr(memory, "peak_wset", memory.rss))


def release_memory(device: torch.device) -> None:
    gc.collect()
    if is_accelerator(device):
        device_module(device).empty_cache()


@contextmanager
def limited_memory(device: torch.device, limit: int | None) -> Iterator[None]:
    """Limit this process to `limit` bytes of a GPU inside the block; other devices have no limit."""
    if limit is None or not is_gpu(device):
        yield
        return
    total = torch.cuda.get_device_properties(device).total_memory
    before = torch.cuda.get_per_process_memory_fraction(device)
    torch.cuda.set_per_process_memory_fraction(min(limit / total, 1.0), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)


# Precision.


def torch_dtype(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise RequestError(f"dtype={name!r} is not one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which parts of a sum are added: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def multiplies_bf16(device: torch.device) -> bool:
    """Return whether a device has native bfloat16 matmul; without it, float32 is far faster."""
    return device.type != "cpu" or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


# Time and order.


def synchronize(device: torch.device) -> None:
    """Wait until an accelerator has done all queued work; a CPU has no queue."""
    if is_accelerator(device):
        device_module(device).synchronize(*([] if device.type == "mps" else [device]))


def timed(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds until `run` has returned and the device has finished its work."""
    start = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - start


def has_streams(device: torch.device) -> bool:
    """Return whether copies of a device can run beside its computation, in streams of their own."""
    return is_accelerator(device) and hasattr(device_module(device), "Stream")


def sleeping_event(device: torch.device) -> Any:
    """Return an event after the queued work of the current stream. Its `synchronize` sleeps instead of polling."""
    # Events of other vendors always choose their own way of waiting.
    event = torch.cuda.Event(blocking=True) if is_gpu(device) else device_module(device).Event()  # type: ignore[no-untyped-call]
    event.record(device_module(device).current_stream(device))
    return event


def timing_event(device: torch.device) -> Any:
    """Return an event after the queued work of the current stream, for `seconds_between`."""
    event = device_module(device).Event(enable_timing=True)
    event.record()
    return event


def seconds_between(start: Any, end: Any) -> float:
    return float(start.elapsed_time(end)) / 1e3


def profiler_range(name: str) -> AbstractContextManager[Any]:
    context: AbstractContextManager[Any] = torch.cuda.nvtx.range(name)
    return context


def random_state_kept(device: torch.device) -> AbstractContextManager[None]:
    """Return a context whose end restores the states of torch's generators of the CPU and of `device`."""
    if not is_accelerator(device):
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[device], device_type=device.type)


# Copies.


def queued_copy(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device without waiting for queued work; a GPU copies it in the order of its queue."""
    if is_gpu(device) and tensor.device.type == "cpu":
        # torch reuses this pinned memory only after the copy is done.
        tensor = torch.empty_like(tensor, pin_memory=True).copy_(tensor)
    return tensor.to(device, non_blocking=True)


def lock_pages(memory: Tensor, device: torch.device) -> bool:
    """Page-lock host memory for asynchronous copies of a GPU; return False if the system refuses."""
    with torch.cuda.device(device):  # otherwise a CUDA context is created on the current GPU
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        return int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE)) == 0


def unlock_pages(memory: Tensor, device: torch.device) -> None:
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]
