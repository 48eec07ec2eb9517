"""Checks of the computer around the GPUs: memory, disk, limits, attention backends, the video encoder, presets."""

import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # it ships none

from opensora_cli.core.attention import ATTENTION_KINDS
from opensora_cli.core.device import GIB
from opensora_cli.core.files import nearest_existing
from opensora_cli.core.limits import read_cores, read_private_memory
from opensora_cli.engine.components.architectures import count_parameters
from opensora_cli.engine.components.attention import AttentionUse, attention_order, choose_attention, why_unusable
from opensora_cli.engine.components.hardware import pick_hardware
from opensora_cli.engine.components.weights import DEFAULT_FOLDER, find_weights
from opensora_cli.engine.env_check.report import Finding, PresetNeeds, note, ok, problem, warning
from opensora_cli.engine.generate.plan import make_plan
from opensora_cli.models.registry import DEMO, OPEN_SORA_V2
from opensora_cli.settings.components import DOWNLOAD_COMMAND
from opensora_cli.settings.devices import AttentionChoice
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.layers import list_presets
from opensora_cli.settings.load import load_preset

_WEIGHT_BYTES = 2
_HEAD_DIM = 128
"""Head size of the released model."""
# Docker gives 64 MiB by default; NVIDIA's own containers ask to be started with 1 GiB.
_SMALLEST_SHARED_MEMORY = GIB
_SMALLEST_LOCKED_MEMORY = GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """Cores, memory, limits and networks of this machine."""

    cores: int = 1
    """Logical cores that this process may use."""
    total_bytes: int = 0
    available_bytes: int = 0
    """Memory that is free for a run, also in the control groups."""
    container_limit_bytes: int | None = None
    """Memory limit of the control groups of this process. None means no limit."""
    shared_memory_bytes: int | None = None
    """Size of /dev/shm. None means that it does not exist."""
    locked_memory_bytes: int | None = None
    """Limit of locked memory (ulimit -l). None means no limit."""
    interfaces: tuple[str, ...] = ()
    """Network interfaces."""
    infiniband: tuple[str, ...] = ()
    """InfiniBand and RoCE adapters."""


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


def read_host() -> HostFacts:
    memory, own = psutil.virtual_memory(), read_private_memory()
    infiniband = Path("/sys/class/infiniband")
    locked = psutil.Process().rlimit(psutil.RLIMIT_MEMLOCK)[0] if sys.platform == "linux" else -1
    return HostFacts(
        cores=read_cores()[0],
        total_bytes=memory.total,
        available_bytes=own.free_bytes,
        container_limit_bytes=own.total_bytes if own.total_bytes < memory.total else None,
        shared_memory_bytes=shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else None,
        locked_memory_bytes=None if locked < 0 else locked,
        interfaces=tuple(psutil.net_if_addrs()),
        infiniband=tuple(sorted(os.listdir(infiniband))) if infiniband.is_dir() else (),
    )


def read_weights(environment: Mapping[str, str]) -> WeightFacts:
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


def check_memory(host: HostFacts, weights: WeightFacts, *, has_gpus: bool) -> Iterator[Finding]:
    """Compare host memory with the weights that are offloaded to it."""
    size = f"{_gib(host.available_bytes)} of {_gib(host.total_bytes)} host memory free"
    if host.container_limit_bytes is not None:
        yield note(f"this container may use {_gib(host.container_limit_bytes)}")
    if has_gpus and host.available_bytes < weights.largest_bytes:
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


def check_limits(host: HostFacts) -> Iterator[Finding]:
    """Judge shared and locked memory."""
    shared, locked = host.shared_memory_bytes, host.locked_memory_bytes
    if shared is not None and shared < _SMALLEST_SHARED_MEMORY:
        yield warning(
            f"/dev/shm has {shared / 2**20:.0f} MiB",
            why="NCCL and data loading workers exchange data through it, and fail when it is full",
            fix="start the container with --shm-size=8g or --ipc=host",
        )
    else:
        yield ok("no /dev/shm on this system" if shared is None else f"/dev/shm has {_gib(shared)}")
    # The driver allocates CUDA's pinned memory, which does not count.
    if locked is not None and host.infiniband and locked < _SMALLEST_LOCKED_MEMORY:
        yield warning(
            f"locked memory is limited to {locked / 2**20:.0f} MiB",
            why="InfiniBand registers its buffers as locked memory, and NCCL fails to start without",
            fix="ulimit -l unlimited; in a container --ulimit memlock=-1",
        )


def check_encoder() -> Iterator[Finding]:
    import av

    if "libx264" in av.codecs_available:
        yield ok(f"PyAV {av.__version__} with libx264")
    else:
        yield problem(
            f"PyAV {av.__version__} has no libx264",
            why="MP4 is written with it; gif, webp and png are not",
            fix="pip install --force-reinstall 'av>=18' installs the wheel, which has it; or use --format webp",
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


def preset_here(name: str, environment: Mapping[str, str]) -> GenerateSettings:
    """Return the settings of a preset, with the weights folder that the environment names."""
    settings = load_preset(name)
    folder = environment.get("OSORA_WEIGHTS") or environment.get("OSORA_RUNTIME__WEIGHTS")
    return settings.replace({"runtime.weights": folder}) if folder else settings


def read_presets(environment: Mapping[str, str], *, num_gpus: int) -> tuple[tuple[PresetNeeds, ...], tuple[str, ...]]:
    """Return the needs of all presets, as plans count them, and the names of those that are not planned: without a
    GPU, `--model auto` runs the demo alone. No weights are read.
    """
    found, unplanned = list[PresetNeeds](), list[str]()
    for name in list_presets("generate"):
        settings = preset_here(name, environment)
        if not num_gpus and settings.model.name != DEMO:
            unplanned.append(name)
            continue
        plan = make_plan(settings)
        needed = max(stage.total_bytes for stage in plan.stages)
        found.append(
            PresetNeeds(
                name=name,
                video=f"{plan.width}x{plan.height}, {plan.settings.video.num_frames} frames",
                needed_bytes=needed,
                free_bytes=plan.budget_bytes,
                offload=plan.offload.mode.value,
                has_weights=not plan.weights.missing,
                fits=needed <= plan.budget_bytes,
            )
        )
    return tuple(found), tuple(unplanned)


def check_presets(presets: Sequence[PresetNeeds], *, unplanned: Sequence[str] = ()) -> Iterator[Finding]:
    """Judge whether any preset fits. `unplanned` are the presets of the released model on a machine without GPUs."""
    fitting = [preset.name for preset in presets if preset.fits]
    if not fitting:
        yield problem(
            "no preset fits into the memory that is free",
            why=f"the smallest needs {min(preset.needed_bytes for preset in presets) / GIB:.2f} GiB",
            fix="close other programs, or use a machine with more memory",
        )
        return
    yield ok(f"memory suffices for {', '.join(fitting)}")
    if unplanned:
        yield note(
            f"{', '.join(unplanned)} not planned: --model auto takes the released model to a CUDA device alone",
            fix=f'osora generate "raining, sea" --model {OPEN_SORA_V2} --res {unplanned[0]} --dry-run '
            "plans it for the CPU",
        )


def _gib(count: int) -> str:
    return f"{count / GIB:.1f} GiB"
