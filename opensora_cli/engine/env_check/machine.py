"""Checks of this machine: Python, torch, GPUs and their links, attention backends, memory, disk and the encoder."""

import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # it ships none

from opensora_cli.core.attention import ATTENTION_KINDS
from opensora_cli.core.device import GIB
from opensora_cli.core.device_facts import DriverFacts, GpuFacts, LinkFacts, LinkKind, TorchFacts
from opensora_cli.core.files import nearest_existing
from opensora_cli.core.limits import read_private_memory
from opensora_cli.engine.components.architectures import count_parameters
from opensora_cli.engine.components.attention import AttentionUse, attention_order, choose_attention, why_unusable
from opensora_cli.engine.components.hardware import pick_hardware
from opensora_cli.engine.components.weights import DEFAULT_FOLDER, find_weights
from opensora_cli.engine.env_check.report import Finding, note, ok, problem, warning
from opensora_cli.settings.components import DOWNLOAD_COMMAND
from opensora_cli.settings.devices import AttentionChoice
from opensora_cli.settings.load import load_preset

_WEIGHT_BYTES = 2
_HEAD_DIM = 128
"""Head size of the released model."""
# Docker gives 64 MiB by default; NVIDIA's own containers ask to be started with 1 GiB.
_SMALLEST_SHARED_MEMORY = GIB
_NEWEST_PYTHON = (3, 13)
# NVIDIA, CUDA Compatibility, table 1: the oldest driver for each major version of CUDA, by minor version compatibility.
_OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
_CUDA_LIBRARIES = ("libcudart.so", "libcublas.so", "libcudnn.so", "libnccl.so")
_TORCH_LINE = "choose the build for this machine at https://pytorch.org/get-started/locally/"


def check_python(version: tuple[int, ...] = sys.version_info[:3]) -> Iterator[Finding]:
    text, newest = (".".join(map(str, each)) for each in (version, _NEWEST_PYTHON))
    if version[:2] > _NEWEST_PYTHON:
        yield warning(f"Python {text}", why=f"osora is tested up to {newest}", fix=f"if it fails, use {newest}")
    else:
        yield ok(f"Python {text} ({sys.executable})")


def check_torch(torch: TorchFacts, driver: DriverFacts) -> Iterator[Finding]:
    """Compare the build of torch with the driver and its GPUs."""
    if driver.failure is not None:
        yield problem(
            f"nvidia-smi fails: {driver.failure}",
            why="no GPU can be used until it works",
            fix="restart the machine: that loads the driver that was installed last",
        )
    if torch.cuda is None:
        if torch.cuda_available:
            yield note(f"torch {torch.version} is not a build for NVIDIA GPUs, for which osora is tested")
        elif driver.gpus:
            yield problem(
                f"torch {torch.version} is a build for the CPU, and here is {' and '.join(dict.fromkeys(driver.gpus))}",
                why="no GPU can be used by it",
                fix=f"{_TORCH_LINE}; driver {driver.version} runs CUDA {_newest_cuda(driver)}",
            )
        else:
            yield ok(f"torch {torch.version}, built for the CPU")
        return
    libraries = "".join(
        f", {name} {version}" for name, version in (("cuDNN", torch.cudnn), ("NCCL", torch.nccl)) if version
    )
    yield ok(f"torch {torch.version}, built for CUDA {torch.cuda}{libraries}")
    yield from _check_driver(torch, driver)


def _check_driver(torch: TorchFacts, driver: DriverFacts) -> Iterator[Finding]:
    needed = _OLDEST_DRIVER.get(int((torch.cuda or "0").partition(".")[0]))
    if driver.version is None:
        if not torch.cuda_available and driver.failure is None:
            yield warning(
                "no NVIDIA driver was found",
                why="everything runs on the CPU: the demo in seconds, the released model hardly",
                fix="install the driver; in a container, start it with --gpus all",
            )
        return
    if driver.major is not None and needed is not None and driver.major < needed:
        yield problem(
            f"driver {driver.version} is too old for CUDA {torch.cuda}",
            why=f"CUDA {(torch.cuda or '').partition('.')[0]}.x needs driver {needed} or newer",
            fix=f"update the driver, or install a torch built for CUDA {_newest_cuda(driver)}",
        )
    elif not torch.cuda_available:
        yield problem(
            f"driver {driver.version} is installed, but torch can use no GPU",
            why="CUDA_VISIBLE_DEVICES hides the GPUs, or driver and library do not match since an update",
            fix="unset CUDA_VISIBLE_DEVICES; if nvidia-smi fails too, restart the machine",
        )
    else:
        yield ok(f"driver {driver.version}")


