"""Facts about this machine, one small function for each kind. What they raise becomes a finding of its check.

GPU facts come from torch, and where it cannot say, from nvidia-ml-py if it is installed, else from nvidia-smi.
"""

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from types import ModuleType

import psutil  # type: ignore[import-untyped]  # it ships none
import torch

from opensora_cli.engine.components.configs import count_parameters
from opensora_cli.engine.components.weights import DEFAULT_FOLDER, find_weights
from opensora_cli.engine.env_check.facts import (
    BackendFacts,
    CardFacts,
    DriverFacts,
    EncoderFacts,
    HostFacts,
    LinkFacts,
    LinkKind,
    PythonFacts,
    TorchFacts,
    WeightFacts,
)
from opensora_cli.engine.env_check.presets import preset_here
from opensora_cli.models.attention import backend_names

_SMI_SECONDS = 5
_WEIGHT_BYTES = 2
_BIGGEST_LIMIT = 2**60
"""Control groups write "no limit" as a number that no machine has."""
_BACKEND_PACKAGES = {
    "sdpa": None,
    "math": None,
    "flash2": ("flash_attn", "flash-attn"),
    "flash3": ("flash_attn_interface", "flash_attn_3"),
    "xformers": ("xformers", "xformers"),
}
"""Each backend's module and distribution; None: part of torch."""
_CUDA_LIBRARIES = ("libcudart.so", "libcublas.so", "libcudnn.so", "libnccl.so")


def read_python() -> PythonFacts:
    """Return the interpreter and what is missing of osora's requirements."""
    return PythonFacts(version=sys.version_info[:3], executable=sys.executable, unmet=tuple(_unmet_requirements()))


def _unmet_requirements() -> list[str]:
    from packaging.requirements import Requirement

    try:
        texts = importlib.metadata.requires("osora") or []
    except importlib.metadata.PackageNotFoundError:
        return []  # run from a checkout: what it imports is there, or this would not run
    unmet = []
    for requirement in map(Requirement, texts):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            unmet.append(f"{requirement.name} is not installed")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            unmet.append(f"{requirement.name} {version} does not fit {requirement.specifier}")
    return unmet


def read_torch() -> TorchFacts:
    """Return how torch was built, and what it sees."""
    available = torch.cuda.is_available()
    # Raises where the library that was found does not fit.
    cudnn = torch.backends.cudnn.version() if torch.version.cuda else None  # type: ignore[no-untyped-call]
    return TorchFacts(
        version=torch.__version__,
        cuda=torch.version.cuda,
        architectures=tuple(torch.cuda.get_arch_list()) if available else (),
        cuda_available=available,
        nccl=_nccl_version() if available else None,
        cudnn=None if cudnn is None else _cudnn_version(cudnn),
        matmul_precision=torch.backends.cuda.matmul.fp32_precision,
    )


def _nccl_version() -> str | None:
    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def _cudnn_version(number: int) -> str:
    # 9.1.0 is 90100; before version 9 it was 8902 for 8.9.2.
    base = 10_000 if number >= 90_000 else 1_000
    return f"{number // base}.{number % base // 100}.{number % 100}"


def read_cards() -> tuple[CardFacts, ...]:
    """Return the devices that torch can use."""
    if not torch.cuda.is_available():
        return ()
    return tuple(_card(index) for index in range(torch.cuda.device_count()))


def _card(index: int) -> CardFacts:
    free, total = torch.cuda.mem_get_info(index)
    name = torch.cuda.get_device_name(index)
    return CardFacts(
        index=index,
        name=name,
        capability=torch.cuda.get_device_capability(index),
        total_bytes=total,
        free_bytes=free,
        # CUDA appends the profile of a slice to the name: "NVIDIA A100-SXM4-40GB MIG 1g.5gb".
        is_mig=" MIG " in name,
    )


def read_links(cards: tuple[CardFacts, ...]) -> tuple[LinkFacts, ...]:
    """Return how each two cards reach each other."""
    pairs = list(combinations((card.index for card in cards), 2))
    if not pairs:
        return ()
    nvlinked = _nvlinked_pairs(pairs)
    links = []
    for first, second in pairs:
        if (first, second) in nvlinked:
            kind = LinkKind.NVLINK
        elif torch.cuda.can_device_access_peer(first, second):
            kind = LinkKind.PEER
        else:
            kind = LinkKind.HOST
        links.append(LinkFacts(first, second, kind))
    return tuple(links)


def _nvlinked_pairs(pairs: list[tuple[int, int]]) -> set[tuple[int, int]]:
    """Return the pairs that NVLink joins; without nvidia-ml-py none is known."""
    nvml = _nvml()
    if nvml is None:
        return set()
    try:
        handles = {index: _nvml_handle(nvml, index) for pair in pairs for index in pair}
        return {
            (first, second)
            for first, second in pairs
            if nvml.nvmlDeviceGetP2PStatus(handles[first], handles[second], nvml.NVML_P2P_CAPS_INDEX_NVLINK)
            == nvml.NVML_P2P_STATUS_OK
        }
    finally:
        nvml.nvmlShutdown()


