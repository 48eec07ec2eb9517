"""What `osora generate` returns: its plan with `--dry-run`, else its result."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, InstanceOf

from opensora_cli.core.documents import Document
from opensora_cli.core.exceptions import BatchError
from opensora_cli.core.solvers import Solver
from opensora_cli.core.threads import ThreadChoice
from opensora_cli.engine.components.attention import AttentionPlan
from opensora_cli.engine.components.hardware import GIB
from opensora_cli.engine.components.linear_products import LinearProductsReport
from opensora_cli.engine.components.parallelize import PlannedExchange, describe_mesh
from opensora_cli.engine.components.timings import AccelerationReport
from opensora_cli.engine.components.weights import Component
from opensora_cli.engine.estimate.offload import OffloadPlan
from opensora_cli.engine.estimate.predicted_time import PredictedTime
from opensora_cli.engine.generate.decode import GeneratedVideo
from opensora_cli.engine.generate.execution_plan import ExecutionPlan, gib_or_less
from opensora_cli.engine.generate.outputs import picture_files, planned_outputs
from opensora_cli.engine.generate.room import require_fit
from opensora_cli.engine.generate.targets import SampleFiles, sheet_path
from opensora_cli.parallel.mesh import MeshShape
from opensora_cli.settings.applies import used_settings
from opensora_cli.settings.enums import ModelName, OffloadMode
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.load import SIDECAR_SCHEMA

CACHED_TEXT_LINE = "encoded by an earlier run, and read from the cache (--no-cache encodes them again)"

_LISTED_FILES = 5
_LISTED_ROWS = 20


class PlannedStage(Document):
    """The memory of a device that one stage needs."""

    name: str
    weights_gib: float
    """On a CPU those that are not computed with where they are mapped from their file."""
    mapped_gib: float
    """On a CPU, of the weights' files: takes no memory but page cache."""
    data_gib: float
    """What goes in and out."""
    activations_gib: float
    total_gib: float


class PlannedLora(Document):
    """An adapter that is added to the transformer."""

    path: Path
    scale: float
    sha256: str
    layers: int
    rank: int
    """The largest of its layers."""


class PlannedFile(Document):
    """A file that will be written."""

    path: Path
    sidecar: Path | None
    """The settings beside it; none where no metadata is wanted."""
    made_before: bool
    """Whether it is there already, from the same request, and stays."""

    @classmethod
    def of(cls, sample: SampleFiles, *, explores: bool) -> "PlannedFile":
        """Return what a sample becomes: a result, or the latents of a seed that is explored."""
        if explores and sample.latents is not None and not sample.made_before:
            return cls(path=sample.latents, sidecar=None, made_before=False)
        return cls(path=sample.media, sidecar=sample.sidecar, made_before=sample.made_before)