def _newest_cuda(driver: DriverFacts) -> str:
    fitting = [cuda for cuda, oldest in _OLDEST_DRIVER.items() if (driver.major or 0) >= oldest]
    return f"{max(fitting)}.x" if fitting else "none of today's versions"


def check_gpus(torch: TorchFacts, gpus: Sequence[GpuFacts]) -> Iterator[Finding]:
    if not gpus:
        yield note("none that torch can use")
    for kind in torch.untested:
        yield note(f"osora accepts --device {kind}, for an accelerator of this machine, and is not tested on it")
    for gpu in gpus:
        size = f"{gpu.free_bytes / GIB:.1f} of {gpu.total_bytes / GIB:.1f} GiB free"
        label = f"cuda:{gpu.index} {gpu.name}, {size}"
        if gpu.failure is not None:
            yield problem(f"{label}, cannot compute", why=gpu.failure, fix=_TORCH_LINE)
        elif gpu.is_mig:
            yield warning(
                f"{label}: a MIG slice",
                why="a process sees one slice, and slices cannot exchange data",
                fix="for several devices, or more memory, turn MIG off (nvidia-smi -mig 0)",
            )
        else:
            yield ok(f"{label}, compute capability {'.'.join(map(str, gpu.capability))}")
        if gpu.capability < (8, 0):
            yield warning(
                f"cuda:{gpu.index} has no bfloat16 units",
                why="--dtype auto means bfloat16 on CUDA, which this GPU emulates, slowly",
                fix="--dtype float16",
            )
        if gpu.free_bytes < gpu.total_bytes // 2:
            yield warning(
                f"cuda:{gpu.index} is more than half full",
                why="another process holds its memory, which a run will lack",
                fix="nvidia-smi lists the processes",
            )


def check_links(links: Sequence[LinkFacts]) -> Iterator[Finding]:
    for kind in LinkKind:
        pairs = [f"{link.first}-{link.second}" for link in links if link.kind is kind]
        if not pairs:
            continue
        among = f"all {len(pairs)} pairs" if len(pairs) == len(links) > 1 else f"{', '.join(pairs)}"
        if kind is LinkKind.HOST:
            yield warning(
                f"no direct link between GPUs {among}",
                why="transfers go through host memory, several times slower",
                fix="nvidia-smi topo -m shows the links; in a virtual machine, ask for GPUs with peer access",
            )
        else:
            yield ok(f"{kind} between {among}")


def shadowing_libraries(environment: Mapping[str, str], *, own: Path) -> tuple[str, ...]:
    """Return the CUDA libraries in `LD_LIBRARY_PATH` that hide those of torch, whose folder is below `own`."""
    found = []
    for folder in environment.get("LD_LIBRARY_PATH", "").split(os.pathsep):
        if not folder or not Path(folder).is_dir() or Path(folder).resolve().is_relative_to(own):
            continue
        names = sorted(os.listdir(folder))
        found += [str(Path(folder, name)) for name in names if name.startswith(_CUDA_LIBRARIES)]
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFacts:
    """Weights of the released model on this machine, and the disk for them."""

    missing: tuple[str, ...]
    """Missing parts."""
    missing_bytes: int
    """Bytes of the missing parts on disk, in 16 bits."""
    largest_bytes: int
    """Bytes of the largest part in 16 bits, which offload keeps in host memory."""
    folder: str
    free_disk_bytes: int