def _nvml_handle(nvml: ModuleType, index: int) -> object:
    # By its id: CUDA_VISIBLE_DEVICES and the order of cards concern CUDA alone.
    return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(index).uuid}")


def _nvml() -> ModuleType | None:
    """Return nvidia-ml-py, started, where it is installed and finds a driver."""
    if importlib.util.find_spec("pynvml") is None:
        return None
    nvml = importlib.import_module("pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    return nvml


@contextmanager
def nvml_card(index: int) -> Iterator[tuple[ModuleType, object] | None]:
    """Yield nvidia-ml-py and its handle of torch's card `index`; None where it is not installed or finds no driver."""
    nvml = _nvml()
    if nvml is None:
        yield None
        return
    try:
        yield nvml, _nvml_handle(nvml, index)
    finally:
        nvml.nvmlShutdown()


def read_driver() -> DriverFacts:
    """Return the NVIDIA driver and the cards that it knows, whatever torch is."""
    nvml = _nvml()
    if nvml is None:
        return _driver_of_smi()
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return DriverFacts(
            version=nvml.nvmlSystemGetDriverVersion(), cards=tuple(nvml.nvmlDeviceGetName(handle) for handle in handles)
        )
    finally:
        nvml.nvmlShutdown()


def _driver_of_smi() -> DriverFacts:
    program = shutil.which("nvidia-smi")
    if program is None:
        return DriverFacts()
    done = subprocess.run(
        [program, "--query-gpu=driver_version,name", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        timeout=_SMI_SECONDS,
        check=False,
    )
    rows = [line.split(",", 1) for line in done.stdout.splitlines() if "," in line]
    if done.returncode != 0:
        said = " ".join((done.stdout or done.stderr).split())[:200]
        # As in a container without cards: nothing is wrong.
        return DriverFacts() if "No devices" in said else DriverFacts(failure=said or f"exit code {done.returncode}")
    if not rows:
        return DriverFacts()
    return DriverFacts(version=rows[0][0].strip(), cards=tuple(name.strip() for _, name in rows))


def read_host() -> HostFacts:
    """Return what the computer around the cards has."""
    memory = psutil.virtual_memory()
    infiniband = Path("/sys/class/infiniband")
    return HostFacts(
        cores=_cores(),
        total_bytes=memory.total,
        available_bytes=memory.available,
        container_limit_bytes=_container_limit(),
        shared_memory_bytes=shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else None,
        locked_memory_bytes=_locked_memory(),
        interfaces=tuple(psutil.net_if_addrs()),
        infiniband=tuple(sorted(os.listdir(infiniband))) if infiniband.is_dir() else (),
    )


def _cores() -> int:
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _container_limit() -> int | None:
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(name).read_text(encoding="ascii").strip()
        except OSError:
            continue
        return int(text) if text.isdigit() and int(text) < _BIGGEST_LIMIT else None
    return None


def _locked_memory() -> int | None:
    if sys.platform == "win32":
        return None
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def read_weights(environment: Mapping[str, str]) -> WeightFacts:
    """Return what is missing of the released model's weights, and the disk that it would go to."""
    settings = preset_here("256px", environment)
    weights = find_weights(settings)
    sizes = {part: count * _WEIGHT_BYTES for part, count in count_parameters(settings, weights).items()}
    place = Path(settings.runtime.weights or DEFAULT_FOLDER).absolute()
    existing = next(path for path in (place, *place.parents) if path.exists())
    return WeightFacts(
        missing=tuple(part.value for part in weights.missing),
        missing_bytes=sum(sizes[part] for part in weights.missing),
        largest_bytes=max(sizes.values()),
        folder=str(place),
        free_disk_bytes=shutil.disk_usage(existing).free,
    )


def read_backends() -> tuple[BackendFacts, ...]:
    """Return the ways to compute attention."""
    return tuple(
        BackendFacts(name=name, package=_package(source), in_registry=name in backend_names())
        for name, source in _BACKEND_PACKAGES.items()
    )


def _package(source: tuple[str, str] | None) -> str | None:
    if source is None:
        return ""
    module, distribution = source
    # Looked for, not imported: that takes seconds, and may end the process where builds do not fit.
    if importlib.util.find_spec(module) is None:
        return None
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def read_encoder() -> EncoderFacts:
    """Return what videos are written with."""
    import av

    return EncoderFacts(av=av.__version__, has_x264="libx264" in av.codecs_available)


def read_shadowing(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the CUDA libraries in `LD_LIBRARY_PATH`, which come before torch's own."""
    found = []
    own = Path(torch.__file__).parents[1]
    for folder in environment.get("LD_LIBRARY_PATH", "").split(os.pathsep):
        if not folder or not Path(folder).is_dir() or Path(folder).resolve().is_relative_to(own):
            continue
        names = sorted(os.listdir(folder))
        found += [str(Path(folder, name)) for name in names if name.startswith(_CUDA_LIBRARIES)]
    return tuple(found)