class PlanDocument(Document):
    """Everything that is decided before a generation begins."""

    SCHEMA = "osora.plan/2"

    model: ModelName
    device: str
    device_name: str
    dtype: str
    height: int
    width: int
    num_frames: int
    fps: int
    num_samples: int
    condition_mode: str
    latent_shape: tuple[int, int, int, int]
    """(C, T, H, W) of one sample."""
    video_tokens: int
    text_tokens: int
    num_inference_steps: int
    solver: Solver
    timesteps: tuple[float, ...]
    reused_steps: int
    """Whose blocks are not computed, with `sampling.step_cache`."""
    model_evaluations: int
    """Of all samples."""
    cached_text: bool
    """Whether the prompts were encoded by earlier runs, and are read from the user's cache."""
    latents_gib: float
    """Of one sample."""
    stages: tuple[PlannedStage, ...]
    peak_gib: float
    free_gib: float | None
    """None: unknown, since no such device is here."""
    budget_gib: float | None
    """What may be used: what is free, or `memory.limit`; None: unknown."""
    reread_gib: float
    """What each evaluation reads of the transformer's file again, since the page cache cannot hold it."""
    mesh: MeshShape
    exchange: PlannedExchange | None
    """None: no tokens are exchanged for heads."""
    offload: OffloadPlan
    attention: AttentionPlan | None
    """What computes the transformer's attention; None: it does not run."""
    fits: bool | None
    """None: unknown."""
    weights: dict[Component, Path]
    loras: tuple[PlannedLora, ...]
    missing_weights: tuple[str, ...]
    outputs: tuple[PlannedFile, ...]
    sheet: Path | None
    """With a preview of each seed that is explored; None: none is."""
    picture: "PlanDocument | None"
    """Of the picture that is made first, and given; None: none is."""
    draft: "PlanDocument | None"
    """Of the smaller video that is made first, and started from; None: none is."""
    skipped_steps: int
    """That are left out, since the video starts from its draft."""
    extension: "PlanDocument | None"
    """Of each segment after the first, where the video is extended; None: it is not."""
    predicted: PredictedTime | None
    """The seconds that it would take on GPUs that are planned for with `--on`; None: there are none."""
    settings: GenerateSettings
    plan: InstanceOf[ExecutionPlan] = Field(exclude=True, repr=False)

    @classmethod
    def of(
        cls,
        plan: ExecutionPlan,
        *,
        files: Sequence[SampleFiles] | None = None,
        predicted: PredictedTime | None = None,
    ) -> "PlanDocument":
        """Return the document of a plan; `files` are what it writes (None: what `planned_outputs` returns)."""
        settings, hardware = plan.settings, plan.hardware
        files = planned_outputs(plan)[0] if files is None else files
        pictures = picture_files(plan, files) if settings.picture.save and plan.picture is not None else []
        return cls(
            model=settings.model.name,
            device=str(hardware.device),
            device_name=hardware.device_name,
            dtype=hardware.dtype_name,
            height=plan.height,
            width=plan.width,
            num_frames=plan.num_frames,
            fps=settings.video.fps,
            num_samples=plan.num_samples,
            condition_mode=plan.mode.name,
            latent_shape=plan.latent_shape,
            video_tokens=plan.video_tokens,
            text_tokens=settings.text.t5_max_length,
            num_inference_steps=len(plan.timesteps) - 1,
            solver=settings.sampling.solver,
            timesteps=plan.timesteps,
            reused_steps=len(plan.reused_steps),
            model_evaluations=plan.model_evaluations * plan.num_samples,
            cached_text=not (plan.encodes_text or plan.decodes_only),
            latents_gib=plan.latent_bytes / GIB,
            stages=tuple(
                PlannedStage(
                    name=stage.name,
                    weights_gib=stage.weight_bytes / GIB,
                    mapped_gib=stage.mapped_bytes / GIB,
                    data_gib=stage.data_bytes / GIB,
                    activations_gib=stage.activation_bytes / GIB,
                    total_gib=stage.total_bytes / GIB,
                )
                for stage in plan.stages
            ),
            peak_gib=plan.peak_bytes / GIB,
            free_gib=hardware.free_bytes / GIB if hardware.memory_is_known else None,
            budget_gib=plan.budget_bytes / GIB if plan.budget_is_known else None,
            reread_gib=plan.reread_bytes / GIB,
            mesh=plan.mesh,
            exchange=plan.planned_exchange,
            offload=plan.offload,
            attention=plan.attention,
            fits=plan.fits if plan.budget_is_known else None,
            weights={name: path for name, path in plan.weights.paths.items() if name in plan.components},
            loras=tuple(
                PlannedLora(
                    path=lora.path,
                    scale=lora.scale,
                    sha256=lora.sha256,
                    layers=len(lora.updates),
                    rank=lora.ranks[-1],
                )
                for lora in plan.loras
            ),
            missing_weights=tuple(
                name for component in plan.components for name in plan.weights.missing.get(component, ())
            ),
            outputs=tuple(PlannedFile.of(sample, explores=settings.output.explore) for sample in files),
            sheet=sheet_path(files[0].target) if settings.output.explore and files else None,
            picture=None if plan.picture is None else cls.of(plan.picture, files=pictures),
            draft=None if plan.draft is None else cls.of(plan.draft, files=()),
            skipped_steps=plan.start,
            extension=None if plan.continuation is None else cls.of(plan.continuation, files=()),
            predicted=predicted,
            settings=settings,
            plan=plan,
        )

    def lines(self) -> list[str]:
        """Return the plan for people."""
        plan = self.plan
        channels, frames, rows, columns = self.latent_shape
        memory = ", ".join(f"{stage.name} {gib_or_less(stage.total_bytes)}" for stage in plan.all_stages)
        budget = " a device, whose memory is not known here"
        if self.budget_gib is not None:
            limited = plan.budget_bytes < plan.hardware.free_bytes
            budget = f" of {gib_or_less(plan.budget_bytes)} {'allowed' if limited else 'free'}: "
            budget += "fits" if self.fits else "does not fit"
        return [
            f"model     {self.model} on {self.device} ({self.device_name}), {self.dtype}",
            self._what(),
            f"latents   {channels}x{frames}x{rows}x{columns}, {gib_or_less(plan.latent_bytes)} a sample",
            f"tokens    {self.video_tokens} video + {self.text_tokens} text",
            *([f"first     a picture of {plan.picture.what}"] if plan.picture is not None else []),
            *([f"draft     {self._draft()}"] if self.draft is not None else []),
            f"sampling  {self.condition_mode}, {self.num_inference_steps} steps by {self.solver}, "
            f"{f'{self.reused_steps} of them from the cache, ' if self.reused_steps else ''}"
            f"{self.model_evaluations} model evaluations",
            *([f"prompts   {CACHED_TEXT_LINE}"] if self.cached_text else []),
            *([f"extend    {self._extension()}"] if self.extension is not None else []),
            f"memory    {memory}",
            *([f"mapped    {mapped}: weights that are read from their files"] if (mapped := self._mapped()) else []),
            *([f"read      {again}"] if (again := reread_line(plan)) else []),
            *([f"devices   {self.mesh.size}, each as below: {describe_mesh(self.mesh)}"] if self.mesh.size > 1 else []),
            *([f"exchange  {self.exchange.line()}"] if self.exchange is not None else []),
            *([f"attention {self.attention.line()}"] if self.attention is not None else []),
            *(["compile   the transformer's blocks, when they are first called"] if self._compiles() else []),
            f"offload   {'; '.join(self._offloaded()) or 'none'}",
            f"peak      {gib_or_less(plan.peak_bytes)}{budget}",
            *(self.predicted.lines() if self.predicted is not None else ()),
            *(f"weights   {component}: {path}" for component, path in self.weights.items()),
            *(f"lora      {lora.line()}" for lora in plan.loras),
            *(f"missing   {name}" for name in self._all_missing()),
            *self._first_files(),
        ]

    def _offloaded(self) -> list[str]:
        offload = self.offload
        if offload.modulation_on_host and offload.mode is not OffloadMode.BLOCKS and self.plan.fitting.files is None:
            return ["modulation on the host, computed before the first step", *offload.lines()]
        return offload.lines()

    def _compiles(self) -> bool:
        return self.settings.compile and not self.plan.decodes_only

    def _all_missing(self) -> Iterable[str]:
        return dict.fromkeys((*(self.picture.missing_weights if self.picture else ()), *self.missing_weights))

    def _what(self) -> str:
        size = f"{self.num_samples} x {self.width}x{self.height}"
        if self.num_frames == 1:
            return f"picture   {size}"
        return f"video     {size}, {self.num_frames} frames at {self.fps} fps"

    def _draft(self) -> str:
        assert self.plan.draft is not None
        return f"{self.plan.draft.what}, from which it starts after step {self.skipped_steps}"

    def _extension(self) -> str:
        segments, settings = self.plan.segments, self.settings
        clip, overlap = settings.video.num_frames, settings.overlap
        return (
            f"{len(segments)} segments of {clip} frames, the last {overlap} of each given to the next: "
            f"{self.num_frames} frames"
        )

    def _mapped(self) -> str:
        sizes = ((stage.name, stage.mapped_bytes) for stage in self.plan.stages)
        return ", ".join(f"{name} {gib_or_less(size)}" for name, size in sizes if size)

    def _first_files(self) -> Iterator[str]:
        """Yield lines for the files of the first samples, and how many more there are."""
        for file in (*self.outputs[:_LISTED_FILES], *(self.picture.outputs[:_LISTED_FILES] if self.picture else ())):
            names = str(file.path) if file.sidecar is None else f"{file.path}, {file.sidecar.name}"
            yield f"{'keeps' if file.made_before else 'writes':<10}{names}"
        if len(self.outputs) > _LISTED_FILES:
            yield f"writes    and so on, up to {self.outputs[-1].path}"
        if self.sheet is not None:
            yield f"writes    {self.sheet}"

    def require_fit(self) -> None:
        """Raise HardwareError if some stage needs more memory than may be used."""
        require_fit(self.plan)


