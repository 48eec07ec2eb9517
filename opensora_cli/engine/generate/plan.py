"""The plan of a generation: everything that is decided before it begins, and what follows from that."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import prod
from typing import NamedTuple

from opensora_cli.core.conditions import ConditionMode, ReferenceLengths
from opensora_cli.core.threads import ThreadChoice, pick_threads
from opensora_cli.engine.components.attention import AttentionPlan
from opensora_cli.engine.components.configs import mmdit_config
from opensora_cli.engine.components.hardware import GIB, Hardware
from opensora_cli.engine.components.loras import Lora
from opensora_cli.engine.components.parallelize import AttentionSizes, PlannedExchange
from opensora_cli.engine.components.weights import Component, WeightFiles, needed_components
from opensora_cli.engine.estimate.offload import TEXT, OffloadPlan, StageMemory
from opensora_cli.engine.generate.fitting import Fitting
from opensora_cli.engine.generate.targets import num_samples
from opensora_cli.parallel.all_to_all import ExchangePlan
from opensora_cli.parallel.mesh import MeshShape
from opensora_cli.sampling.denoise import last_times
from opensora_cli.sampling.guidance import Branch, Guidance, GuidanceScales, count_evaluations, guidance_scales
from opensora_cli.sampling.step_cache import CachedStep, Phase, cached_steps
from opensora_cli.settings.generate import GenerateSettings

CACHED_TEXT_LINE = "encoded by an earlier run, and read from the cache (--no-cache encodes them again)"

PICTURE, DRAFT, VIDEO, SEGMENT = "picture", "draft", "video", "extend"
"""Roles of jobs. The names of stages begin with the role of their job, except those of the video."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Plan of one job: everything that is decided before it begins."""

    settings: GenerateSettings
    """Settings of the job, with a condition mode."""
    hardware: Hardware
    weights: WeightFiles
    mode: ConditionMode
    lengths: ReferenceLengths
    guidance: Guidance
    height: int
    width: int
    size_note: str | None = None
    """Note about a picture whose shape is not the requested one; None if it is."""
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
    start: int = 0
    """Steps that are skipped, since the video starts from its draft."""
    threads: ThreadChoice | None = None
    """Threads that compute on the CPU; None before they are chosen by the load of the machine."""

    @property
    def decodes_only(self) -> bool:
        """Whether the job decodes saved latents, without sampling."""
        return self.settings.from_latents is not None

    @property
    def components(self) -> tuple[Component, ...]:
        """The parts whose weights are read."""
        return needed_components(self.settings)

    @property
    def num_steps(self) -> int:
        """Steps of the schedule."""
        return len(self.timesteps) - 1

    @property
    def scales(self) -> tuple[GuidanceScales, ...]:
        """Guidance scales of each step."""
        frames = self.settings.num_latent_frames
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
        """Steps that reuse block outputs."""
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
    def evaluations_on_a_rank(self) -> int:
        """Model evaluations on the rank that has the most of them."""
        return self.evaluations_after(0, ranks=self.mesh.guidance)

    def evaluations_after(self, steps_done: int, *, ranks: int = 1) -> int:
        """Return how many evaluations of the model are left after some steps, on one of `ranks`.

        There are none if saved latents are decoded.
        """
        sampling, steps_done = self.settings.sampling, max(steps_done, self.start)

        def left(done: int) -> int:
            return count_evaluations(
                self.scales, solver=sampling.solver, reused=self.reused_steps, steps_done=done, ranks=ranks
            )

        if self.decodes_only:
            return 0
        # A resumed run computes the outputs again that its cache needs.
        again = sum(-(-len(key) // ranks) for key in self.past_times(steps_done) if isinstance(key, tuple))
        return again + max(0, left(steps_done) - (0 if sampling.stop_at is None else left(sampling.stop_at)))

    @property
    def model_evaluations(self) -> int:
        """Evaluations of the model for one sample."""
        return self.evaluations_after(0)

    @property
    def what(self) -> str:
        """Description of one sample, for people."""
        size = f"{self.width}x{self.height}"
        settings = self.settings
        frames = "" if settings.video.num_frames == 1 else f", {settings.video.num_frames} frames"
        return f"{size}{frames}, by {settings.model.name} in {self.num_steps} steps"

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
            return settings.video.num_frames * self.height * self.width * settings.vae.sizes.pixel_width
        tokens = self.video_tokens + settings.text.t5_max_length
        return tokens * settings.model.hidden_size * max(1, self.model_evaluations // self.num_steps)

    @property
    def latent_bytes(self) -> int:
        """Size of the latents of one clip."""
        return prod(self.latent_shape) * self.hardware.dtype.itemsize

    @property
    def planned_exchange(self) -> PlannedExchange | None:
        """Exchange of tokens for heads between the ranks; None if there is none."""
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
        """Memory of the device that the largest stage needs."""
        return max(stage.total_bytes for stage in self.stages)

    @property
    def encodes_text(self) -> bool:
        """Whether a stage encodes prompts; there is none if the cache has all of them."""
        return any(stage.name == TEXT for stage in self.stages)

    @property
    def budget_bytes(self) -> int:
        """The memory that may be used: what is free, or `memory.limit`."""
        return self.fitting.budget_bytes

    @property
    def budget_is_known(self) -> bool:
        """Whether the device was asked for its memory, or a limit is set."""
        return self.hardware.memory_is_known or self.settings.memory.limit is not None

    @property
    def fits(self) -> bool:
        """Whether every stage fits in memory."""
        return self.peak_bytes <= self.budget_bytes

    def with_picked_threads(self, by: str | None = None) -> "Plan":
        """Return a plan with the threads that compute, and `by` what their number was set; None: not known."""
        if self.threads is not None:
            return self
        runtime, ranks = self.settings.runtime, self.settings.parallel.ranks_per_node
        return replace(self, threads=pick_threads(asked=runtime.threads, by=by, values=self.layer_values, ranks=ranks))

    def with_threads(self, by: str | None = None) -> "Plan":
        """Return the same, of a run: on a CPU the settings record the threads, since sums depend on them."""
        plan = self.with_picked_threads(by)
        assert plan.threads is not None
        settings = plan.settings
        if plan.hardware.device.type == "cpu":
            settings = settings.replace({"runtime.threads": plan.threads.count})
        return replace(plan, settings=settings)

    def with_stronger_offload(self, stage: str) -> "Plan | None":
        """Return a plan under which `stage` needs much less memory; None where there is none, or several ranks run.

        What one rank is short of the others don't know: they would wait for it.
        """
        if self.mesh.size > 1:
            return None
        stronger = self.fitting.stronger(self.offload, stage)
        return None if stronger is None else self.with_offload(stronger)

    def with_offload(self, offload: OffloadPlan) -> "Plan":
        """Return a plan with another offload."""
        return replace(self, offload=offload, stages=self.fitting.estimate(offload))


class Job(NamedTuple):
    """One clip to make for each sample of a request."""

    role: str
    """One of CACHED_TEXT_LINE = "encoded by an earlier run, and read from the cache (--no-cache encodes them again)"

PICTURE, DRAFT, VIDEO and SEGMENT."""
    plan: Plan


@dataclass(frozen=True, slots=True)
class Chain:
    """Jobs of one request, in their order: the output of one is the reference or the start of the next.

    A chain is a video alone, a picture and a video that shows it, a draft and a video that starts from it, or a video
    and the segments that extend it.
    """

    jobs: tuple[Job, ...]

    def find(self, role: str) -> Plan | None:
        """Return the plan of the first job with a role; None if there is none."""
        return next((job.plan for job in self.jobs if job.role == role), None)

    @property
    def video(self) -> Plan:
        """Plan of the video, or of its first segment."""
        plan = self.find(VIDEO)
        assert plan is not None
        return plan

    @property
    def settings(self) -> GenerateSettings:
        """Settings of the request."""
        return self.video.settings

    @property
    def segments(self) -> tuple[Plan, ...]:
        """Plans of the video and of the segments that extend it."""
        return tuple(job.plan for job in self.jobs if job.role in (VIDEO, SEGMENT))

    @property
    def num_samples(self) -> int:
        """Number of videos."""
        return num_samples(self.settings)

    @property
    def num_steps(self) -> int:
        """Steps of all segments of a sample."""
        return sum(plan.num_steps for plan in self.segments)

    @property
    def model_evaluations(self) -> int:
        """Evaluations of the model for one sample, without those of its picture."""
        return self.evaluations_after(0)

    def evaluations_after(self, steps_done: int) -> int:
        """Return how many evaluations of a sample are left after some of `num_steps`."""
        draft = self.find(DRAFT)
        left = draft.model_evaluations if draft is not None and not steps_done else 0
        for plan in self.segments:
            if steps_done < plan.num_steps:
                left += plan.evaluations_after(max(0, steps_done))
            steps_done -= plan.num_steps
        return left

    @property
    def latent_bytes(self) -> int:
        """Size of the latents of one sample."""
        return sum(plan.latent_bytes for plan in self.segments)

    @property
    def stages(self) -> tuple[StageMemory, ...]:
        """Stages of all jobs, named after their roles. All segments that extend a video have the same."""
        return tuple(
            stage if job.role == VIDEO else replace(stage, name=f"{job.role} {stage.name}")
            for job in {job.role: job for job in self.jobs}.values()
            for stage in job.plan.stages
            if not (job.role == SEGMENT and stage.name == TEXT)
        )

    @property
    def peak_bytes(self) -> int:
        """Memory of the device that the largest stage needs."""
        return max(stage.total_bytes for stage in self.stages)

    @property
    def fits(self) -> bool:
        """Whether every stage fits in memory."""
        return self.peak_bytes <= self.video.budget_bytes

    def change(self, change: Callable[[Plan], Plan], *, only: str | None = None) -> "Chain":
        """Return a chain with every plan changed, or `only` those of one role."""
        return Chain(
            tuple(Job(role, change(plan)) if only in (None, role) else Job(role, plan) for role, plan in self.jobs)
        )

    def with_threads(self, by: str | None = None) -> "Chain":
        """Return a chain whose jobs all compute with the threads of the video; see `Plan.with_threads`."""
        threads = self.video.with_picked_threads(by).threads
        return self.change(lambda plan: replace(plan, threads=threads).with_threads())


def alone(plan: Plan) -> Chain:
    """Return a chain of one job, such as the picture of a video."""
    return Chain((Job(VIDEO, plan),))


def gib_or_less(num_bytes: int) -> str:
    """Return a size of memory for people, in GiB, MiB or KiB."""
    for unit, factor in (("GiB", GIB), ("MiB", 2**20)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.2f} {unit}"
    return f"{num_bytes / 2**10:.2f} KiB"
