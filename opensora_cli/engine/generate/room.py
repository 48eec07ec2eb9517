"""Whether a device has room for a generation, and what may be asked for instead."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from opensora_cli.core.dtypes import torch_dtype
from opensora_cli.core.exceptions import HardwareError, OsoraError
from opensora_cli.engine.generate.execution_plan import ExecutionPlan, gib_or_less
from opensora_cli.engine.generate.plan import make_plan
from opensora_cli.settings.enums import DType, OffloadMode


def require_fit(plan: ExecutionPlan) -> None:
    """Raise HardwareError if some stage needs more memory than may be used."""
    if plan.fits:
        return
    worst = max(plan.all_stages, key=lambda stage: stage.total_bytes)
    hardware = plan.hardware
    limited = plan.budget_bytes < hardware.free_bytes
    has = (
        f"memory.limit allows {gib_or_less(plan.budget_bytes)}"
        if limited
        else f"has {gib_or_less(plan.budget_bytes)} free"
    )
    raise HardwareError(
        f"the stage {worst.name} needs {gib_or_less(worst.total_bytes)}, and {hardware.device} "
        f"({hardware.device_name}) {has}",
        hint=_what_would_fit(plan),
    )


def _what_would_fit(plan: ExecutionPlan) -> str:
    """Name the changes of which each alone makes it fit."""
    fitting = []
    for flag, changes in _smaller_requests(plan):
        try:
            changed = plan.settings.replace(changes)
            # What is free may be taken by models that this plan can do without.
            dtype = plan.hardware.dtype if changed.runtime.dtype is DType.AUTO else torch_dtype(changed.runtime.dtype)
            hardware = replace(plan.hardware, dtype=dtype)
            smaller = make_plan(
                changed, hardware=hardware, tries_device=plan.hardware.is_here, clips=plan.fitting.clips
            )
        except (OsoraError, ValueError):
            continue  # such as too short a video for its references
        if smaller.fits:
            fitting.append(f"{flag} ({gib_or_less(smaller.peak_bytes)})")
    if not fitting:
        return "use a device with more memory, or --model demo"
    return f"{' or '.join(filter(None, (', '.join(fitting[:-1]), fitting[-1])))} would fit"


def _smaller_requests(plan: ExecutionPlan) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield what may be asked for instead, as a flag and as settings: first what changes nothing, then the smallest."""
    settings = plan.settings
    if plan.offload.batch_size > 1:
        yield "--set sampling.batch_size=1", {"sampling.batch_size": 1}
    if settings.memory.offload is not OffloadMode.AUTO or settings.memory.resident_blocks is not None:
        yield "--offload auto", {"memory.offload": OffloadMode.AUTO, "memory.resident_blocks": None}
    if plan.hardware.dtype is torch.float32:
        yield "--dtype bfloat16", {"runtime.dtype": DType.BFLOAT16}
    if not plan.offload.in_8_bits and not plan.decodes_only:
        yield "--set memory.fp8_storage=true", {"memory.fp8_storage": True}
    tiled: dict[str, object] = {f"vae.{axis}_tiling": True for axis in ("spatial", "temporal")}
    if not (settings.vae.spatial_tiling and settings.vae.temporal_tiling):
        yield " ".join(f"--set {key}=true" for key in tiled), tiled
    if plan.picture is not None:
        yield "--set picture.first=false", {"picture.first": False, "condition.mode": "t2v"}
    smallest = min(settings.video.resolutions, key=lambda name: int(name.rstrip("px")))
    if settings.video.height is None and settings.video.resolution != smallest:
        yield f"--res {smallest}", {"video.resolution": smallest}
    frames = settings.vae.grid.longest_clip(settings.video.num_frames // 2 + 1)
    if frames < settings.video.num_frames:
        yield f"--num-frames {frames}", {"video.num_frames": frames}