def reread_line(plan: ExecutionPlan) -> str | None:
    """Return for people what is read again and again; None: nothing."""
    if not plan.reread_bytes:
        return None
    size = gib_or_less(plan.reread_bytes)
    return f"{size} of the file are read again in each evaluation: the page cache has no room for them"


class ExploredSeed(Document):
    """A sample that was begun, to choose from."""

    seed: int
    state: Path
    """Latents to go on from."""
    steps: int | None
    """That these have been through; None: all."""
    preview: Path | None
    """An animation of what was predicted last; None: there is none."""
    command: str = Field(exclude=True)
    """What finishes it."""

    def line(self) -> str:
        """Return the command that finishes it, with its seed."""
        return f"{self.command}  # seed {self.seed}"


class GenerateResult(Document):
    """What a run made, and what it took; `--from` makes it again from this document."""

    SCHEMA = SIDECAR_SCHEMA

    videos: tuple[GeneratedVideo, ...] = Field(serialization_alias="outputs")
    explored: tuple[ExploredSeed, ...] | None = None
    """Left out where no seeds were explored."""
    sheet: Path | None = None
    """With a preview of each of them; left out where there is none."""
    model: ModelName
    device: str
    model_evaluations: int
    """Of all samples."""
    timings_s: dict[str, float]
    """Seconds of each stage."""
    threads: ThreadChoice | None = None
    """That computed on the CPU; left out where nothing was. Their number is in the settings of a run on a CPU, too."""
    peak_allocated_gib: float | None = None
    """The most memory in use on a CUDA device; left out on a CPU."""
    peak_resident_gib: float | None = None
    """The most memory of the process, mapped files of weights included; left out on a CUDA device."""
    profile: AccelerationReport | None = None
    """Times over repeated runs, if they were asked for; else left out."""
    attention: AttentionPlan | None = None
    """What computed the transformer's attention, and why; left out where saved latents were decoded."""
    linear_products: LinearProductsReport | None = None
    """What 8 bits were used for, and what they changed; left out where nothing was multiplied so."""
    settings: GenerateSettings

    def to_json(self) -> dict[str, Any]:
        """Return the document, without what was not measured or did not run, and settings that took no part."""
        document = {key: value for key, value in super().to_json().items() if value is not None}
        return {**document, "settings": used_settings(self.settings)}

    def lines(self) -> list[str]:
        """Return the path of every result, what finishes each draft, and the times if they were asked for."""
        return [
            *(str(path) for path in (*(video.path for video in self.videos), self.sheet) if path is not None),
            *(seed.line() for seed in self.explored or ()),
            *(self.profile.lines() if self.profile else ()),
        ]


