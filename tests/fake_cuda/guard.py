"""What a CPU build of torch lacks to hold `cuda` tensors that have no memory: a guard of devices that does nothing."""

import hashlib
import shutil
import tempfile
from functools import cache
from pathlib import Path

import torch

_SOURCE = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace c10::impl { C10_REGISTER_GUARD_IMPL(CUDA, NoOpDeviceGuardImpl<DeviceType::CUDA>); }
"""


@cache
def why_impossible() -> str | None:
    """Return why no GPU can be rehearsed here; None: it can, and the guard is registered in this process."""
    if torch.version.cuda is not None:
        return None
    if torch.version.hip is not None:
        return "this is a torch for ROCm"
    if shutil.which("g++") is None and shutil.which("c++") is None:
        return "no C++ compiler, which a CPU build of torch needs for fake CUDA tensors"
    if shutil.which("ninja") is None:
        return "no ninja, which builds the device guard"
    from torch.utils import cpp_extension

    # One folder for all processes and runs of the same torch: who comes second finds it built, or waits for its lock.
    key = hashlib.sha256(f"{torch.__version__} {torch.__file__} {_SOURCE}".encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"osora-device-guard-{key}"
    folder.mkdir(exist_ok=True)
    source = folder / "guard.cpp"
    if not source.exists():
        with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".part", delete=False) as part:
            part.write(_SOURCE)
        Path(part.name).rename(source)
    cpp_extension.load(
        f"osora_device_guard_{key}",
        [str(source)],
        build_directory=str(folder),
        extra_cflags=["-O0"],
        is_python_module=False,
    )
    return None
