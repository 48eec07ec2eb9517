"""Chain of the jobs of a request: a picture, a draft, the video and the segments that extend it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from opensora_cli.core.threads import pick_threads
from opensora_cli.engine.components.parallelize import describe_mesh
from opensora_cli.engine.estimate.offload import TEXT, StageMemory
from opensora_cli.engine.estimate.verdict import HostMemory, verdict_line
from opensora_cli.engine.generate.outputs import num_samples
from opensora_cli.engine.generate.plan import Plan, gib_or_less
from opensora_cli.settings.enums import OffloadMode
from opensora_cli.settings.generate import GenerateSettings

PICTURE, DRAFT, VIDEO, SEGMENT = "picture", "draft", "video", "extend"
"""Roles of jobs. Names of stages begin with the role of their job; stages of the video have no prefix."""


class Job(NamedTuple):
    """One clip to make for each sample of a request."""

    role: str
    """PICTURE, DRAFT, VIDEO or SEGMENT."""
    plan: Plan


@dataclass(frozen=True, slots=True)
class Chain:
    """Jobs of one request in order: the output of a job is the reference or the start of the next.

    A chain is one video, with or without one of these: a picture that it shows, a draft that it starts from, or the
    segments that extend it.
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
        """Model evaluations for one sample, without its picture."""
        return self.evaluations_after(0)

    def evaluations_after(self, steps_done: int) -> int:
        """Return the number of model evaluations of a sample after some of `num_steps`."""
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
        """Stages of all jobs, named after their roles. All segments that extend a video have the same stages."""
        return tuple(
            stage if role == VIDEO else replace(stage, name=f"{role} {stage.name}")
            for role, plan in dict(self.jobs).items()
            for stage in plan.stages
            if not (role == SEGMENT and stage.name == TEXT)
        )

    @property
    def peak_bytes(self) -> int:
        """Device memory of the largest stage."""
        return max(stage.total_bytes for stage in self.stages)

    @property
    def fits(self) -> bool:
        """Whether every stage fits in memory."""
        return self.peak_bytes <= self.video.budget_bytes

    @property
    def host(self) -> HostMemory:
        """Host memory of a machine: that of the job that needs the most."""
        return max((plan.host for _, plan in self.jobs), key=lambda host: host.pinned_bytes + host.page_cache_bytes)

    @property
    def usable_bytes(self) -> int | None:
        """Usable memory of the device: the free memory, or `memory.limit`; None if it is not known."""
        is_known = self.video.hardware.memory_is_known or self.settings.memory.limit is not None
        return self.video.budget_bytes if is_known else None

    def verdict(self, seconds: float | None) -> str:
        """Return the verdict of the request, with its predicted time if that is known."""
        return verdict_line(
            needed=self.peak_bytes,
            usable=self.usable_bytes,
            fits=self.fits,
            on_gpu=self.video.hardware.device.type != "cpu",
            host=self.host,
            seconds=seconds,
        )

    def facts(self) -> dict[str, str]:
        """Return the plan as short texts by name, for lines of text and for notes."""
        plan, settings, segments = self.video, self.settings, len(self.segments)
        picture, draft = self.find(PICTURE), self.find(DRAFT)
        hardware, frames, video = plan.hardware, plan.num_frames, settings.video
        size = f"{self.num_samples} x {plan.width}x{plan.height}"
        reused = f"{len(plan.reused_steps)} of them from the cache, " if plan.reused_steps else ""
        mapped = [f"{each.name} {gib_or_less(each.mapped_bytes)}" for each in plan.stages if each.mapped_bytes]
        offload = plan.offload.lines()
        if plan.offload.modulation_on_host and plan.offload.mode is not OffloadMode.BLOCKS and plan.files is None:
            offload.insert(0, "modulation on the host, computed before the first step")
        found = {
            "model": f"{settings.model.name} on {hardware.device} ({hardware.device_name}), {hardware.dtype_name}",
            "picture": size if frames == 1 else None,
            "video": f"{size}, {frames} frames at {video.fps} fps" if frames > 1 else None,
            "latents": f"{'x'.join(map(str, plan.latent_shape))}, {gib_or_less(self.latent_bytes)} a sample",
            "tokens": f"{plan.video_tokens} video + {settings.text.t5_max_length} text",
            "first": picture and f"a picture of {picture.summary}",
            "draft": draft and f"{draft.summary}, from which it starts after step {plan.start}",
            "sampling": f"{plan.mode.name}, {plan.num_steps} steps by {settings.sampling.solver}, {reused}"
            f"{self.model_evaluations * self.num_samples} model evaluations",
            "extend": f"{segments} segments of {video.num_frames} frames, the last {settings.overlap} of each "
            f"given to the next: {frames} frames"
            if segments > 1
            else None,
            "memory": ", ".join(f"{stage.name} {gib_or_less(stage.total_bytes)}" for stage in self.stages),
            "mapped": f"{', '.join(mapped)}: weights that are read from their files" if mapped else None,
            "devices": f"{plan.mesh.size}, {describe_mesh(plan.mesh)}" if plan.mesh.size > 1 else None,
            "exchange": plan.planned_exchange and plan.planned_exchange.line(),
            "attention": plan.attention and plan.attention.line(),
            "compile": "the transformer's blocks, when they are first called"
            if settings.compile and not plan.decodes_only
            else None,
            "offload": "; ".join(offload),
            "host": self.host.line() if hardware.device.type != "cpu" else None,
        }
        return {name: text for name, text in found.items() if text}

    def change(self, change: Callable[[Plan], Plan], *, only: str | None = None) -> "Chain":
        """Return the chain with `change` applied to every plan, or to the plans of the role `only`."""
        return Chain(
            tuple(Job(role, change(plan)) if only in (None, role) else Job(role, plan) for role, plan in self.jobs)
        )

    def with_threads(self) -> "Chain":
        """Return the chain with the CPU threads of all jobs chosen for the video.

        On a CPU the settings record the number, since sums depend on it.
        """
        plan, settings = self.video, self.settings
        if plan.threads is not None:
            threads = plan.threads
        else:
            # Values in one layer of the model that takes longest.
            values = settings.video.num_frames * plan.height * plan.width * settings.vae.sizes.pixel_width
            if not plan.decodes_only:
                evaluations = max(1, plan.model_evaluations // plan.num_steps)
                values = (plan.video_tokens + settings.text.t5_max_length) * settings.model.hidden_size * evaluations
            ranks = settings.parallel.ranks_per_node
            threads = pick_threads(asked=settings.runtime.threads, values=values, ranks=ranks)

        def change(plan: Plan) -> Plan:
            recorded = plan.settings.runtime.threads
            if plan.hardware.device.type == "cpu" and recorded != threads.count:
                plan = replace(plan, settings=plan.settings.replace({"runtime.threads": threads.count}))
            return replace(plan, threads=threads)

        return self.change(change)


def alone(plan: Plan) -> Chain:
    """Return a chain of one job."""
    return Chain((Job(VIDEO, plan),))
