"""Chain of the jobs of a request: planned before any weight is read, and refused if it does not fit in memory."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

from opensora_cli.core.device import GIB, torch_dtype
from opensora_cli.core.exceptions import HardwareError, OsoraError
from opensora_cli.core.formatting import either
from opensora_cli.core.limits import pick_threads
from opensora_cli.core.progress import Reporter
from opensora_cli.engine.components.hardware import Hardware, rank_hardware
from opensora_cli.engine.components.parallelize import describe_mesh
from opensora_cli.engine.components.weights import Component
from opensora_cli.engine.estimate.offload import TEXT, HostMemory, StageMemory, verdict_line
from opensora_cli.engine.generate.plan import DRAFT, PICTURE, SEGMENT, VIDEO, Plan, make_plan
from opensora_cli.engine.generate.request import draft_settings, picture_settings
from opensora_cli.models.registry import DEMO
from opensora_cli.settings.devices import DType, HostWeights, OffloadMode
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


@dataclass(frozen=True, slots=True)
class Chain:
    """Jobs of one request in order: the output of a job is the reference or the start of the next.

    A chain is one video, with or without a picture that it shows, a draft that it starts from, or segments that extend
    it.
    """

    jobs: tuple[Plan, ...]

    def find(self, role: str) -> Plan | None:
        return next((plan for plan in self.jobs if plan.role == role), None)

    @property
    def video(self) -> Plan:
        """Plan of the video, or of its first segment."""
        return next(plan for plan in self.jobs if plan.role == VIDEO)

    @property
    def settings(self) -> GenerateSettings:
        return self.video.settings

    @property
    def segments(self) -> tuple[Plan, ...]:
        return tuple(plan for plan in self.jobs if plan.role in (VIDEO, SEGMENT))

    @property
    def num_steps(self) -> int:
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
    def by_role(self) -> dict[str, Plan]:
        """One plan for each role, in order: segments that extend a video have equal plans."""
        return {plan.role: plan for plan in self.jobs}

    @property
    def stages(self) -> tuple[StageMemory, ...]:
        """Stages of all jobs, named after their roles."""
        return tuple(
            stage if role == VIDEO else replace(stage, name=f"{role} {stage.name}")
            for role, plan in self.by_role.items()
            for stage in plan.stages
            if not (role == SEGMENT and stage.name == TEXT)
        )

    @property
    def peak_bytes(self) -> int:
        return max(stage.total_bytes for stage in self.stages)

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.video.budget_bytes

    @property
    def host(self) -> HostMemory:
        """Host memory of a machine: that of the job that needs the most."""
        return max((plan.host for plan in self.jobs), key=lambda host: host.pinned_bytes + host.page_cache_bytes)

    @property
    def usable_bytes(self) -> int | None:
        """Usable memory of the device: the free memory, or `memory.limit`; None if it is not known."""
        is_known = self.video.hardware.memory_is_known or self.settings.memory.limit is not None
        return self.video.budget_bytes if is_known else None

    def verdict(self, seconds: float | None) -> str:
        return verdict_line(
            needed=self.peak_bytes,
            usable=self.usable_bytes,
            on_gpu=self.video.hardware.device.type != "cpu",
            host=self.host,
            seconds=seconds,
        )

    def facts(self) -> dict[str, str]:
        """Return the plan as short texts by name, for lines of text and for notes."""
        plan, settings, segments = self.video, self.settings, len(self.segments)
        picture, draft = self.find(PICTURE), self.find(DRAFT)
        hardware, frames, video = plan.hardware, plan.num_frames, settings.video
        size = f"{settings.num_samples} x {plan.width}x{plan.height}"
        reused = f"{len(plan.reused_steps)} of them from the cache, " if plan.reused_steps else ""
        sampled = settings.vae.grid.num_frames(plan.latent_shape[1])
        first = f", the first of {sampled} sampled frames" if frames == 1 < sampled else ""
        offload = plan.offload.lines()
        if plan.offload.modulation_on_host and plan.offload.mode is not OffloadMode.BLOCKS and plan.files is None:
            offload.insert(0, "modulation on the host, computed before the first step")
        given = f"the last {settings.overlap} of each given to the next"
        found = {
            "model": f"{settings.model.name} on {hardware.device} ({hardware.device_name}), {hardware.dtype_name}",
            "picture": f"{size}{first}" if frames == 1 else None,
            "video": f"{size}, {frames} frames at {video.fps} fps" if frames > 1 else None,
            "latents": f"{'x'.join(map(str, plan.latent_shape))}, {gib_or_less(self.latent_bytes)} a sample",
            "tokens": f"{plan.video_tokens} video + {settings.text.t5_max_length} text",
            "first": picture and f"a picture of {picture.summary}",
            "draft": draft and f"{draft.summary}, from which it starts after step {plan.start}",
            "sampling": f"{plan.mode.name}, {plan.num_steps} steps by {settings.sampling.solver}, {reused}"
            f"{self.model_evaluations * settings.num_samples} model evaluations",
            "extend": f"{segments} segments of {video.num_frames} frames, {given}: {frames} frames"
            if segments > 1
            else None,
            "memory": ", ".join(f"{stage.name} {gib_or_less(stage.total_bytes)}" for stage in self.stages),
            "devices": f"{plan.mesh.size}, {describe_mesh(plan.mesh)}" if plan.mesh.size > 1 else None,
            "exchange": plan.planned_exchange and plan.planned_exchange.line(),
            "attention": plan.attention and plan.attention.line(),
            "offload": "; ".join(offload),
            "host": self.host.line() if hardware.device.type != "cpu" else None,
        }
        return {name: text for name, text in found.items() if text}

    def change(self, change: Callable[[Plan], Plan], *, only: str | None = None) -> "Chain":
        """Return the chain with `change` applied to every plan, or to the plans of the role `only`."""
        return Chain(tuple(change(plan) if only in (None, plan.role) else plan for plan in self.jobs))

    def with_threads(self) -> "Chain":
        """Return the chain with the CPU threads of all jobs; a CPU's settings record them, since sums depend on it."""
        plan, settings = self.video, self.settings
        # Values in one layer of the model that takes longest.
        values = settings.video.num_frames * plan.height * plan.width * settings.vae.sizes.pixel_width
        if not plan.decodes_only:
            evaluations = max(1, plan.model_evaluations // plan.num_steps)
            values = (plan.video_tokens + settings.text.t5_max_length) * settings.model.hidden_size * evaluations
        ranks = settings.parallel.ranks_per_node
        threads = plan.threads or pick_threads(asked=settings.runtime.threads, values=values, ranks=ranks)

        def change(plan: Plan) -> Plan:
            recorded = plan.settings.runtime.threads
            if plan.hardware.device.type == "cpu" and recorded != threads.count:
                plan = replace(plan, settings=plan.settings.replace({"runtime.threads": threads.count}))
            return replace(plan, threads=threads)

        return self.change(change)


def alone(plan: Plan) -> Chain:
    return Chain((replace(plan, role=VIDEO),))


def make_chain(settings: GenerateSettings, *, hardware: Hardware | None = None, tries_device: bool = True) -> Chain:
    """Return the jobs of a request, for the device of `settings` if `hardware` is None; see `make_plan`."""
    plan = partial(make_plan, hardware=hardware or rank_hardware(settings), tries_device=tries_device)
    parts = (PICTURE, picture_settings(settings)), (DRAFT, draft_settings(settings)), (VIDEO, settings)
    jobs = [plan(part, role=role) for role, part in parts if part is not None]
    if settings.video.extend:
        jobs += [plan(settings.replace(_CONTINUATION), role=SEGMENT)] * settings.video.extend
    return Chain(tuple(jobs))


def require_runnable(chain: Chain, reporter: Reporter) -> None:
    """Raise CheckpointError if weights are missing, and HardwareError if a stage does not fit in memory.

    Notes weights that are borrowed from the demo, and how the plan saves memory.
    """
    for plan in chain.jobs:
        plan.weights.require(plan.components)
    require_fit(chain)
    weights, facts = chain.video.weights, chain.facts()
    if borrowed := weights.borrowed():
        folder = weights.path(Component.TRANSFORMER).parent
        reporter.note(f"weights: {', '.join(borrowed)} are the demo's own, since {folder} has none")
    for name in ("first", "devices", "exchange", "offload"):
        if name in facts:
            reporter.note(f"{name}: {facts[name]}")
    note_exceptions(chain.video, reporter)


def note_exceptions(plan: Plan, reporter: Reporter) -> None:
    """Note a picture of another shape, and offload settings that have no effect on a CPU, which maps weights."""
    if plan.size_note is not None:
        reporter.note(plan.size_note)
    if plan.files is None:
        return
    memory, can_stream = plan.settings.memory, plan.decodes_only or plan.offloadable.num_blocks > 0
    given = {
        "offload": memory.offload is OffloadMode.BLOCKS and not can_stream,
        "resident_blocks": memory.resident_blocks is not None and not can_stream,
        "host_weights": memory.host_weights is HostWeights.PINNED or (memory.host_weights and not can_stream),
    }
    if ignored := ", ".join(f"memory.{name}={getattr(memory, name)}" for name, is_idle in given.items() if is_idle):
        why = "computes with weights where they are mapped from their file"
        reporter.note(f"memory: {ignored} has no effect on a CPU, which {why}")


def require_fit(chain: Chain) -> None:
    """Raise HardwareError, with the changes that would fit, if a stage needs more memory than may be used."""
    if chain.fits:
        return
    worst, plan = max(chain.stages, key=lambda stage: stage.total_bytes), chain.video
    device, budget = f"{plan.hardware.device} ({plan.hardware.device_name})", gib_or_less(plan.budget_bytes)
    usable = f"{device} has {budget} free"
    if plan.budget_bytes < plan.hardware.free_bytes:
        usable = f"memory.limit allows {budget} on {device}"
    # Changes that each make the request fit without the others.
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
            if "video.num_frames" in changes:  # Shorter videos fit, too.
                break
    more = "use a device with more memory" + (", or --model demo" if plan.settings.model.name != DEMO else "")
    raise HardwareError(
        f"the stage {worst.name} needs {gib_or_less(worst.total_bytes)}, and {usable}",
        hint=f"{either(fitting)} would fit" if fitting else more,
    )


def _smaller_requests(plan: Plan) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield changes as a flag and as settings: first changes that keep the result, last ever shorter videos."""
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
    frames = settings.video.num_frames
    while (fewer := settings.vae.grid.longest_clip(frames // 2 + 1)) < frames:
        yield f"--num-frames {fewer}", {"video.num_frames": fewer}
        frames = fewer


def gib_or_less(num_bytes: int) -> str:
    """Return a size of memory as text, in GiB, MiB or KiB."""
    for unit, factor in (("GiB", GIB), ("MiB", 2**20)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.2f} {unit}"
    return f"{num_bytes / 2**10:.2f} KiB"
