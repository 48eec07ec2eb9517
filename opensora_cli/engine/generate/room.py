"""Refuse a request that does not fit in memory, with the changes that would fit."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from opensora_cli.core.dtypes import torch_dtype
from opensora_cli.core.exceptions import HardwareError, OsoraError
from opensora_cli.core.progress import Reporter
from opensora_cli.engine.components.parallelize import describe_mesh
from opensora_cli.engine.components.weights import Component
from opensora_cli.engine.estimate.offload import DENOISE
from opensora_cli.engine.generate.plan import CACHED_TEXT_LINE, PICTURE, Chain, Plan, gib_or_less
from opensora_cli.engine.generate.planning import make_chain
from opensora_cli.settings.enums import DType, OffloadMode

_MANY_TOKENS, _MOST_SAVED = 1_000_000, 32
"""Tokens of a clip whose smaller requests take seconds to plan, and by how many times none of them needs less."""


def require_room(chain: Chain, reporter: Reporter) -> None:
    """Raise HardwareError if a stage does not fit in memory, and note how the plan saves memory."""
    require_fit(chain)
    plan, picture = chain.video, chain.find(PICTURE)
    if picture is not None:
        offloaded = ", ".join(picture.offload.lines())
        reporter.note(f"picture: {picture.what}" + (f"; memory: {offloaded}" if offloaded else ""))
    if plan.mesh.size > 1:
        reporter.note(f"devices: {plan.mesh.size}, {describe_mesh(plan.mesh)}")
        if plan.planned_exchange is not None:
            reporter.note(f"exchange: {plan.planned_exchange.line()}")
    if plan.offload.lines():
        reporter.note(f"memory: {'; '.join(plan.offload.lines())}")
    if plan.size_note is not None:
        reporter.note(plan.size_note)
    if plan.fitting.ignored is not None:
        reporter.note(f"memory: {plan.fitting.ignored}")
    if not (plan.encodes_text or plan.decodes_only):
        reporter.note(f"prompts: {CACHED_TEXT_LINE}")


def require_weights(chain: Chain, reporter: Reporter) -> None:
    """Raise CheckpointError if weights are missing, with a warning if they would not fit either."""
    for _, plan in chain.jobs:
        if not chain.fits and any(component in plan.weights.missing for component in plan.components):
            # Before 40 GB are downloaded that do not fit.
            try:
                require_fit(chain)
            except HardwareError as error:
                reporter.warn(f"with its weights this would not run here either: {error.message}")
        plan.weights.require(plan.components)
    weights = chain.video.weights
    if borrowed := weights.borrowed():
        folder = weights.path(Component.TRANSFORMER).parent
        reporter.note(f"weights: {', '.join(borrowed)} are the demo's own, since {folder} has none")


def require_fit(chain: Chain) -> None:
    """Raise HardwareError if some stage needs more memory than may be used."""
    if chain.fits:
        return
    worst, plan = max(chain.stages, key=lambda stage: stage.total_bytes), chain.video
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


def _what_would_fit(plan: Plan) -> str:
    """Name the changes of which each alone makes it fit."""
    fitting = []
    denoise = sum(stage.total_bytes for stage in plan.stages if stage.name == DENOISE)
    is_hopeless = plan.video_tokens > _MANY_TOKENS and denoise > _MOST_SAVED * plan.budget_bytes
    for flag, changes in () if is_hopeless else _smaller_requests(plan):
        try:
            changed = plan.settings.replace(changes)
            # What is free may be taken by models that this plan can do without.
            dtype = plan.hardware.dtype if changed.runtime.dtype is DType.AUTO else torch_dtype(changed.runtime.dtype)
            hardware = replace(plan.hardware, dtype=dtype)
            smaller = make_chain(changed, hardware=hardware, tries_device=plan.hardware.is_here)
        except (OsoraError, ValueError):
            continue  # such as too short a video for its references
        if smaller.fits:
            fitting.append(f"{flag} ({gib_or_less(smaller.peak_bytes)})")
    if not fitting:
        return "use a device with more memory, or --model demo"
    return f"{' or '.join(filter(None, (', '.join(fitting[:-1]), fitting[-1])))} would fit"


def _smaller_requests(plan: Plan) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield what may be asked for instead, as a flag and as settings: first what changes nothing, then the smallest."""
    settings = plan.settings
    if settings.memory.offload is not OffloadMode.AUTO or settings.memory.resident_blocks is not None:
        yield "--offload auto", {"memory.offload": OffloadMode.AUTO, "memory.resident_blocks": None}
    if plan.hardware.dtype is torch.float32:
        yield "--dtype bfloat16", {"runtime.dtype": DType.BFLOAT16}
    if not plan.offload.in_8_bits and not plan.decodes_only:
        yield "--set memory.fp8_storage=true", {"memory.fp8_storage": True}
    tiled: dict[str, object] = {f"vae.{axis}_tiling": True for axis in ("spatial", "temporal")}
    if not (settings.vae.spatial_tiling and settings.vae.temporal_tiling):
        yield " ".join(f"--set {key}=true" for key in tiled), tiled
    if settings.picture.first:
        yield "--set picture.first=false", {"picture.first": False, "condition.mode": "t2v"}
    smallest = min(settings.video.resolutions, key=lambda name: int(name.rstrip("px")))
    if settings.video.height is None and settings.video.resolution != smallest:
        yield f"--res {smallest}", {"video.resolution": smallest}
    frames = settings.vae.grid.longest_clip(settings.video.num_frames // 2 + 1)
    if frames < settings.video.num_frames:
        yield f"--num-frames {frames}", {"video.num_frames": frames}
