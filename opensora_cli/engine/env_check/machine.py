"""Checks of Python, torch, the GPUs, the links between them and their libraries."""

import importlib.metadata
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from packaging.requirements import Requirement

from opensora_cli.core.device import GIB
from opensora_cli.core.device_facts import DriverFacts, GpuFacts, LinkFacts, LinkKind, TorchFacts
from opensora_cli.engine.env_check.report import Finding, note, ok, problem, warning

_PYTHONS = ((3, 11), (3, 13))
# NVIDIA, CUDA Compatibility, table 1: the oldest driver for each major version of CUDA, by minor version compatibility.
_OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
_CUDA_LIBRARIES = ("libcudart.so", "libcublas.so", "libcudnn.so", "libnccl.so")
_TORCH_LINE = "choose the build for this machine at https://pytorch.org/get-started/locally/"


def check_python(version: tuple[int, int, int], unmet: Sequence[str]) -> Iterator[Finding]:
    """Judge the interpreter and the result of `unmet_requirements`."""
    text = ".".join(map(str, version))
    oldest, newest = (".".join(map(str, each)) for each in _PYTHONS)
    if version[:2] < _PYTHONS[0]:
        yield problem(f"Python {text}", why=f"osora needs {oldest} or newer", fix=f"make an environment with {oldest}")
    elif version[:2] > _PYTHONS[1]:
        yield warning(f"Python {text}", why=f"osora is tested up to {newest}", fix=f"if it fails, use {newest}")
    else:
        yield ok(f"Python {text} ({sys.executable})")
    for line in unmet:
        yield problem(line, why="osora imports it", fix="pip install -c constraints.txt . installs the tested set")


def unmet_requirements() -> list[str]:
    """Return the requirements of osora that are missing or installed in another version, each in words."""
    try:
        texts = importlib.metadata.requires("osora") or []
    except importlib.metadata.PackageNotFoundError:
        return []  # a checkout: its imports succeeded
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
    yield ok(f"torch {torch.version}, built for CUDA {torch.cuda}")
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
        if not is_supported(gpu.capability, torch.architectures):
            yield problem(
                f"{label}: torch has no kernels for sm_{_number(gpu.capability)}",
                why=f"it was compiled for {', '.join(torch.architectures)}",
                fix=_TORCH_LINE,
            )
        elif gpu.is_mig:
            yield warning(
                f"{label}: a MIG slice",
                why="a process sees one slice, and slices cannot exchange data",
                fix="for several devices, or more memory, turn MIG off (nvidia-smi -mig 0)",
            )
        else:
            yield ok(f"{label}, sm_{_number(gpu.capability)}")
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


def is_supported(capability: tuple[int, int], architectures: Sequence[str]) -> bool:
    """Return whether code compiled for `architectures` runs on a GPU of `capability`.

    Machine code (`sm_86`) runs on GPUs of its major version from its minor version on, with an `a` on that GPU alone;
    intermediate code (`compute_90`) is compiled for any newer GPU when it is first used (CUDA C++ Programming Guide,
    compute capabilities). Without a list, as a build may have none, nothing is known against the GPU.
    """
    return not architectures or any(_runs(capability, architecture) for architecture in architectures)


def _runs(capability: tuple[int, int], architecture: str) -> bool:
    kind, _, text = architecture.partition("_")
    digits = text.rstrip("af")
    if not digits.isdigit():
        return False
    compiled = divmod(int(digits), 10)
    if text.endswith("a"):
        return capability == compiled
    if kind == "compute" and digits == text:
        return capability >= compiled
    return capability[0] == compiled[0] and capability[1] >= compiled[1]


def check_libraries(torch: TorchFacts, gpus: Sequence[GpuFacts]) -> Iterator[Finding]:
    """Judge cuDNN and NCCL, which come with torch."""
    if torch.cuda is None:
        yield note("no cuDNN and no NCCL: a build for the CPU")
        return
    if torch.cudnn is None:
        yield warning(
            "torch finds no cuDNN",
            why="the autoencoder's convolutions run on slower kernels",
            fix="install torch again with its dependencies (nvidia-cudnn-...)",
        )
    else:
        yield ok(f"cuDNN {torch.cudnn}")
    if torch.nccl is not None:
        yield ok(f"NCCL {torch.nccl}")
    elif len(gpus) > 1:
        yield problem(
            "this torch has no NCCL",
            why="several GPUs cannot exchange data",
            fix="use a torch for Linux; on Windows, run in WSL 2",
        )


def shadowing_libraries(environment: Mapping[str, str], *, own: Path) -> tuple[str, ...]:
    """Return the CUDA libraries in `LD_LIBRARY_PATH` that hide those of torch, whose folder is below `own`."""
    found = []
    for folder in environment.get("LD_LIBRARY_PATH", "").split(os.pathsep):
        if not folder or not Path(folder).is_dir() or Path(folder).resolve().is_relative_to(own):
            continue
        names = sorted(os.listdir(folder))
        found += [str(Path(folder, name)) for name in names if name.startswith(_CUDA_LIBRARIES)]
    return tuple(found)


def _number(capability: tuple[int, int]) -> str:
    return f"{capability[0]}{capability[1]}"