class FailedRow(Document):
    """A row that was not made."""

    row: int
    """From 1."""
    prompt: str
    error: str


class BatchResult(Document):
    """What a run over many prompts made."""

    SCHEMA = "osora.batch/1"

    rows: int
    """That were asked for; of a shard, its own."""
    made: int
    kept: int
    """Finished before."""
    failed: tuple[FailedRow, ...]
    outputs: tuple[Path, ...]
    """Of all rows that are finished, in their order."""
    manifest: Path

    def lines(self) -> list[str]:
        """Return the path of every result."""
        return [str(path) for path in self.outputs]

    def require_whole(self) -> None:
        """Raise BatchError if rows failed."""
        if self.failed:
            others = "the others are finished; " if self.outputs else ""
            raise BatchError(
                "\n".join([f"{len(self.failed)} of {self.rows} rows failed", *_failed_lines(self.failed)]),
                hint=f"{others}{self.manifest} lists all, and the same command tries these again",
            )


class PlannedShape(Document):
    """Rows that differ in prompt, seed, references and name alone."""

    rows: int
    plan: PlanDocument
    """Of the first of them."""


class BatchPlan(Document):
    """What a run over many prompts would do."""

    SCHEMA = "osora.batch-plan/1"

    rows: int
    failed: tuple[FailedRow, ...]
    """That would be refused, as far as that is known."""
    shapes: tuple[PlannedShape, ...]

    def lines(self) -> list[str]:
        """Return the plan for people."""
        shapes = "1 shape" if len(self.shapes) == 1 else f"{len(self.shapes)} shapes"
        head = f"rows      {self.rows} of {shapes}, and {len(self.failed)} that would be refused"
        plans = (line for shape in self.shapes for line in (f"shape     rows: {shape.rows}", *shape.plan.lines()))
        return [head, *_failed_lines(self.failed), *plans]

    def require_fit(self) -> None:
        """Raise HardwareError if some stage of a shape needs more memory than may be used."""
        for shape in self.shapes:
            shape.plan.require_fit()


def _failed_lines(failed: Sequence[FailedRow]) -> list[str]:
    lines = [f"row {each.row}: {each.error}" for each in failed[:_LISTED_ROWS]]
    return lines if len(failed) <= _LISTED_ROWS else [*lines, f"and {len(failed) - _LISTED_ROWS} more"]
