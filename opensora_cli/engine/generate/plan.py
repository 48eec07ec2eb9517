"""Plan of one job of a request: sizes, steps, and the memory of each stage."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from pathlib import Path

from opensora_cli.core.attention import attention_problems
from opensora_cli.core.choices import LinearProducts
from opensora_cli.core.conditions import CONTINUING, ConditionMode, condition_mode
from opensora_cli.core.exceptions import RequestError
from opensora_cli.core.limits import ThreadChoice, read_private_memory
from opensora_cli.engine.components.architectures import (
    count_parameters,
    decodes_in_chunks,
    mmdit_config,
    require_same_scale,
)
from opensora_cli.engine.components.attention import AttentionPlan, attention_use, choose_attention
from opensora_cli.engine.components.few_steps import adapters_of
from opensora_cli.engine.components.hardware import Hardware, rank_hardware
from opensora_cli.engine.components.linear_products import require_products
from opensora_cli.engine.components.loras import Lora, open_loras
from opensora_cli.engine.components.parallelize import (
    PlannedExchange,
    choose_mesh,
    describe_exchange,
    exchanged_bytes,
    plan_exchange,
    require_branches,
)
from opensora_cli.engine.components.weights import Component, WeightFiles, find_weights, needed_components
from opensora_cli.engine.estimate.generation import computes_modulation_first, estimate_generation
from opensora_cli.engine.estimate.offload import (
    CHUNK_TOKENS,
    DECODE,
    HostMemory,
    Offloadable,
    OffloadPlan,
    StageMemory,
    choose_offload,
    stronger_offload,
)
from opensora_cli.engine.estimate.weights import FileWeights, file_weights, streamed_bytes
from opensora_cli.engine.generate.request import PICTURE_MODE, pixel_size, size_of_picture
from opensora_cli.parallel.shares import ExchangePlan, MeshShape
from opensora_cli.sampling.denoise import last_times
from opensora_cli.sampling.guidance import (
    NO_GUIDANCE,
    Branch,
    Guidance,
    GuidanceScales,
    count_evaluations,
    guidance_scales,
)
from opensora_cli.sampling.schedule import flow_timesteps, latent_size
from opensora_cli.sampling.step_cache import CachedStep, Phase, cached_steps
from opensora_cli.settings.devices import HostWeights
from opensora_cli.settings.generate import GenerateSettings

PICTURE, DRAFT, VIDEO, SEGMENT = "picture", "draft", "video", "extend"
"""Roles of jobs. Names of stages begin with the role of their job; stages of the video have no prefix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Plan of one job, a clip to make for each sample of a request; complete before the job begins."""

    role: str = VIDEO
    """PICTURE, DRAFT, VIDEO or SEGMENT."""
    settings: GenerateSettings
    """Settings of the job, with a condition mode."""
    hardware: Hardware
    weights: WeightFiles
    mode: ConditionMode
    guidance: Guidance
    height: int
    width: int
    size_note: str | None = None
    """Note about a picture whose shape is not the requested one."""
    latent_shape: tuple[int, int, int, int]
    """(C, T, H, W) of one sample."""
    timesteps: tuple[float, ...]
    start: int = 0
    """Steps that are skipped because the video starts from its draft."""
    mesh: MeshShape = field(default_factory=MeshShape)
    exchange: ExchangePlan = field(default_factory=ExchangePlan)
    loras: tuple[Lora, ...] = ()
    attention: AttentionPlan | None = None
    """Attention backend; None if the transformer does not run."""
    parameters: Mapping[Component, int] = field(repr=False, compare=False)
    """Number of parameters of each component."""
    files: Mapping[Component, FileWeights] | None = field(repr=False, compare=False)
    """Weights that a CPU maps from their files; None on other devices."""
    offload: OffloadPlan = field(default_factory=OffloadPlan)
    stages: tuple[StageMemory, ...] = ()
    """Memory of each stage with this offload, on each rank. Only rank 0 encodes references."""
    threads: ThreadChoice | None = None
    """Threads of the CPU; None until they are chosen."""

    @property
    def decodes_only(self) -> bool:
        """Whether the job decodes saved latents, without sampling."""
        return self.settings.from_latents is not None

    @property
    def components(self) -> tuple[Component, ...]:
        return needed_components(self.settings)

    @property
    def weight_paths(self) -> dict[Component, Path]:
        """Files and folders of the weights to read that were found."""
        return {name: path for name, path in self.weights.paths.items() if name in self.components}

    @property
    def missing_weights(self) -> tuple[str, ...]:
        return tuple(name for component in self.components for name in self.weights.missing.get(component, ()))

    @property
    def summary(self) -> str:
        clip = self.settings.video.num_frames
        frames = "" if clip == 1 else f", {clip} frames"
        return f"{self.width}x{self.height}{frames}, by {self.settings.model.name} in {self.num_steps} steps"

    @property
    def num_frames(self) -> int:
        """Frames of the result, with all segments."""
        return self.settings.num_frames

    @property
    def video_tokens(self) -> int:
        """Packed tokens of one sample."""
        return prod(self.latent_shape[1:]) // self.settings.model.patch_size**2

    @property
    def latent_bytes(self) -> int:
        """Size of the latents of one clip."""
        return prod(self.latent_shape) * self.hardware.dtype.itemsize

    @property
    def num_steps(self) -> int:
        return len(self.timesteps) - 1

    @property
    def scales(self) -> tuple[GuidanceScales, ...]:
        frames = self.latent_shape[1]
        return guidance_scales(self.guidance, mode=self.mode, timesteps=self.timesteps, num_latent_frames=frames)

    @property
    def cache(self) -> tuple[CachedStep, ...] | None:
        """Steps with a step cache; None without one."""
        change = self.settings.sampling.step_cache
        if not change:
            return None
        return cached_steps(self.scales, self.timesteps, largest_change=change, begun_at=self.start)

    @property
    def reused_steps(self) -> tuple[int, ...]:
        return tuple(step for step, each in enumerate(self.cache or ()) if each.is_reused)

    def past_times(self, steps_done: int) -> dict[Branch | Phase, float]:
        """Return the times of the earlier model outputs that the next step uses; see `last_times`."""
        return last_times(
            self.scales,
            self.timesteps,
            solver=self.settings.sampling.solver,
            cache=self.cache,
            begun_at=self.start,
            steps_done=steps_done,
        )

    def evaluations_after(self, steps_done: int, *, ranks: int = 1) -> int:
        """Return the number of model evaluations of a sample after some steps, on the busiest of `ranks`."""
        sampling, steps_done = self.settings.sampling, max(steps_done, self.start)

        def left(done: int) -> int:
            return count_evaluations(
                self.scales, solver=sampling.solver, reused=self.reused_steps, steps_done=done, ranks=ranks
            )

        if self.decodes_only:
            return 0
        # A resumed run recomputes the outputs that its cache needs.
        again = sum(-(-len(key) // ranks) for key in self.past_times(steps_done) if isinstance(key, tuple))
        return again + max(0, left(steps_done) - (0 if sampling.stop_at is None else left(sampling.stop_at)))

    @property
    def model_evaluations(self) -> int:
        return self.evaluations_after(0)

    @property
    def planned_exchange(self) -> PlannedExchange | None:
        """Exchange of tokens for heads between ranks; None without one."""
        if self.mesh.ulysses == 1 or self.decodes_only:
            return None
        exchanged = exchanged_bytes(
            self.exchange,
            self.mesh,
            mmdit_config(self.settings.model),
            video_tokens=self.video_tokens,
            text_tokens=self.settings.text.t5_max_length,
            itemsize=self.hardware.dtype.itemsize,
        )
        how = describe_exchange(self.settings.parallel, self.exchange, self.mesh)
        return PlannedExchange(how=how, bytes_per_evaluation=exchanged)

    @property
    def budget_bytes(self) -> int:
        """Usable device memory: the free memory, or `memory.limit` if that is less."""
        return min(self.hardware.free_bytes, self.settings.memory.limit or self.hardware.free_bytes)

    @property
    def host(self) -> HostMemory:
        """Host memory of a machine whose ranks run the job, in addition to that of their devices."""
        offload, dtype, ranks = self.offload, self.hardware.dtype, self.settings.parallel.ranks_per_node
        if self.hardware.device.type == "cpu":
            return HostMemory(pinned_bytes=0, page_cache_bytes=sum(stage.mapped_bytes for stage in self.stages))
        weights = sum(count * dtype.itemsize for name, count in self.parameters.items() if name in self.components)
        pinned = 0
        if not self.decodes_only and offload.host_weights is HostWeights.PINNED:
            pinned = streamed_bytes(mmdit_config(self.settings.model), dtype, offload, tensor=self.mesh.tensor)
        if offload.store_on_host:
            on_device = estimate_generation(self, replace(offload, store_on_host=False))
            pinned = max(pinned, _decoding_bytes(on_device) - _decoding_bytes(self.stages))
        return HostMemory(pinned_bytes=ranks * pinned, page_cache_bytes=weights)

    @property
    def offloadable(self) -> Offloadable:
        """Parts of the job that can take less memory of the device."""
        settings, dtype, ranks, files = self.settings, self.hardware.dtype, self.mesh.size, self.files
        host_bytes = read_private_memory().free_bytes if self.hardware.is_here else self.hardware.host_bytes
        # Each of several ranks would make a copy of its own; they share the mapped file.
        has_room = ranks == 1 and 1.25 * self.parameters[Component.TRANSFORMER] * dtype.itemsize < (host_bytes or 0)
        in_8_bits = settings.memory.fp8_storage or settings.precision.linear is not LinearProducts.EXACT
        is_alone = not in_8_bits and self.mesh.tensor == 1
        can_stream = files is None or (is_alone and files[Component.TRANSFORMER].can_be_cast_later(dtype))
        # Compiled blocks compute all tokens at once.
        tokens = self.video_tokens + settings.text.t5_max_length if settings.compile else 0
        return Offloadable(
            num_blocks=settings.model.depth + settings.model.depth_single_blocks if can_stream else 0,
            host_weights=HostWeights.PINNED if has_room and files is None else HostWeights.MAPPED,
            text=files is None or files[Component.T5].can_be_cast_later(dtype),
            # Ranks that share the layers of T5 compute a part of each layer; ranks that stream them compute all.
            text_first=files is not None and ranks == 1,
            frames=decodes_in_chunks(settings.vae),
            linear=settings.precision.linear,
            chunk_tokens=max(CHUNK_TOKENS, tokens),
            modulation_first=computes_modulation_first(settings),
            on_cpu=files is not None,
        )

    def with_offload(self, offload: OffloadPlan) -> "Plan":
        return replace(self, offload=offload, stages=estimate_generation(self, offload))

    def with_stronger_offload(self, stage: str) -> "Plan | None":
        """Return a plan in which `stage` needs much less memory; None without one, and for several ranks."""
        stronger = stronger_offload(self.offload, stage, self.offloadable) if self.mesh.size == 1 else None
        return None if stronger is None else self.with_offload(stronger)


def make_plan(
    settings: GenerateSettings,
    *,
    role: str = VIDEO,
    hardware: Hardware | None = None,
    tries_device: bool = True,
) -> Plan:
    """Return the plan of one job on this machine.

    Neither weights nor enough memory are needed; `chain.require_runnable` checks them.

    Args:
        settings: settings with a condition mode; see `request.with_mode`.
        hardware: device of one of several ranks; None means a rank's share of the device of `settings`.
        tries_device: whether this process may use the device, to check attention kernels.
    """
    hardware = hardware or rank_hardware(settings)
    model, sampling, grid = settings.model, settings.sampling, settings.vae.grid
    blocks, resident = model.depth + model.depth_single_blocks, settings.memory.resident_blocks
    if resident is not None and resident > blocks:
        raise RequestError(f"memory.resident_blocks={resident} must be at most {blocks}, the blocks of the model")
    weights = find_weights(settings)
    samples = settings.from_latents is None
    if samples and Component.TRANSFORMER in weights.paths:
        require_same_scale(weights.paths[Component.TRANSFORMER], settings.vae)

    height, width, size_note = pixel_size(settings)
    rows, columns = latent_size(
        height, width, spatial_compression=grid.spatial_compression_ratio, patch_size=model.patch_size
    )
    frames = settings.sampled_latent_frames
    latent_shape = grid.latent_channels, frames, rows, columns
    makes_picture = settings.picture.first and samples
    if makes_picture:
        _, _, size_note = size_of_picture(settings, settings.picture.resolution)
    named = settings.condition.mode or (PICTURE_MODE if makes_picture else "t2v")
    mode = CONTINUING if role == SEGMENT else condition_mode(named, num_latent_frames=settings.num_latent_frames)

    timesteps = sampling.timesteps or tuple(
        flow_timesteps(
            sampling.num_inference_steps,
            tokens_per_frame=rows * columns // model.patch_size**2,
            num_latent_frames=frames,
            flow_shift=sampling.flow_shift,
        )
    )
    guidance = _guidance(settings)
    scales = guidance_scales(guidance, mode=mode, timesteps=timesteps, num_latent_frames=frames)
    mesh = choose_mesh(settings, video_tokens=prod(latent_shape[1:]) // model.patch_size**2)
    require_branches(mesh, scales)

    exchange, attention, loras, dtype = ExchangePlan(), None, tuple[Lora, ...](), hardware.dtype
    if samples:
        if adapters := adapters_of(settings):
            loras = open_loras(adapters, model)
        exchange = plan_exchange(settings.parallel, mesh, itemsize=dtype.itemsize)
        choice, setting = settings.runtime.attention, "runtime.attention"
        # The degree of a ring that the settings leave open is known only now.
        for problem in attention_problems(choice, setting=setting, ring_degree=mesh.ring, is_fp32=False):
            raise RequestError(problem)
        use = attention_use(settings, hardware, mesh)
        attention = choose_attention(choice, use, setting=setting, tries_device=tries_device)
        if (linear := settings.precision.linear) is not LinearProducts.EXACT:
            config, on, tensor = mmdit_config(model), hardware.device, mesh.tensor
            require_products(linear, config, device=on, dtype=dtype, tensor=tensor, tries_device=tries_device)

    parameters, files = count_parameters(settings, weights), None
    if hardware.device.type == "cpu":
        files = file_weights(settings, weights, parameters, dtype)
    plan = Plan(
        role=role,
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
    )
    change = sampling.step_cache
    # A step cache that comes from `sampling.fast` may have no effect.
    if change and samples and not sampling.fast and not plan.reused_steps:
        raise RequestError(
            f"sampling.step_cache={change:g} has no effect on {plan.num_steps} steps, which are further apart",
            hint="use a larger one, or more steps",
        )
    memory = settings.memory
    if files is not None:  # A copy gains nothing over the mapped file.
        memory = memory.replace({"host_weights": None})
    return plan.with_offload(
        choose_offload(memory, plan.offloadable, partial(estimate_generation, plan), budget=plan.budget_bytes)
    )


def _decoding_bytes(stages: tuple[StageMemory, ...]) -> int:
    return next(stage.activation_bytes for stage in stages if stage.name == DECODE)


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
    """Return the step at which a video starts from its draft: neither the first nor the last."""
    strength, stop = settings.draft.strength, settings.sampling.stop_at
    start = min(range(1, len(timesteps) - 1), key=lambda step: abs(timesteps[step] - strength))
    if stop is not None and stop <= start:
        raise RequestError(
            f"sampling.stop_at={stop} is over where the video starts from its draft, after step {start}",
            hint="stop later, or use a greater --draft-strength",
        )
    return start
