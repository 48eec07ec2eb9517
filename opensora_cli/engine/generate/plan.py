"""What a generation will do, worked out before any weight is read: settings and hardware become an `ExecutionPlan`."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from opensora_cli.core.attention_kinds import attention_problems
from opensora_cli.core.conditions import CONTINUING, condition_mode
from opensora_cli.core.exceptions import RequestError
from opensora_cli.engine.components.attention import AttentionPlan, AttentionUse, choose_attention
from opensora_cli.engine.components.autoencoders import require_same_scale
from opensora_cli.engine.components.configs import mmdit_config
from opensora_cli.engine.components.hardware import Hardware, pick_hardware
from opensora_cli.engine.components.linear_products import require_products
from opensora_cli.engine.components.loras import lora_ranks, open_loras
from opensora_cli.engine.components.parallelize import choose_mesh, plan_exchange, require_branches
from opensora_cli.engine.components.weights import Component, WeightFiles, find_weights
from opensora_cli.engine.estimate.generation import GenerationSizes
from opensora_cli.engine.generate.draft import draft_settings, start_step
from opensora_cli.engine.generate.execution_plan import ExecutionPlan
from opensora_cli.engine.generate.fitting import Fitting, num_blocks
from opensora_cli.engine.generate.picture import PICTURE_MODE, picture_settings, size_of_picture
from opensora_cli.engine.generate.targets import num_samples
from opensora_cli.parallel.all_to_all import ExchangePlan
from opensora_cli.parallel.mesh import MeshShape
from opensora_cli.sampling.guidance import NO_GUIDANCE, Guidance, GuidanceScales, busiest, guidance_scales
from opensora_cli.sampling.schedule import flow_timesteps, latent_size
from opensora_cli.sampling.sizes import image_size
from opensora_cli.sampling.step_cache import one_of_each_phase
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.sampling import AUTO

_OF_CONTINUATION: Mapping[str, object] = {
    "video.extend": 0,
    "prompts_at": (),
    "condition.mode": "t2v",
    "condition.references": (),
    "picture.first": False,
    "picture.save": False,
}
"""What a segment is not asked for that goes on from frames which are in no file."""


def make_plan(
    settings: GenerateSettings,
    *,
    hardware: Hardware | None = None,
    tries_device: bool = True,
    clips: int | None = None,
    held_frames: int | None = None,
) -> ExecutionPlan:
    """Return the plan for `settings`, which have their condition mode (`references.with_mode`), on this machine.

    Neither weights nor enough memory are needed: see `WeightFiles.require` and `room.require_fit`. `hardware`
    is where one of several ranks runs; None: what `settings` name, of which each rank has its share. `tries_device`:
    whether this process may use the device, on which kernels of attention are tried. `clips`: those of all requests
    with this plan, which may be computed together; None: of this one. `held_frames` are those of the segments before
    this one, which it goes on from; None: it does not.

    Raises:
        RequestError: sizes that contradict each other, or an adapter of a kind that cannot be added.
        CheckpointError: an adapter is missing or broken, or does not fit the transformer; or the latter was trained on
            latents of another scale.
        HardwareError: there is no such device, or the attention or the products that are asked for do not work there.
    """
    hardware = hardware or rank_hardware(settings)
    # Segments are made one by one.
    clips = 1 if settings.video.extend or held_frames else clips or num_samples(settings)
    weights = _checked_weights(settings)
    height, width, size_note = _pixel_size(settings)
    latent_shape = _latent_shape(settings, height, width)

    def nested(
        asked: GenerateSettings | None, *, clips: int | None = None, held_frames: int | None = None
    ) -> ExecutionPlan | None:
        if asked is None:
            return None
        return make_plan(asked, hardware=hardware, tries_device=tries_device, clips=clips, held_frames=held_frames)

    picture = nested(picture_settings(settings), clips=clips)
    if picture is not None:
        _, _, size_note = size_of_picture(settings, settings.picture.resolution)
    draft = nested(draft_settings(settings, height=height, width=width))
    continuation = nested(continuation_settings(settings), held_frames=settings.num_frames)
    named = settings.condition.mode or ("t2v" if picture is None else PICTURE_MODE)
    mode = CONTINUING if held_frames else condition_mode(named, num_latent_frames=settings.num_latent_frames)
    timesteps = _timesteps(settings, latent_shape)
    guidance = _guidance(settings)
    scales = guidance_scales(guidance, mode=mode, timesteps=timesteps, num_latent_frames=settings.num_latent_frames)
    mesh = _mesh(settings, latent_shape, scales)
    exchange, attention = ExchangePlan(), None
    if settings.from_latents is None:
        exchange = plan_exchange(
            settings.parallel, mesh, num_heads=settings.model.num_heads, itemsize=hardware.dtype.itemsize
        )
        attention = _attention(settings, hardware, mesh, tries_device)
        require_products(
            settings.precision.linear,
            mmdit_config(settings.model),
            device=hardware.device,
            dtype=hardware.dtype,
            tensor=mesh.tensor,
            tries_device=tries_device,
        )
    # Saved latents have gone through them already.
    loras = open_loras(settings.loras if settings.from_latents is None else (), settings.model)
    sizes = GenerationSizes(
        height=height,
        width=width,
        latent_shape=latent_shape,
        mode=mode,
        lengths=settings.condition.lengths,
        scales=busiest(scales),
        solver=settings.sampling.solver,
        cached=one_of_each_phase(scales) if settings.sampling.step_cache else (),
        mesh=mesh,
        exchange=exchange,
        loras=lora_ranks(loras),
        attention="sdpa" if attention is None else attention.backend,
        has_draft=draft is not None,
    )
    held_bytes = (held_frames or 0) * height * width * 3
    fitting = Fitting.of(settings, hardware=hardware, weights=weights, sizes=sizes, clips=clips, held_bytes=held_bytes)
    offload = fitting.choose(fitting.budget_bytes)
    plan = ExecutionPlan(
        settings=settings,
        hardware=hardware,
        weights=weights,
        mode=mode,
        lengths=settings.condition.lengths,
        guidance=guidance,
        height=height,
        width=width,
        size_note=size_note,
        latent_shape=latent_shape,
        timesteps=timesteps,
        mesh=mesh,
        exchange=exchange,
        fitting=fitting,
        offload=offload,
        stages=fitting.estimate(offload),
        loras=loras,
        attention=attention,
        picture=picture,
        draft=draft,
        start=0 if draft is None else _start(settings, timesteps),
        continuation=continuation,
    )
    _require_effect(plan)
    return plan


def _require_effect(plan: ExecutionPlan) -> None:
    """Raise RequestError if the steps are too far apart for the step cache that is asked for, other than as a part of
    `sampling.fast`.
    """
    change = plan.settings.sampling.step_cache
    if change and not plan.reused_steps and not plan.decodes_only and not plan.settings.sampling.fast:
        raise RequestError(
            f"sampling.step_cache={change:g} has no effect on {len(plan.timesteps) - 1} steps, which are further apart",
            hint="use a larger one, or more steps",
        )


def continuation_settings(settings: GenerateSettings) -> GenerateSettings | None:
    """Return what asks for a segment that goes on from the one before; None where there is one segment alone."""
    return settings.replace(_OF_CONTINUATION) if settings.video.extend else None


def _checked_weights(settings: GenerateSettings) -> WeightFiles:
    """Return where the weights are, if those that are there can go together."""
    blocks, resident = num_blocks(settings), settings.memory.resident_blocks
    if resident is not None and resident > blocks:
        raise RequestError(f"memory.resident_blocks={resident} must be at most the {blocks} of the model")
    weights = find_weights(settings)
    if settings.from_latents is None and Component.TRANSFORMER in weights.paths:
        require_same_scale(weights.paths[Component.TRANSFORMER], settings.vae)
    return weights


def _latent_shape(settings: GenerateSettings, height: int, width: int) -> tuple[int, int, int, int]:
    grid = settings.vae.grid
    rows, columns = latent_size(
        height, width, spatial_compression=grid.spatial_compression_ratio, patch_size=settings.model.patch_size
    )
    return grid.latent_channels, settings.num_latent_frames, rows, columns


def _timesteps(settings: GenerateSettings, latent_shape: tuple[int, int, int, int]) -> tuple[float, ...]:
    sampling, (_, num_latent_frames, rows, columns) = settings.sampling, latent_shape
    return sampling.timesteps or tuple(
        flow_timesteps(
            sampling.num_inference_steps,
            tokens_per_frame=rows * columns // settings.model.patch_size**2,
            num_latent_frames=num_latent_frames,
            flow_shift=sampling.flow_shift,
        )
    )


def _start(settings: GenerateSettings, timesteps: tuple[float, ...]) -> int:
    """Return the step from which a video starts that has a draft."""
    start, stop = start_step(timesteps, settings.draft.strength), settings.sampling.stop_at
    if stop is not None and stop <= start:
        raise RequestError(
            f"sampling.stop_at={stop} is over where the video starts from its draft, after step {start}",
            hint="stop later, or use a greater --draft-strength",
        )
    return start


def _mesh(
    settings: GenerateSettings, latent_shape: tuple[int, int, int, int], scales: Sequence[GuidanceScales]
) -> MeshShape:
    mesh = choose_mesh(settings, video_tokens=prod(latent_shape[1:]) // settings.model.patch_size**2)
    require_branches(mesh, scales)
    batch_size = settings.sampling.batch_size
    if mesh.size > 1 and batch_size not in (1, AUTO):
        raise RequestError(
            f"sampling.batch_size={batch_size} is for videos of one device, and {mesh.size} share each",
            hint="use 1, or one device; with --prompts each device makes rows of its own",
        )
    return mesh


def rank_hardware(settings: GenerateSettings, *, device: str | None = None) -> Hardware:
    """Return the device of a rank (None: the one in `settings`); ranks on the CPU of one machine share its memory.

    A HardwareError if there is no such device.
    """
    parallel = settings.parallel
    if device is None and parallel.devices is not None and parallel.world_size == 1:
        device = f"cuda:{parallel.devices[0]}"
    hardware = pick_hardware(device or settings.runtime.device, settings.runtime.dtype)
    if hardware.device.type == "cuda":
        return hardware
    return replace(hardware, free_bytes=hardware.free_bytes // parallel.ranks_per_node)


def attention_use(settings: GenerateSettings, hardware: Hardware, mesh: MeshShape) -> AttentionUse:
    """Return the requirements of one rank on its attention backend."""
    head_dim = settings.model.hidden_size // settings.model.num_heads
    return AttentionUse(device=hardware.device, dtype=hardware.dtype, head_dim=head_dim, in_parts=mesh.ring > 1)


def _attention(settings: GenerateSettings, hardware: Hardware, mesh: MeshShape, tries_device: bool) -> AttentionPlan:
    choice, setting = settings.runtime.attention, "runtime.attention"
    # A ring that was not asked for is known only now.
    for problem in attention_problems(choice, setting=setting, ring_degree=mesh.ring, is_fp32=False):
        raise RequestError(problem)
    use = attention_use(settings, hardware, mesh)
    return choose_attention(choice, use, setting=setting, tries_device=tries_device)


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


def _pixel_size(settings: GenerateSettings) -> tuple[int, int, str | None]:
    """Return height, width, and what is special about them."""
    video = settings.video
    if video.height is not None and video.width is not None:
        return video.height, video.width, None
    if settings.vae.kind.makes_videos:
        return *image_size(video.resolution, video.aspect_ratio, multiple=settings.size_multiple), None
    return size_of_picture(settings, video.resolution)
