"""Facts about this machine: plain data, and one small function that reads each kind (GPUs: `core.gpus`).

What a function raises becomes a finding of its check.
"""

import importlib.metadata
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil  # type: ignore[import-untyped]  # it ships none
import torch

from opensora_cli.core.attention_kinds import ATTENTION_KINDS
from opensora_cli.core.files import nearest_existing
from opensora_cli.core.private_memory import read_private_memory
from opensora_cli.engine.components.attention import (
    AttentionPlan,
    AttentionUse,
    attention_order,
    choose_attention,
    why_unusable,
)
from opensora_cli.engine.components.configs import count_parameters
from opensora_cli.engine.components.hardware import Hardware, pick_hardware
from opensora_cli.engine.components.weights import DEFAULT_FOLDER, WeightFiles, find_weights
from opensora_cli.engine.env_check.report import PresetNeeds
from opensora_cli.engine.estimate.offload import OffloadPlan, StageMemory
from opensora_cli.models.registry import DEMO
from opensora_cli.settings.enums import AttentionChoice
from opensora_cli.settings.files import list_presets
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.load import load_preset

_WEIGHT_BYTES = 2
_HEAD_DIM = 128
"""Head size of the released model."""
_CUDA_LIBRARIES = ("libcudart.so", "libcublas.so", "libcudnn.so", "libnccl.so")


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonFacts:
    """The interpreter and the packages that osora needs."""

    version: tuple[int, int, int]
    executable: str
    unmet: tuple[str, ...] = ()
    """Requirements of osora that are not installed, or in another version, each in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """The computer around the GPUs."""

    cores: int
    """Logical ones that this process may use."""
    total_bytes: int
    available_bytes: int
    container_limit_bytes: int | None = None
    """Memory limit of the control groups of this process; None means no limit."""
    shared_memory_bytes: int | None = None
    """Size of /dev/shm; None: there is none."""
    locked_memory_bytes: int | None = None
    """The limit of locked memory (ulimit -l); None: no limit."""
    interfaces: tuple[str, ...] = ()
    """Network interfaces."""
    infiniband: tuple[str, ...] = ()
    """InfiniBand and RoCE adapters."""

    @property
    def usable_bytes(self) -> int:
        """Host memory that is free for a run."""
        limit = self.container_limit_bytes
        return self.available_bytes if limit is None else min(self.available_bytes, limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFacts:
    """The released model's weights on this machine, and the disk they go to."""

    missing: tuple[str, ...]
    """Missing parts."""
    missing_bytes: int
    """Bytes of the missing parts on disk, in 16 bits."""
    largest_bytes: int
    """The largest part in 16 bits, which offload keeps in host memory."""
    folder: str
    free_disk_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendFacts:
    """Attention backend of a library, or of torch for some devices only."""

    name: str
    version: str | None = None
    """Version of the library; None if it is not installed, or the backend needs none."""
    install: str | None = None
    """Command that installs the library; None if the backend needs none."""
    problem: str | None = None
    """Reason why it cannot be used on the first device, or None."""
    wanted: bool = False
    """Whether it is in the order of `auto` for that device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionFacts:
    """Attention backend of `--attention auto` on the first device, and the other backends."""

    device: str
    chosen: AttentionPlan
    others: tuple[BackendFacts, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderFacts:
    """PyAV, which writes videos."""

    av: str
    has_x264: bool


class PresetPlan(Protocol):
    """Fields of a plan of `osora generate` that the table of presets reads."""

    @property
    def settings(self) -> GenerateSettings: ...
    @property
    def width(self) -> int: ...
    @property
    def height(self) -> int: ...
    @property
    def hardware(self) -> Hardware: ...
    @property
    def weights(self) -> WeightFiles: ...
    @property
    def offload(self) -> OffloadPlan: ...
    @property
    def stages(self) -> tuple[StageMemory, ...]: ...
    @property
    def budget_bytes(self) -> int: ...


MakePlan = Callable[[GenerateSettings], PresetPlan]


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


def read_host() -> HostFacts:
    """Return what the computer around the GPUs has."""
    memory, own = psutil.virtual_memory(), read_private_memory()
    infiniband = Path("/sys/class/infiniband")
    return HostFacts(
        cores=_cores(),
        total_bytes=memory.total,
        available_bytes=own.free_bytes,
        container_limit_bytes=own.total_bytes if own.total_bytes < memory.total else None,
        shared_memory_bytes=shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else None,
        locked_memory_bytes=_locked_memory(),
        interfaces=tuple(psutil.net_if_addrs()),
        infiniband=tuple(sorted(os.listdir(infiniband))) if infiniband.is_dir() else (),
    )


def _cores() -> int:
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


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
    return WeightFacts(
        missing=tuple(part.value for part in weights.missing),
        missing_bytes=sum(sizes[part] for part in weights.missing),
        largest_bytes=max(sizes.values()),
        folder=str(place),
        free_disk_bytes=shutil.disk_usage(nearest_existing(place)).free,
    )


def read_attention() -> AttentionFacts:
    """Try each attention backend on the first device, and return the choice of `auto` and the others."""
    hardware = pick_hardware("auto", "auto")
    use = AttentionUse(device=hardware.device, dtype=hardware.dtype, head_dim=_HEAD_DIM)
    is_cuda = use.device.type == "cuda"
    wanted = attention_order(use.device)
    others = []
    for name, kind in ATTENTION_KINDS.items():
        library = kind.library
        if library is not None or (kind.needs_cuda and is_cuda):
            others.append(
                BackendFacts(
                    name=name,
                    version=None if library is None else library.version(),
                    install=None if library is None else library.install,
                    problem=why_unusable(name, use),
                    wanted=name in wanted,
                )
            )
    chosen = choose_attention(AttentionChoice.AUTO, use, setting="runtime.attention")
    return AttentionFacts(device=str(use.device), chosen=chosen, others=tuple(others))


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


def preset_here(name: str, environment: Mapping[str, str]) -> GenerateSettings:
    """Return the settings of a preset, with the weights folder that the environment names."""
    settings = load_preset(name, prompt="any")
    folder = environment.get("OSORA_WEIGHTS") or environment.get("OSORA_RUNTIME__WEIGHTS")
    return settings.replace({"runtime.weights": folder}) if folder else settings


def unplanned_presets(*, num_gpus: int) -> tuple[str, ...]:
    """Return the presets of models that `--model auto` runs on no device of this machine; see `choose_model`."""
    if num_gpus:
        return ()
    models = {name: load_preset(name, prompt="any").model.name for name in list_presets("generate")}
    return tuple(name for name, model in models.items() if model != DEMO)


def read_presets(
    environment: Mapping[str, str], make_plan: MakePlan, *, unplanned: Sequence[str] = ()
) -> tuple[PresetNeeds, ...]:
    """Return the needs of all presets but `unplanned`, as plans count them; no weight is read."""
    names = [name for name in list_presets("generate") if name not in unplanned]
    return tuple(_needs(name, make_plan(preset_here(name, environment))) for name in names)


def _needs(name: str, plan: PresetPlan) -> PresetNeeds:
    worst = max(plan.stages, key=lambda stage: stage.total_bytes)
    return PresetNeeds(
        name=name,
        video=f"{plan.width}x{plan.height}, {plan.settings.video.num_frames} frames",
        device=str(plan.hardware.device),
        dtype=plan.hardware.dtype_name,
        stage=worst.name,
        needed_bytes=worst.total_bytes,
        free_bytes=plan.budget_bytes,
        offload=plan.offload.mode.value,
        has_weights=not plan.weights.missing,
        fits=worst.total_bytes <= plan.budget_bytes,
    )
