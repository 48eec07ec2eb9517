"""Plan the jobs of a request before any weight is read, and refuse requests that do not fit in memory."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from math import prod

import torch

from opensora_cli.core.attention_kinds import attention_problems
from opensora_cli.core.choices import LinearProducts
from opensora_cli.core.conditions import CONTINUING, condition_mode
from opensora_cli.core.device import is_accelerator, torch_dtype
from opensora_cli.core.device_names import indexed
from opensora_cli.core.exceptions import HardwareError, OsoraError, RequestError
from opensora_cli.core.progress import Reporter
from opensora_cli.engine.components.attention import AttentionUse, choose_attention
from opensora_cli.engine.components.autoencoders import require_same_scale
from opensora_cli.engine.components.configs import count_parameters, mmdit_config
from opensora_cli.engine.components.few_steps import adapters_of
from opensora_cli.engine.components.hardware import Hardware, pick_hardware
from opensora_cli.engine.components.linear_products import require_products
from opensora_cli.engine.components.loras import Lora
from opensora_cli.engine.components.parallelize import choose_mesh, plan_exchange, require_branches
from opensora_cli.engine.components.weights import Component, find_weights
from opensora_cli.engine.estimate.file_bytes import file_weights
from opensora_cli.engine.estimate.generation import computes_modulation_first
from opensora_cli.engine.generate.chain import DRAFT, PICTURE, SEGMENT, VIDEO, Chain, Job
from opensora_cli.engine.generate.plan import Plan, gib_or_less
from opensora_cli.engine.generate.request import (
    PICTURE_MODE,
    draft_settings,
    picture_settings,
    size_of_picture,
    start_step,
)
from opensora_cli.parallel.shares import ExchangePlan, MeshShape
from opensora_cli.sampling.guidance import NO_GUIDANCE, Guidance, guidance_scales
from opensora_cli.sampling.schedule import flow_timesteps, latent_size
from opensora_cli.sampling.sizes import image_size
from opensora_cli.settings.enums import DType, HostWeights, OffloadMode
from opensora_cli.settings.generate import GenerateSettings

_CONTINUATION: Mapping[str, object] = {
    "video.extend": 0,
    "prompts_at": (),
    "condition.mode": "t2v",
    "condition.references": (),
    "condition.continued": None,
    "picture.first": False,
    "picture.save": False,
}
"""Changes to the settings of a video for the segments that extend it, which continue frames in memory."""


def make_chain(settings: GenerateSettings, *, hardware: Hardware | None = None, tries_device: bool = True) -> Chain:
    """Return the jobs of a request. Arguments are those of `make_plan`."""
    plan = partial(make_plan, hardware=hardware or rank_hardware(settings), tries_device=tries_device)
    jobs = []
    if (picture := picture_settings(settings)) is not None:
        jobs.append(Job(PICTURE, plan(picture)))
    video = plan(settings)
    if (draft := draft_settings(settings, height=video.height, width=video.width)) is not None:
        jobs.append(Job(DRAFT, plan(draft)))
    jobs.append(Job(VIDEO, video))
    if settings.video.extend:
        continued = plan(settings.replace(_CONTINUATION), held_frames=settings.num_frames)
        jobs += [Job(SEGMENT, continued)] * settings.video.extend
    return Chain(tuple(jobs))


def make_plan(
    settings: GenerateSettings,
    *,
    hardware: Hardware | None = None,
    tries_device: bool = True,
    held_frames: int | None = None,
) -> Plan:
    """Return the plan of one job on this machine.

    Neither weights nor enough memory are needed; `require_weights` and `require_fit` check them.

    Args:
        settings: settings with a condition mode; see `references.with_mode`.
        hardware: device of one of several ranks; None means a rank's share of the device of `settings`.
        tries_device: whether this process may use the device, to check attention kernels.
        held_frames: frames of the whole video, for a segment that extends it; None for any other clip.
    """
    hardware = hardware or rank_hardware(settings)
    model, sampling, grid = settings.model, settings.sampling, settings.vae.grid
    blocks, resident = model.depth + model.depth_single_blocks, settings.memory.resident_blocks
    if resident is not None and resident > blocks:
        raise RequestError(f"memory.resident_blocks={resident} must be at most the {blocks} of the model")
    weights = find_weights(settings)
    samples = settings.from_latents is None
    if samples and Component.TRANSFORMER in weights.paths:
        require_same_scale(weights.paths[Component.TRANSFORMER], settings.vae)

    height, width, size_note = _pixel_size(settings)
    rows, columns = latent_size(
        height, width, spatial_compression=grid.spatial_compression_ratio, patch_size=model.patch_size
    )
    latent_shape = grid.latent_channels, settings.num_latent_frames, rows, columns
    makes_picture = settings.picture.first and samples
    if makes_picture:
        _, _, size_note = size_of_picture(settings, settings.picture.resolution)
    named = settings.condition.mode or (PICTURE_MODE if makes_picture else "t2v")
    mode = CONTINUING if held_frames else condition_mode(named, num_latent_frames=settings.num_latent_frames)

    timesteps = sampling.timesteps or tuple(
        flow_timesteps(
            sampling.num_inference_steps,
            tokens_per_frame=rows * columns // model.patch_size**2,
            num_latent_frames=settings.num_latent_frames,
            flow_shift=sampling.flow_shift,
        )
    )
    guidance = _guidance(settings)
    scales = guidance_scales(guidance, mode=mode, timesteps=timesteps, num_latent_frames=settings.num_latent_frames)
    mesh = choose_mesh(settings, video_tokens=prod(latent_shape[1:]) // model.patch_size**2)
    require_branches(mesh, scales)

    exchange, attention, loras = ExchangePlan(), None, tuple[Lora, ...]()
    if samples and (adapters := adapters_of(settings)):
        from opensora_cli.engine.components.lora_files import open_loras

        loras = open_loras(adapters, model)
    if samples:
        itemsize = hardware.dtype.itemsize
        exchange = plan_exchange(settings.parallel, mesh, num_heads=model.num_heads, itemsize=itemsize)
        choice, setting = settings.runtime.attention, "runtime.attention"
        # The degree of a ring that the settings leave open is known only now.
        for problem in attention_problems(choice, setting=setting, ring_degree=mesh.ring, is_fp32=False):
            raise RequestError(problem)
        use = attention_use(settings, hardware, mesh)
        attention = choose_attention(choice, use, setting=setting, tries_device=tries_device)
        if settings.precision.linear is not LinearProducts.EXACT:
            require_products(
                settings.precision.linear,
                mmdit_config(model),
                device=hardware.device,
                dtype=hardware.dtype,
                tensor=mesh.tensor,
                tries_device=tries_device,
            )

    parameters, files = count_parameters(settings, weights), None
    if hardware.device.type == "cpu":
        # Storage in 8 bits copies modulation with the blocks.
        modulation_first = computes_modulation_first(settings) and not settings.memory.fp8_storage
        files = file_weights(settings, weights, parameters, hardware.dtype, modulation_first=modulation_first)
    plan = Plan(
        settings=settings,
        hardware=hardware,
        weights=weights,
        mode=mode,
        guidance=guidance,
        height=height,
        width=width,
        size_note=size_note,
        latent_shape=latent_shape,
        timesteps=timesteps,
        start=_start(settings, timesteps) if samples and settings.draft.resolution is not None else 0,
        mesh=mesh,
        exchange=exchange,
        loras=loras,
        attention=attention,
        parameters=parameters,
        files=files,
        held_bytes=(held_frames or 0) * height * width * 3,
    )
    change = sampling.step_cache
    # A step cache that comes from `sampling.fast` may have no effect.
    if change and samples and not sampling.fast and not plan.reused_steps:
        raise RequestError(
            f"sampling.step_cache={change:g} has no effect on {plan.num_steps} steps, which are further apart",
            hint="use a larger one, or more steps",
        )
    return plan.with_best_offload(plan.budget_bytes)


def _pixel_size(settings: GenerateSettings) -> tuple[int, int, str | None]:
    """Return height, width, and a note if the shape is not the requested one."""
    video = settings.video
    if video.height is not None and video.width is not None:
        return video.height, video.width, None
    if settings.vae.kind.makes_videos:
        return *image_size(video.resolution, video.aspect_ratio, multiple=settings.size_multiple), None
    return size_of_picture(settings, video.resolution)


def _guidance(settings: GenerateSettings) -> Guidance:
    sampling = settings.sampling
    if settings.model.guidance_embed:
        return NO_GUIDANCE
    return Guidance(
        guidance_scale=sampling.guidance_scale,
        image_guidance_scale=sampling.image_guidance_scale,
        text_oscillation=sampling.text_oscillation,
        image_oscillation=sampling.image_oscillation,
        temporal_image_scaling=sampling.temporal_image_scaling,
        mean_of=sampling.mean_guidance_of,
        interval=sampling.guidance_interval,
    )


def _start(settings: GenerateSettings, timesteps: tuple[float, ...]) -> int:
    """Return the step at which a video starts from its draft."""
    start, stop = start_step(timesteps, settings.draft.strength), settings.sampling.stop_at
    if stop is not None and stop <= start:
        raise RequestError(
            f"sampling.stop_at={stop} is over where the video starts from its draft, after step {start}",
            hint="stop later, or use a greater --draft-strength",
        )
    return start


def rank_hardware(settings: GenerateSettings, *, device: str | None = None) -> Hardware:
    """Return the device of a rank; ranks on the CPU of one machine share its memory.

    `device` None means the device of `settings`. Raises HardwareError if there is no such device.
    """
    parallel = settings.parallel
    if device is None and parallel.devices is not None and parallel.world_size == 1:
        device = indexed(parallel.devices[0])
    hardware = pick_hardware(device or settings.runtime.device, settings.runtime.dtype)
    if is_accelerator(hardware.device):
        return hardware
    return replace(hardware, free_bytes=hardware.free_bytes // parallel.ranks_per_node)


def attention_use(settings: GenerateSettings, hardware: Hardware, mesh: MeshShape) -> AttentionUse:
    """Return the requirements of one rank on its attention backend."""
    head_dim = settings.model.hidden_size // settings.model.num_heads
    return AttentionUse(device=hardware.device, dtype=hardware.dtype, head_dim=head_dim, in_parts=mesh.ring > 1)


def require_weights(chain: Chain, reporter: Reporter) -> None:
    """Raise CheckpointError if weights are missing, with a warning if they would not fit either."""
    for _, plan in chain.jobs:
        if plan.missing_weights and not chain.fits:
            # The user should know before downloading 40 GB.
            try:
                require_fit(chain)
            except HardwareError as error:
                reporter.warn(f"with its weights this would not run here either: {error.message}")
        plan.weights.require(plan.components)
    weights = chain.video.weights
    if borrowed := weights.borrowed():
        folder = weights.path(Component.TRANSFORMER).parent
        reporter.note(f"weights: {', '.join(borrowed)} are the demo's own, since {folder} has none")


def require_room(chain: Chain, reporter: Reporter) -> None:
    """Raise HardwareError if a stage does not fit in memory, and note how the plan saves memory."""
    require_fit(chain)
    facts = chain.facts()
    for name in ("first", "devices", "exchange", "offload"):
        if name in facts:
            reporter.note(f"{name}: {facts[name]}")
    note_exceptions(chain.video, reporter)


def note_exceptions(plan: Plan, reporter: Reporter) -> None:
    """Note a picture of another shape, and offload settings that have no effect on a CPU, which maps weights."""
    if plan.size_note is not None:
        reporter.note(plan.size_note)
    memory = plan.settings.memory
    asked: dict[str, object] = {}
    if plan.files is not None and memory.host_weights is HostWeights.PINNED:
        asked = {"memory.host_weights": memory.host_weights}
    if not (plan.decodes_only or plan.offloadable.num_blocks):
        offload = memory.offload if memory.offload is OffloadMode.BLOCKS else None
        asked = {
            "memory.offload": offload,
            "memory.resident_blocks": memory.resident_blocks,
            "memory.host_weights": memory.host_weights,
        }
    named = ", ".join(f"{name}={value}" for name, value in asked.items() if value is not None)
    if named:
        reporter.note(
            f"memory: {named} has no effect on a CPU, which computes with weights where they are mapped from their file"
        )


def require_fit(chain: Chain) -> None:
    """Raise HardwareError, with the changes that would fit, if a stage needs more memory than may be used."""
    if chain.fits:
        return
    worst, plan = max(chain.stages, key=lambda stage: stage.total_bytes), chain.video
    hardware, budget = plan.hardware, gib_or_less(plan.budget_bytes)
    has = f"memory.limit allows {budget}" if plan.budget_bytes < hardware.free_bytes else f"has {budget} free"
    raise HardwareError(
        f"the stage {worst.name} needs {gib_or_less(worst.total_bytes)}, and {hardware.device} "
        f"({hardware.device_name}) {has}",
        hint=_what_would_fit(plan),
    )


def _what_would_fit(plan: Plan) -> str:
    """Name the changes that each make the request fit without the others."""
    fitting = []
    for flag, changes in _smaller_requests(plan):
        try:
            changed = plan.settings.replace(changes)
            # The same free memory: loaded models that the plan does not need count as free.
            dtype = plan.hardware.dtype if changed.runtime.dtype is DType.AUTO else torch_dtype(changed.runtime.dtype)
            hardware = replace(plan.hardware, dtype=dtype)
            smaller = make_chain(changed, hardware=hardware, tries_device=plan.hardware.is_here)
        except (OsoraError, ValueError):
            continue  # such as a video too short for its references
        if smaller.fits:
            fitting.append(f"{flag} ({gib_or_less(smaller.peak_bytes)})")
    if not fitting:
        return "use a device with more memory, or --model demo"
    return f"{' or '.join(filter(None, (', '.join(fitting[:-1]), fitting[-1])))} would fit"


def _smaller_requests(plan: Plan) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield changes as a flag and as settings: first changes that keep the result, last the smallest video."""
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
