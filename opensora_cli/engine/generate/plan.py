"""What a generation will do, worked out before any weight is read: settings and hardware become an `ExecutionPlan`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod

import torch

from opensora_cli.core.attention_kinds import attention_problems
from opensora_cli.core.conditions import CONTINUING, ConditionMode, ReferenceLengths, condition_mode
from opensora_cli.core.exceptions import HardwareError, OsoraError, RequestError
from opensora_cli.core.threads import ThreadChoice, pick_threads
from opensora_cli.engine.components.attention import AttentionPlan, AttentionUse, choose_attention
from opensora_cli.engine.components.autoencoders import require_same_scale
from opensora_cli.engine.components.configs import mmdit_config
from opensora_cli.engine.components.exchanges import AttentionSizes, PlannedExchange, plan_exchange
from opensora_cli.engine.components.hardware import GIB, Hardware, pick_hardware
from opensora_cli.engine.components.loras import Lora, LoraRanks, open_loras
from opensora_cli.engine.components.parallelize import choose_mesh, require_branches
from opensora_cli.engine.components.weights import Component, WeightFiles, find_weights, needed_components
from opensora_cli.engine.estimate.generation import GenerationSizes
from opensora_cli.engine.estimate.offload import DENOISE, TEXT, OffloadPlan, StageMemory
from opensora_cli.engine.generate.draft import draft_settings, start_step
from opensora_cli.engine.generate.fitting import Fitting, num_blocks
from opensora_cli.engine.generate.picture import PICTURE_MODE, picture_settings, size_of_picture
from opensora_cli.engine.generate.targets import num_samples
from opensora_cli.parallel.all_to_all import ExchangePlan
from opensora_cli.parallel.mesh import MeshShape
from opensora_cli.sampling.guidance import Guidance, count_evaluations
from opensora_cli.sampling.schedule import flow_timesteps, latent_size
from opensora_cli.sampling.sizes import image_size
from opensora_cli.settings.enums import DType, OffloadChoice
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.sampling import AUTO

PICTURE = "picture"
"""What the names of the stages of a picture that is made first begin with."""
EXTENSION = "extend"
"""Likewise of the segments that are made after the first."""
DRAFT = "draft"
"""Likewise of a smaller video that is made first."""

_OF_CONTINUATION: Mapping[str, object] = {
    "video.extend": 0,
    "prompts_at": (),
    "condition.mode": "t2v",
    "condition.references": (),
    "picture.first": False,
    "picture.save": False,
}
"""What a segment is not asked for that goes on from frames which are in no file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionPlan:
    """Everything that is decided before a generation begins."""

    settings: GenerateSettings
    """With the condition mode filled in."""
    hardware: Hardware
    weights: WeightFiles
    mode: ConditionMode
    lengths: ReferenceLengths
    guidance: Guidance
    height: int
    width: int
    size_note: str | None = None
    """That the picture, or the one that is made first, has another shape than was asked for; None: it has not."""
    latent_shape: tuple[int, int, int, int]
    """(C, T, H, W) of one sample."""
    timesteps: tuple[float, ...]
    evaluations_per_sample: int
    """Model evaluations that the sampling of one clip takes; 0 where saved latents are decoded."""
    mesh: MeshShape = field(default_factory=MeshShape)
    exchange: ExchangePlan = field(default_factory=ExchangePlan)
    fitting: Fitting = field(repr=False, compare=False)
    """From which the offload was chosen."""
    offload: OffloadPlan
    stages: tuple[StageMemory, ...]
    """With that offload, on each of the ranks; rank 0 alone encodes references."""
    loras: tuple[Lora, ...] = ()
    attention: AttentionPlan | None = None
    """None: the transformer does not run."""
    picture: "ExecutionPlan | None" = None
    """Of the picture that is made first, and given; None: none is."""
    draft: "ExecutionPlan | None" = None
    """Of the smaller video that is made first; None: none is."""
    start: int = 0
    """Steps that are left out, since the video starts from its draft."""
    continuation: "ExecutionPlan | None" = None
    """Of each segment that goes on from the one before; None: there is one alone."""
    threads: ThreadChoice | None = None
    """That compute on the CPU; None: not chosen yet, which takes a look at the load of the machine."""

    @property
    def decodes_only(self) -> bool:
        """Whether saved latents are decoded, and nothing is sampled."""
        return self.settings.from_latents is not None

    @property
    def components(self) -> tuple[Component, ...]:
        """The parts whose weights are read."""
        return needed_components(self.settings)

    @property
    def num_samples(self) -> int:
        """How many videos are made."""
        return num_samples(self.settings)

    @property
    def segments(self) -> "tuple[ExecutionPlan, ...]":
        """The plan of each clip that a video is made of, in their order; of one that is not extended itself."""
        if self.continuation is None:
            return (self,)
        return (replace(self, continuation=None), *[self.continuation] * self.settings.video.extend)

    @property
    def num_steps(self) -> int:
        """Steps of one sample, those of all its segments."""
        return len(self.segments) * (len(self.timesteps) - 1)

    @property
    def model_evaluations(self) -> int:
        """Model evaluations of one sample."""
        return self.evaluations_after(0)

    def evaluations_after(self, steps: int) -> int:
        """Return how many of a sample's model evaluations are left after so many of `num_steps`."""
        done, steps = divmod(steps, len(self.timesteps) - 1)
        left = self.segments[done:]
        begun = _evaluations(left[0].settings, left[0].guidance, left[0].mode, max(steps, self.start)) if left else 0
        if self.draft is not None and not steps:
            begun += self.draft.model_evaluations
        return begun + sum(segment.evaluations_per_sample for segment in left[1:])

    @property
    def what(self) -> str:
        """What is made, for people, without the number of samples."""
        size = f"{self.width}x{self.height}"
        settings = self.settings
        frames = "" if settings.video.num_frames == 1 else f", {settings.video.num_frames} frames"
        return f"{size}{frames}, by {settings.model.name} in {len(self.timesteps) - 1} steps"

    @property
    def num_frames(self) -> int:
        """Frames of the result."""
        return self.settings.num_frames

    @property
    def tokens_per_frame(self) -> int:
        """Packed tokens of one latent frame."""
        return self.latent_shape[2] * self.latent_shape[3] // self.settings.model.patch_size**2

    @property
    def video_tokens(self) -> int:
        """Packed tokens of one sample."""
        return self.tokens_per_frame * self.latent_shape[1]

    @property
    def layer_values(self) -> int:
        """Values in a layer of what takes longest: of the transformer, for one evaluation, or of the autoencoder."""
        settings = self.settings
        if self.decodes_only:
            return settings.video.num_frames * self.height * self.width * settings.vae.pixel_width
        tokens = self.video_tokens + settings.text.t5_max_length
        return tokens * settings.model.hidden_size * max(1, self.evaluations_per_sample // (len(self.timesteps) - 1))

    @property
    def latent_bytes(self) -> int:
        """Size of one sample's latents, of all its segments, in memory and on disk."""
        return len(self.segments) * prod(self.latent_shape) * self.hardware.dtype.itemsize

    @property
    def planned_exchange(self) -> PlannedExchange | None:
        """How the ranks exchange tokens for heads, and what they send; None: they do not."""
        if self.mesh.ulysses == 1 or self.decodes_only:
            return None
        config = mmdit_config(self.settings.model)
        sizes = AttentionSizes(
            attentions=config.depth + config.depth_single_blocks,
            num_heads=config.num_heads,
            head_dim=config.head_dim,
            video_tokens=self.video_tokens,
            text_tokens=self.settings.text.t5_max_length,
            itemsize=self.hardware.dtype.itemsize,
        )
        return PlannedExchange.of(self.settings.parallel, self.exchange, self.mesh, sizes)

    @property
    def peak_bytes(self) -> int:
        """The most memory of the device that a stage needs, those of a picture included."""
        return max(stage.total_bytes for stage in self.all_stages)

    @property
    def all_stages(self) -> tuple[StageMemory, ...]:
        """The stages, between those of what is made first and of a continuation, whose names say so."""
        pictures = () if self.picture is None else self.picture.stages
        drafts = () if self.draft is None else self.draft.stages
        more = () if self.continuation is None else [each for each in self.continuation.stages if each.name != TEXT]
        return (
            *(replace(stage, name=f"{PICTURE} {stage.name}") for stage in pictures),
            *(replace(stage, name=f"{DRAFT} {stage.name}") for stage in drafts),
            *self.stages,
            *(replace(stage, name=f"{EXTENSION} {stage.name}") for stage in more),
        )

    @property
    def budget_bytes(self) -> int:
        """The memory that may be used: what is free, or `memory.limit`."""
        return self.fitting.budget_bytes

    @property
    def reread_bytes(self) -> int:
        """What each evaluation reads of the transformer's file again, since the page cache has no room for it.

        The page cache has what this machine's ranks leave it of the free memory.
        """
        denoise = next((stage for stage in self.stages if stage.name == DENOISE), None)
        if denoise is None:
            return 0
        room = max(0, self.hardware.free_bytes - denoise.total_bytes) * self.settings.parallel.ranks_per_node
        return max(0, denoise.mapped_bytes - room)

    @property
    def budget_is_known(self) -> bool:
        """Whether the device was asked for its memory, or a limit is set."""
        return self.hardware.memory_is_known or self.settings.memory.limit is not None

    @property
    def fits(self) -> bool:
        """Whether that is enough."""
        return self.peak_bytes <= self.budget_bytes

    def with_threads(self, by: str | None = None) -> "ExecutionPlan":
        """Return a plan with the threads that compute, and `by` what their number was set; None: not known.

        On a CPU the settings record them, since sums depend on them.
        """
        settings = self.settings
        threads = pick_threads(
            asked=settings.runtime.threads, by=by, values=self.layer_values, ranks=settings.parallel.ranks_per_node
        )
        if self.hardware.device.type == "cpu":
            settings = settings.replace({"runtime.threads": threads.count})
        picture = self.picture and self.picture.with_threads(by)
        return replace(self, settings=settings, threads=threads, picture=picture)

    def with_stronger_offload(self, stage: str) -> "ExecutionPlan | None":
        """Return a plan under which `stage` needs much less memory; None where there is none, or several ranks run.

        What one rank is short of the others don't know: they would wait for it.
        """
        if self.mesh.size > 1:
            return None
        stronger = self.fitting.stronger(self.offload, stage)
        return None if stronger is None else self.with_offload(stronger)

    def with_offload(self, offload: OffloadPlan) -> "ExecutionPlan":
        """Return a plan with another offload."""
        return replace(self, offload=offload, stages=self.fitting.estimate(offload))

    def require_fit(self) -> None:
        """Raise HardwareError if some stage needs more memory than may be used."""
        if self.fits:
            return
        worst = max(self.all_stages, key=lambda stage: stage.total_bytes)
        hardware = self.hardware
        limited = self.budget_bytes < hardware.free_bytes
        has = (
            f"memory.limit allows {gib_or_less(self.budget_bytes)}"
            if limited
            else f"has {gib_or_less(self.budget_bytes)} free"
        )
        raise HardwareError(
            f"the stage {worst.name} needs {gib_or_less(worst.total_bytes)}, and {hardware.device} "
            f"({hardware.device_name}) {has}",
            hint=self._what_would_fit(),
        )

    def _what_would_fit(self) -> str:
        """Name the changes of which each alone makes it fit."""
        fitting = []
        for flag, changes in _smaller_requests(self):
            try:
                changed = self.settings.replace(changes)
                # What is free may be taken by models that this plan can do without.
                hardware = replace(rank_hardware(changed), free_bytes=self.hardware.free_bytes)
                plan = make_plan(changed, hardware=hardware, clips=self.fitting.clips)
            except (OsoraError, ValueError):
                continue  # such as too short a video for its references
            if plan.fits:
                fitting.append(f"{flag} ({gib_or_less(plan.peak_bytes)})")
        if not fitting:
            return "use a device with more memory, or --model demo"
        return f"{' or '.join(filter(None, (', '.join(fitting[:-1]), fitting[-1])))} would fit"


def _smaller_requests(plan: ExecutionPlan) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield what may be asked for instead, as a flag and as settings: first what changes nothing, then the smallest."""
    settings = plan.settings
    if plan.offload.batch_size > 1:
        yield "--set sampling.batch_size=1", {"sampling.batch_size": 1}
    if settings.memory.offload is not OffloadChoice.AUTO or settings.memory.resident_blocks is not None:
        yield "--offload auto", {"memory.offload": OffloadChoice.AUTO, "memory.resident_blocks": None}
    if plan.hardware.dtype is torch.float32:
        yield "--dtype bfloat16", {"runtime.dtype": DType.BFLOAT16}
    if not settings.memory.fp8_storage and not plan.decodes_only:
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


def make_plan(
    settings: GenerateSettings,
    *,
    hardware: Hardware | None = None,
    tries_device: bool = True,
    clips: int | None = None,
    held_frames: int | None = None,
) -> ExecutionPlan:
    """Return the plan for `settings`, which have their condition mode (`references.with_mode`), on this machine.

    Neither weights nor enough memory are needed: see `WeightFiles.require` and `ExecutionPlan.require_fit`. `hardware`
    is where one of several ranks runs; None: what `settings` name, of which each rank has its share. `tries_device`:
    whether this process may use the device, on which kernels of attention are tried. `clips`: those of all requests
    with this plan, which may be computed together; None: of this one. `held_frames` are those of the segments before
    this one, which it goes on from; None: it does not.

    Raises:
        RequestError: sizes that contradict each other, or an adapter of a kind that cannot be added.
        CheckpointError: an adapter is missing or broken, or does not fit the transformer; or the latter was trained on
            latents of another scale.
        HardwareError: there is no such device, or the attention that is asked for does not work there.
    """
    hardware = hardware or rank_hardware(settings)
    # Segments are made one by one.
    clips = 1 if settings.video.extend or held_frames else clips or num_samples(settings)
    blocks, resident = num_blocks(settings), settings.memory.resident_blocks
    if resident is not None and resident > blocks:
        raise RequestError(f"memory.resident_blocks={resident} must be at most the {blocks} of the model")
    weights = find_weights(settings)
    if settings.from_latents is None and Component.TRANSFORMER in weights.paths:
        require_same_scale(weights.paths[Component.TRANSFORMER], settings.vae)
    height, width, size_note = _pixel_size(settings)
    rows, columns = latent_size(
        height,
        width,
        spatial_compression=settings.vae.grid.spatial_compression_ratio,
        patch_size=settings.model.patch_size,
    )
    latent_shape = (settings.vae.grid.latent_channels, settings.num_latent_frames, rows, columns)
    sampling = settings.sampling
    tokens_per_frame = rows * columns // settings.model.patch_size**2
    asked = picture_settings(settings)
    picture = None if asked is None else make_plan(asked, hardware=hardware, tries_device=tries_device, clips=clips)
    if picture is not None:
        _, _, size_note = size_of_picture(settings, settings.picture.resolution)
    asked = draft_settings(settings, height=height, width=width)
    draft = None if asked is None else make_plan(asked, hardware=hardware, tries_device=tries_device)
    named = settings.condition.mode or ("t2v" if picture is None else PICTURE_MODE)
    mode = CONTINUING if held_frames else condition_mode(named, num_latent_frames=settings.num_latent_frames)
    timesteps = tuple(
        flow_timesteps(
            sampling.num_inference_steps,
            tokens_per_frame=tokens_per_frame,
            num_latent_frames=settings.num_latent_frames,
            flow_shift=sampling.flow_shift,
        )
    )
    start = 0 if draft is None else start_step(timesteps, settings.draft.strength)
    stop = sampling.stop_at
    if draft is not None and stop is not None and stop <= start:
        raise RequestError(
            f"sampling.stop_at={stop} is over where the video starts from its draft, after step {start}",
            hint="stop later, or use a greater --draft-strength",
        )
    continuation = None
    if settings.video.extend:
        continuation = make_plan(
            settings.replace(_OF_CONTINUATION),
            hardware=hardware,
            tries_device=tries_device,
            held_frames=settings.num_frames,
        )
    lengths = settings.condition.lengths
    guidance = _guidance(settings)
    mesh = choose_mesh(settings, video_tokens=tokens_per_frame * settings.num_latent_frames)
    require_branches(mesh, settings, guidance, mode)
    if mesh.size > 1 and sampling.batch_size not in (1, AUTO):
        raise RequestError(
            f"sampling.batch_size={sampling.batch_size} is for videos of one device, and {mesh.size} share each",
            hint="use 1, or one device; with --prompts each device makes rows of its own",
        )
    exchange = ExchangePlan()
    if settings.from_latents is None:
        exchange = plan_exchange(
            settings.parallel, mesh, num_heads=settings.model.num_heads, itemsize=hardware.dtype.itemsize
        )
    # Saved latents have gone through them already.
    loras = open_loras(settings.loras if settings.from_latents is None else (), settings.model)
    attention = None if settings.from_latents is not None else _attention(settings, hardware, mesh, tries_device)
    sizes = GenerationSizes(
        height=height,
        width=width,
        latent_shape=latent_shape,
        mode=mode,
        lengths=lengths,
        guidance=guidance,
        mesh=mesh,
        exchange=exchange,
        loras=LoraRanks.of(loras),
        attention="sdpa" if attention is None else attention.backend,
        has_draft=draft is not None,
    )
    held_bytes = (held_frames or 0) * height * width * 3
    fitting = Fitting.of(settings, hardware=hardware, weights=weights, sizes=sizes, clips=clips, held_bytes=held_bytes)
    offload = fitting.choose(fitting.budget_bytes)
    return ExecutionPlan(
        settings=settings,
        hardware=hardware,
        weights=weights,
        mode=mode,
        lengths=lengths,
        guidance=guidance,
        height=height,
        width=width,
        size_note=size_note,
        latent_shape=latent_shape,
        timesteps=timesteps,
        evaluations_per_sample=_evaluations(settings, guidance, mode, start),
        mesh=mesh,
        exchange=exchange,
        fitting=fitting,
        offload=offload,
        stages=fitting.estimate(offload),
        loras=loras,
        attention=attention,
        picture=picture,
        draft=draft,
        start=start,
        continuation=continuation,
    )


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


def _attention(settings: GenerateSettings, hardware: Hardware, mesh: MeshShape, tries_device: bool) -> AttentionPlan:
    use = AttentionUse(
        device=hardware.device,
        dtype=hardware.dtype,
        head_dim=settings.model.hidden_size // settings.model.num_heads,
        in_parts=mesh.ring > 1,
    )
    choice, setting = settings.runtime.attention, "runtime.attention"
    # A ring that was not asked for is known only now.
    for problem in attention_problems(choice, setting=setting, ring_degree=mesh.ring, is_fp32=False):
        raise RequestError(problem)
    return choose_attention(choice, use, setting=setting, tries_device=tries_device)


def _guidance(settings: GenerateSettings) -> Guidance:
    sampling = settings.sampling
    return Guidance(
        guidance_scale=sampling.guidance_scale,
        image_guidance_scale=sampling.image_guidance_scale,
        text_oscillation=sampling.text_oscillation,
        image_oscillation=sampling.image_oscillation,
        temporal_image_scaling=sampling.temporal_image_scaling,
    )


def _evaluations(settings: GenerateSettings, guidance: Guidance, mode: ConditionMode, steps_done: int = 0) -> int:
    """Return how often the model is evaluated for one video, of which so many steps are done."""
    steps, stop = settings.sampling.num_inference_steps, settings.sampling.stop_at

    def left(done: int) -> int:
        if settings.model.guidance_embed:
            return steps - done
        return count_evaluations(
            guidance,
            mode=mode,
            num_inference_steps=steps,
            num_latent_frames=settings.num_latent_frames,
            steps_done=done,
        )

    if settings.from_latents is not None:
        return 0
    return max(0, left(steps_done) - (0 if stop is None else left(stop)))


def _pixel_size(settings: GenerateSettings) -> tuple[int, int, str | None]:
    """Return height, width, and what is special about them."""
    video = settings.video
    if video.height is not None and video.width is not None:
        return video.height, video.width, None
    if settings.vae.kind.makes_videos:
        return *image_size(video.resolution, video.aspect_ratio, multiple=settings.size_multiple), None
    return size_of_picture(settings, video.resolution)


def gib_or_less(num_bytes: int) -> str:
    """Return a size of memory for people, in GiB, MiB or KiB."""
    for unit, factor in (("GiB", GIB), ("MiB", 2**20)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.2f} {unit}"
    return f"{num_bytes / 2**10:.2f} KiB"
