"""Findings about the computer around the GPUs: memory, disk, limits, attention backends, the video encoder. Pure."""

from collections.abc import Iterator, Sequence

from opensora_cli.engine.components.hardware import GIB
from opensora_cli.engine.env_check.facts import AttentionFacts, EncoderFacts, HostFacts, WeightFacts
from opensora_cli.engine.env_check.report import Check, Finding, PresetNeeds
from opensora_cli.models.registry import OPEN_SORA_V2
from opensora_cli.settings.components import DOWNLOAD_COMMAND

# Docker gives 64 MiB by default; NVIDIA's own containers ask to be started with 1 GiB.
_SMALLEST_SHARED_MEMORY = GIB
_SMALLEST_LOCKED_MEMORY = GIB


def check_memory(host: HostFacts, weights: WeightFacts, *, has_gpus: bool) -> Iterator[Finding]:
    """Judge host memory against the weights that are offloaded to it."""
    check = Check("memory")
    size = f"{_gib(host.usable_bytes)} of {_gib(host.total_bytes)} host memory free"
    if host.container_limit_bytes is not None and host.container_limit_bytes < host.total_bytes:
        yield check.note(f"this container may use {_gib(host.container_limit_bytes)}")
    if has_gpus and host.usable_bytes < weights.largest_bytes:
        yield check.warning(
            size,
            why=f"pinned for offload, the largest part of the released model takes {_gib(weights.largest_bytes)}; "
            "mapped from the file instead, it is slower",
            fix="close other programs, or add memory",
        )
    else:
        yield check.ok(size)


def check_disk(weights: WeightFacts) -> Iterator[Finding]:
    """Judge the disk against the weights that are still to be downloaded."""
    check = Check("disk")
    size = f"{_gib(weights.free_disk_bytes)} free for {weights.folder}"
    if not weights.missing:
        yield check.ok(f"the released model's weights are here; {size}")
    elif weights.free_disk_bytes < weights.missing_bytes:
        yield check.warning(
            size,
            why=f"{', '.join(weights.missing)} of the released model take {_gib(weights.missing_bytes)}; "
            "the demo needs nothing",
            fix="download to another disk with --to DIR, and set OSORA_WEIGHTS=DIR",
        )
    else:
        yield check.ok(f"{size}; {_gib(weights.missing_bytes)} of weights are missing ({DOWNLOAD_COMMAND})")


def check_limits(host: HostFacts) -> Iterator[Finding]:
    """Judge shared and locked memory."""
    check = Check("limits")
    shared, locked = host.shared_memory_bytes, host.locked_memory_bytes
    if shared is None:
        yield check.note("no /dev/shm on this system")
    elif shared < _SMALLEST_SHARED_MEMORY:
        yield check.warning(
            f"/dev/shm has {shared / 2**20:.0f} MiB",
            why="NCCL and data loading workers exchange data through it, and fail when it is full",
            fix="start the container with --shm-size=8g or --ipc=host",
        )
    else:
        yield check.ok(f"/dev/shm has {_gib(shared)}")
    if locked is None:
        yield check.ok("no limit of locked memory")
    elif host.infiniband and locked < _SMALLEST_LOCKED_MEMORY:
        yield check.warning(
            f"locked memory is limited to {locked / 2**20:.0f} MiB",
            why="InfiniBand registers its buffers as locked memory, and NCCL fails to start without",
            fix="ulimit -l unlimited; in a container --ulimit memlock=-1",
        )
    else:
        # CUDA's pinned memory is the driver's and does not count.
        yield check.ok(f"locked memory is limited to {locked / 2**20:.0f} MiB, which only InfiniBand depends on")


def check_encoder(facts: EncoderFacts) -> Iterator[Finding]:
    """Judge what videos are written with."""
    check = Check("video")
    if facts.has_x264:
        yield check.ok(f"PyAV {facts.av} with libx264")
    else:
        yield check.problem(
            f"PyAV {facts.av} has no libx264",
            why="MP4 is written with it; gif, webp and png are not",
            fix="pip install --force-reinstall 'av>=18' takes the wheel, which has it; or --format webp",
        )


def check_attention(facts: AttentionFacts) -> Iterator[Finding]:
    """Report what computes attention here, what else could be asked for, and what `auto` would take if it were here."""
    check = Check("attention")
    yield check.ok(f"auto takes {facts.chosen.backend} on {facts.device}: {facts.chosen.reason.removeprefix('auto: ')}")
    for other in facts.others:
        named = f"{other.name} {other.version}" if other.version else other.name
        if other.problem is None:
            if other.name != facts.chosen.backend:
                yield check.ok(f"{named} works here, too: --attention {other.name}")
        elif other.version is not None:
            yield check.note(f"{named} is installed and is not used: {other.problem}")
        elif other.wanted and other.install is not None:
            yield check.note(f"{other.name} is not installed, which auto would take here", fix=other.install)


def _gib(count: int) -> str:
    return f"{count / GIB:.1f} GiB"


def check_presets(presets: Sequence[PresetNeeds], *, unplanned: Sequence[str] = ()) -> Iterator[Finding]:
    """Judge whether any preset fits; `unplanned` are those of the released model, where no GPU can be used."""
    check = Check("presets")
    fitting = [preset.name for preset in presets if preset.fits]
    if not fitting:
        yield check.problem(
            "no preset fits into the memory that is free",
            why=f"the smallest needs {min(preset.needed_bytes for preset in presets) / GIB:.2f} GiB",
            fix="close other programs, or use a machine with more memory",
        )
        return
    yield check.ok(f"memory suffices for {', '.join(fitting)}")
    if unplanned:
        yield check.note(
            f"{', '.join(unplanned)} not planned: --model auto takes the released model to a CUDA device alone",
            fix=f'osora generate "raining, sea" --model {OPEN_SORA_V2} --res {unplanned[0]} --dry-run '
            "plans it for the CPU",
        )