def read_weights(environment: Mapping[str, str]) -> WeightFacts:
    settings = load_preset("256px")
    if named := environment.get("OSORA_WEIGHTS") or environment.get("OSORA_RUNTIME__WEIGHTS"):
        settings = settings.replace({"runtime.weights": named})
    weights = find_weights(settings)
    sizes = {part: count * _WEIGHT_BYTES for part, count in count_parameters(settings, weights).items()}
    place = Path(settings.runtime.weights or DEFAULT_FOLDER).absolute()
    return WeightFacts(
        missing=tuple(part.value for part in weights.missing),
        missing_bytes=sum(sizes[part] for part in weights.missing),
        largest_bytes=max(sizes.values()),
        folder=str(place),
        free_disk_bytes=shutil.disk_usage(nearest_existing(place)).free,
    )


def check_memory(weights: WeightFacts, *, has_gpus: bool) -> Iterator[Finding]:
    """Compare host memory with the weights that are offloaded to it."""
    free, total = read_private_memory().free_bytes, psutil.virtual_memory().total
    size = f"{_gib(free)} of {_gib(total)} host memory free"
    if has_gpus and free < weights.largest_bytes:
        yield warning(
            size,
            why=f"pinned for offload, the largest part of the released model takes {_gib(weights.largest_bytes)}; "
            "mapped from the file instead, it is slower",
            fix="close other programs, or add memory",
        )
    else:
        yield ok(size)


def check_disk(weights: WeightFacts) -> Iterator[Finding]:
    """Compare the disk with the weights that are not downloaded yet."""
    size = f"{_gib(weights.free_disk_bytes)} free for {weights.folder}"
    if not weights.missing:
        yield ok(f"the released model's weights are here; {size}")
    elif weights.free_disk_bytes < weights.missing_bytes:
        yield warning(
            size,
            why=f"{', '.join(weights.missing)} of the released model take {_gib(weights.missing_bytes)}; "
            "the demo needs nothing",
            fix="download to another disk with --to DIR, and set OSORA_WEIGHTS=DIR",
        )
    else:
        yield ok(f"{size}; {_gib(weights.missing_bytes)} of weights are missing ({DOWNLOAD_COMMAND})")


def check_shared_memory(folder: str = "/dev/shm") -> Iterator[Finding]:
    if not Path(folder).is_dir():
        yield ok(f"no {folder} on this system")
    elif (size := shutil.disk_usage(folder).total) < _SMALLEST_SHARED_MEMORY:
        yield warning(
            f"{folder} has {size / 2**20:.0f} MiB",
            why="NCCL and data loading workers exchange data through it, and fail when it is full",
            fix="start the container with --shm-size=8g or --ipc=host",
        )
    else:
        yield ok(f"{folder} has {_gib(size)}")


def check_encoder() -> Iterator[Finding]:
    import av

    if "libx264" in av.codecs_available:
        yield ok(f"PyAV {av.__version__} with libx264")
    else:
        yield problem(
            f"PyAV {av.__version__} has no libx264",
            why="MP4 is written with it; gif and png are not",
            fix="pip install --force-reinstall 'av>=18' installs the wheel, which has it; or use --format gif",
        )


def check_attention() -> Iterator[Finding]:
    """Try each attention backend on the first device, and report the choice of `auto` and the other backends."""
    hardware = pick_hardware("auto", "auto")
    use = AttentionUse(device=hardware.device, dtype=hardware.dtype, head_dim=_HEAD_DIM)
    chosen = choose_attention(AttentionChoice.AUTO, use, setting="runtime.attention")
    yield ok(f"auto takes {chosen.backend} on {use.device}: {chosen.reason.removeprefix('auto: ')}")
    for name, kind in ATTENTION_KINDS.items():
        library = kind.library
        if library is None and not (kind.needs_gpu and use.device.type == "cuda"):
            continue
        version = library and library.version()
        named = f"{name} {version}" if version else name
        if (reason := why_unusable(name, use)) is None:
            if name != chosen.backend:
                yield ok(f"{named} works here, too: --attention {name}")
        elif version:
            yield note(f"{named} is installed and is not used: {reason}")
        elif library is not None and name in attention_order(use.device):
            yield note(f"{name} is not installed, which auto would take here", fix=library.install)


def _gib(count: int) -> str:
    return f"{count / GIB:.1f} GiB"
