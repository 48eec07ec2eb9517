"""What a CPU build of torch lacks to hold `cuda` tensors that have no memory, and to go back through them: a guard of
devices, the hooks of CUDA, and streams that do nothing.
"""

import ctypes
import hashlib
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from fake_cuda.streams import Queues

_SOURCE = """
#include <Python.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <new>

namespace {
using namespace c10;
constexpr DeviceIndex DEVICES = 8;
bool is_there = false;
thread_local DeviceIndex current = 0;

struct Streams {
  int64_t (*current)();
  void (*use)(int64_t stream);
  int64_t (*record)(int64_t stream);
  void (*wait)(int64_t event, int64_t stream);
} streams;

// Python may be asked on the way of an exception, which stays as it is.
struct Asking {
  PyGILState_STATE lock = PyGILState_Ensure();
  PyObject *type, *value, *trace;
  Asking() { PyErr_Fetch(&type, &value, &trace); }
  ~Asking() {
    PyErr_Restore(type, value, trace);
    PyGILState_Release(lock);
  }
};

DeviceIndex index_of(Device device) { return device.has_index() ? device.index() : current; }

struct Guard final : impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device getDevice() const override { return Device(DeviceType::CUDA, current); }
  void setDevice(Device device) const override { current = index_of(device); }
  void uncheckedSetDevice(Device device) const noexcept override { current = index_of(device); }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    current = index_of(device);
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return is_there ? DEVICES : 1; }
  Stream getDefaultStream(Device device) const override {
    return Stream(Stream::DEFAULT, Device(DeviceType::CUDA, index_of(device)));
  }
  Stream getStream(Device device) const override {
    if (!is_there) return getDefaultStream(device);
    Asking asking;
    return Stream(Stream::UNSAFE, Device(DeviceType::CUDA, index_of(device)), streams.current());
  }
  Stream exchangeStream(Stream stream) const override {
    Stream before = getStream(stream.device());
    if (is_there && before.id() != stream.id()) {
      Asking asking;
      streams.use(stream.id());
    }
    return before;
  }
  void record(void** event, const Stream& stream, const DeviceIndex, const EventFlag) const override {
    if (!is_there) return;
    Asking asking;
    *event = reinterpret_cast<void*>(streams.record(stream.id()) + 1);
  }
  void block(void* event, const Stream& stream) const override {
    if (!is_there || !event) return;
    Asking asking;
    streams.wait(reinterpret_cast<int64_t>(event) - 1, stream.id());
  }
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

struct Hooks final : at::CUDAHooksInterface {
  bool isBuilt() const override { return is_there; }
  bool isAvailable() const override { return is_there; }
  bool hasPrimaryContext(DeviceIndex) const override { return is_there; }
};
} // namespace

extern "C" void appear(const Streams* with) {
  // torch asks for its hooks once, and may have.
  new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) Hooks();
  streams = *with;
  is_there = true;
}
extern "C" void disappear() { is_there = false; }
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
    _library()
    return None


def why_no_backward() -> str | None:
    """Return why no training can be rehearsed here, where a GPU can; None: it can."""
    return None if torch.version.cuda is None else "autograd of a torch for CUDA asks the driver for streams"


class _Callbacks(ctypes.Structure):
    _fields_ = (
        ("current", ctypes.CFUNCTYPE(ctypes.c_int64)),
        ("use", ctypes.CFUNCTYPE(None, ctypes.c_int64)),
        ("record", ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)),
        ("wait", ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)),
    )


@contextmanager
def accelerator(queues: Queues) -> Iterator[None]:
    """Let autograd take `cuda` for an accelerator inside the block, and go back on the calling thread."""
    kinds = [kind for _, kind in _Callbacks._fields_]
    functions = (queues.autograd_current, queues.autograd_use, queues.autograd_record, queues.autograd_wait)
    callbacks = _Callbacks(*(kind(function) for kind, function in zip(kinds, functions, strict=True)))
    library = _library()
    library.appear(ctypes.byref(callbacks))
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        library.disappear()


@cache
def _library() -> ctypes.CDLL:
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
    name = f"osora_device_guard_{key}"
    cpp_extension.load(name, [str(source)], build_directory=str(folder), extra_cflags=["-O0"], is_python_module=False)
    return ctypes.CDLL(str(folder / f"{name}.so"))
