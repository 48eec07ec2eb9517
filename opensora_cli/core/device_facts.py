"""GPUs of this machine, their driver and their links.

The facts come from torch, NVLink from nvidia-ml-py if it is installed, and the driver from nvidia-smi.
"""

import importlib
import importlib.util
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations
from types import ModuleType

import torch

from opensora_cli.core.device import device_count
from opensora_cli.core.device_names import UNTESTED

_SMI_SECONDS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFacts:
    """Build of torch, and its view of CUDA."""

    version: str
    cuda: str | None = None
    """CUDA version of the build. None means a CPU build."""
    cuda_available: bool = False
    nccl: str | None = None
    cudnn: str | None = None
    untested: tuple[str, ...] = ()
    """Types of other accelerators that torch can use."""

    def library_versions(self) -> dict[str, str]:
        """Return the versions of the GPU libraries in use; empty without a GPU."""
        found = {"CUDA": self.cuda, "NCCL": self.nccl} if self.cuda_available else {}
        return {name: version for name, version in found.items() if version}


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """CUDA device that torch sees."""

    index: int
    name: str
    capability: tuple[int, int]
    total_bytes: int
    free_bytes: int
    is_mig: bool = False
    """Whether the device is a MIG slice of a GPU."""
    failure: str | None = None
    """Error of a small sum, as without kernels for this GPU. None means success."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverFacts:
    """Report of the NVIDIA driver. It does not depend on the build of torch."""

    version: str | None = None
    """Version of the driver. None means no driver."""
    gpus: tuple[str, ...] = ()
    failure: str | None = None
    """Error of an installed nvidia-smi that fails."""

    @property
    def major(self) -> int | None:
        head = (self.version or "").partition(".")[0]
        return int(head) if head.isdigit() else None


class LinkKind(StrEnum):
    """Kind of connection between two GPUs."""

    NVLINK = "NVLink"
    PEER = "PCI, card to card"
    HOST = "through host memory"


@dataclass(frozen=True, slots=True)
class LinkFacts:
    """Link between two GPUs."""

    first: int
    second: int
    kind: LinkKind


def read_torch() -> TorchFacts:
    available = torch.cuda.is_available()
    # Raises if the version of the library does not match the build.
    cudnn = torch.backends.cudnn.version() if torch.version.cuda else None  # type: ignore[no-untyped-call]
    base = 10_000 if (cudnn or 0) >= 90_000 else 1_000
    has_nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    return TorchFacts(
        version=torch.__version__,
        cuda=torch.version.cuda,
        cuda_available=available,
        # NCCL is part of the build, so that it needs no driver.
        nccl=".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None,  # type: ignore[no-untyped-call]
        # 9.1.0 is 90100; before version 9 it was 8902 for 8.9.2.
        cudnn=None if cudnn is None else f"{cudnn // base}.{cudnn % base // 100}.{cudnn % 100}",
        untested=tuple(kind for kind in UNTESTED if device_count(kind)),
    )


def read_gpus() -> tuple[GpuFacts, ...]:
    found = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        (free, total), name = torch.cuda.mem_get_info(index), torch.cuda.get_device_name(index)
        # CUDA appends the profile of a slice to the name: "NVIDIA A100-SXM4-40GB MIG 1g.5gb".
        found.append(
            GpuFacts(
                index=index,
                name=name,
                capability=torch.cuda.get_device_capability(index),
                total_bytes=total,
                free_bytes=free,
                is_mig=" MIG " in name,
                failure=_failure_of(index),
            )
        )
    return tuple(found)


def _failure_of(index: int) -> str | None:
    try:
        torch.ones(2, device=f"cuda:{index}").sum().item()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


def read_links(gpus: tuple[GpuFacts, ...]) -> tuple[LinkFacts, ...]:
    if len(gpus) < 2:
        return ()
    links = []
    with nvml_gpus(*(gpu.index for gpu in gpus)) as found:
        for first, second in combinations(range(len(gpus)), 2):
            pair = gpus[first].index, gpus[second].index
            kind = LinkKind.PEER if torch.cuda.can_device_access_peer(*pair) else LinkKind.HOST
            if found is not None:
                nvml, handles = found
                state = nvml.nvmlDeviceGetP2PStatus(handles[first], handles[second], nvml.NVML_P2P_CAPS_INDEX_NVLINK)
                kind = LinkKind.NVLINK if state == nvml.NVML_P2P_STATUS_OK else kind
            links.append(LinkFacts(*pair, kind))
    return tuple(links)


@contextmanager
def nvml_gpus(*indexes: int) -> Iterator[tuple[ModuleType, list[object]] | None]:
    """Yield nvidia-ml-py and its handles of torch's GPUs; None if it is not installed or finds no driver."""
    nvml = importlib.import_module("pynvml") if importlib.util.find_spec("pynvml") else None
    if nvml is not None:
        try:
            nvml.nvmlInit()
        except nvml.NVMLError:
            nvml = None
    if nvml is None:
        yield None
        return
    try:
        # Look up by UUID because CUDA_VISIBLE_DEVICES and CUDA's order of GPUs do not apply to NVML.
        uuids = (torch.cuda.get_device_properties(index).uuid for index in indexes)
        yield nvml, [nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}") for uuid in uuids]
    finally:
        nvml.nvmlShutdown()


def read_driver() -> DriverFacts:
    """Return the NVIDIA driver and its GPUs, from nvidia-smi. They do not depend on the build of torch."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return DriverFacts()
    command = [program, "--query-gpu=driver_version,name", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_SECONDS, check=False)
    rows = [line.split(",", 1) for line in done.stdout.splitlines() if "," in line]
    output = " ".join((done.stdout or done.stderr).split())[:200]
    # "No devices" is no failure, for example in a container without GPUs.
    if done.returncode != 0 and "No devices" not in output:
        return DriverFacts(failure=output or f"exit code {done.returncode}")
    if done.returncode != 0 or not rows:
        return DriverFacts()
    return DriverFacts(version=rows[0][0].strip(), gpus=tuple(name.strip() for _, name in rows))
