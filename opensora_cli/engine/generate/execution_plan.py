"""The plan of a generation: everything that is decided before it begins, and what follows from that."""

from dataclasses import dataclass, field, replace
from math import prod

from opensora_cli.core.conditions import ConditionMode, ReferenceLengths
from opensora_cli.core.threads import ThreadChoice, pick_threads
from opensora_cli.engine.components.attention import AttentionPlan
from opensora_cli.engine.components.configs import mmdit_config
from opensora_cli.engine.components.hardware import GIB, Hardware
from opensora_cli.engine.components.loras import Lora
from opensora_cli.engine.components.parallelize import AttentionSizes, PlannedExchange
from opensora_cli.engine.components.weights import Component, WeightFiles, needed_components
from opensora_cli.engine.estimate.offload import DENOISE, TEXT, OffloadPlan, StageMemory
from opensora_cli.engine.generate.fitting import Fitting
from opensora_cli.engine.generate.targets import num_samples
from opensora_cli.parallel.all_to_all import ExchangePlan
from opensora_cli.parallel.mesh import MeshShape
from opensora_cli.sampling.denoise import last_times
from opensora_cli.sampling.guidance import Branch, Guidance, GuidanceScales, count_evaluations, guidance_scales
from opensora_cli.sampling.step_cache import CachedStep, Phase, cached_steps
from opensora_cli.settings.generate import GenerateSettings

PICTURE = "picture"
"""What the names of the stages of a picture that is made first begin with."""
EXTENSION = "extend"
"""Likewise of the segments that are made after the first."""
DRAFT = "draft"
"""Likewise of a smaller video that is made first."""


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
        begun = left[0]._clip_evaluations(max(steps, self.start)) if left else 0
        if self.draft is not None and not steps:
            begun += self.draft.model_evaluations
        return begun + sum(segment.evaluations_per_sample for segment in left[1:])

    @property
    def scales(self) -> tuple[GuidanceScales, ...]:
        """Of guidance, for each step."""
        frames = self.settings.num_latent_frames
        return guidance_scales(self.guidance, mode=self.mode, timesteps=self.timesteps, num_latent_frames=frames)

    @property
    def cache(self) -> tuple[CachedStep, ...] | None:
        """What each step computes, with a step cache; None: there is none."""
        change = self.settings.sampling.step_cache
        if not change:
            return None
        return cached_steps(self.scales, self.timesteps, largest_change=change, begun_at=self.start)

    @property
    def reused_steps(self) -> tuple[int, ...]:
        """Those that a step cache spares."""
        return tuple(step for step, each in enumerate(self.cache or ()) if each.is_reused)

    def past_times(self, steps_done: int) -> dict[Branch | Phase, float]:
        """Return the times of what a step of a clip looks back at; see `last_times`."""
        return last_times(
            self.scales,
            self.timesteps,
            solver=self.settings.sampling.solver,
            cache=self.cache,
            begun_at=self.start,
            steps_done=steps_done,
        )

    @property
    def evaluations_per_sample(self) -> int:
        """Model evaluations that the sampling of one clip takes; 0 where saved latents are decoded."""
        return self._clip_evaluations(self.start)

    @property
    def evaluations_on_a_rank(self) -> int:
        """The same of the rank that has the most of them."""
        return self._clip_evaluations(self.start, ranks=self.mesh.guidance)

    def _clip_evaluations(self, steps_done: int, *, ranks: int = 1) -> int:
        """Return how often the model is evaluated for one clip, of which so many steps are done, on one of `ranks`."""
        sampling = self.settings.sampling

        def left(done: int) -> int:
            return count_evaluations(
                self.scales, solver=sampling.solver, reused=self.reused_steps, steps_done=done, ranks=ranks
            )

        if self.decodes_only:
            return 0
        # A run that goes on computes again what its cache has to have.
        again = sum(-(-len(key) // ranks) for key in self.past_times(steps_done) if isinstance(key, tuple))
        return again + max(0, left(steps_done) - (0 if sampling.stop_at is None else left(sampling.stop_at)))

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
    def encodes_text(self) -> bool:
        """Whether there is a stage that encodes prompts: there is none where the cache has all of them."""
        return any(stage.name == TEXT for stage in self.stages)

    @property
    def budget_bytes(self) -> int:
        """The memory that may be used: what is free, or `memory.limit`."""
        return self.fitting.budget_bytes

    @property
    def reread_bytes(self) -> int:
        """What each evaluation reads of the transformer's file again, since the page cache has no room for it.

        That is all of it or nothing: what is read round and round is given up just before it is read again. The page
        cache has what this machine's ranks leave it of the free memory.
        """
        denoise = next((stage for stage in self.stages if stage.name == DENOISE), None)
        if denoise is None:
            return 0
        room = max(0, self.hardware.free_bytes - denoise.total_bytes) * self.settings.parallel.ranks_per_node
        return denoise.mapped_bytes if denoise.mapped_bytes > room else 0

    @property
    def budget_is_known(self) -> bool:
        """Whether the device was asked for its memory, or a limit is set."""
        return self.hardware.memory_is_known or self.settings.memory.limit is not None

    @property
    def fits(self) -> bool:
        """Whether that is enough."""
        return self.peak_bytes <= self.budget_bytes

    def with_picked_threads(self, by: str | None = None) -> "ExecutionPlan":
        """Return a plan with the threads that compute, and `by` what their number was set; None: not known."""
        if self.threads is not None:
            return self
        runtime, ranks = self.settings.runtime, self.settings.parallel.ranks_per_node
        return replace(self, threads=pick_threads(asked=runtime.threads, by=by, values=self.layer_values, ranks=ranks))

    def with_threads(self, by: str | None = None) -> "ExecutionPlan":
        """Return the same, of a run: on a CPU the settings record the threads, since sums depend on them."""
        plan = self.with_picked_threads(by)
        assert plan.threads is not None
        settings = plan.settings
        if plan.hardware.device.type == "cpu":
            settings = settings.replace({"runtime.threads": plan.threads.count})
        return replace(plan, settings=settings, picture=plan.picture and plan.picture.with_threads(by))

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


def gib_or_less(num_bytes: int) -> str:
    """Return a size of memory for people, in GiB, MiB or KiB."""
    for unit, factor in (("GiB", GIB), ("MiB", 2**20)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.2f} {unit}"
    return f"{num_bytes / 2**10:.2f} KiB"
