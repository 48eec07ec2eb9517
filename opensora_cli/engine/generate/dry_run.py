"""Plan a generation without running it."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from pydantic import Field, InstanceOf

from opensora_cli.core.documents import Document
from opensora_cli.core.progress import Reporter
from opensora_cli.core.ranks import RankContext
from opensora_cli.core.solvers import Solver
from opensora_cli.engine.components.attention import AttentionPlan
from opensora_cli.engine.components.hardware import GIB, Hardware
from opensora_cli.engine.components.parallelize import PlannedExchange, describe_mesh
from opensora_cli.engine.components.weights import Component, require_weights_of, warn_of_missing
from opensora_cli.engine.encode.prompt_cache import PromptCache
from opensora_cli.engine.estimate.offload import OffloadPlan
from opensora_cli.engine.estimate.predicted_time import PredictedTime
from opensora_cli.engine.generate.documents import FailedRow, failed_lines
from opensora_cli.engine.generate.outputs import check_outputs, picture_files, planned_outputs
from opensora_cli.engine.generate.plan import (
    CACHED_TEXT_LINE,
    DRAFT,
    PICTURE,
    SEGMENT,
    Chain,
    alone,
    gib_or_less,
)
from opensora_cli.engine.generate.planning import make_chain
from opensora_cli.engine.generate.predicted import predict_time
from opensora_cli.engine.generate.previews import fitting_line, known_map
from opensora_cli.engine.generate.ranks import hardware_of_ranks, planned_hardware, request_of_rank
from opensora_cli.engine.generate.references import references_of, with_mode
from opensora_cli.engine.generate.refinement import note_plan
from opensora_cli.engine.generate.request import picture_settings
from opensora_cli.engine.generate.resolve import refuse_data_parallel, resolve_generate_settings
from opensora_cli.engine.generate.room import require_fit
from opensora_cli.engine.generate.targets import SampleFiles, sample_files, sheet_path
from opensora_cli.engine.generate.text import warn_about_planned_prompts, without_cached_text
from opensora_cli.parallel.mesh import MeshShape
from opensora_cli.settings.enums import OffloadMode
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.hardware import PlannedMachine
from opensora_cli.settings.load import GenerateRequest

_LISTED_FILES = 5


class PlannedStage(Document):
    """The memory of a device that one stage needs."""

    name: str
    weights_gib: float
    """On a CPU those that are not computed with where they are mapped from their file."""
    mapped_gib: float
    """On a CPU, of the weights' files: takes no memory but page cache."""
    data_gib: float
    """Inputs and outputs of the stage."""
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
    """Whether an earlier run of the same request made it; the run keeps it."""

    @classmethod
    def of(cls, sample: SampleFiles, *, explores: bool) -> "PlannedFile":
        """Return what a sample becomes: a result, or the latents of a seed that is explored."""
        if explores and sample.latents is not None and not sample.made_before:
            return cls(path=sample.latents, sidecar=None, made_before=False)
        return cls(path=sample.media, sidecar=sample.sidecar, made_before=sample.made_before)


class PlanDocument(Document):
    """Everything that is decided before a generation begins."""

    SCHEMA = "osora.plan/3"

    model: str
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
    """Evaluations of the model for all samples."""
    cached_text: bool
    """Whether the prompt cache has all prompts of the request."""
    latents_gib: float
    """Latents of one sample."""
    stages: tuple[PlannedStage, ...]
    peak_gib: float
    free_gib: float | None
    """None: unknown, since no such device is here."""
    budget_gib: float | None
    """Usable memory: the free memory, or `memory.limit`; None if it is not known."""
    mesh: MeshShape
    exchange: PlannedExchange | None
    """None: no tokens are exchanged for heads."""
    offload: OffloadPlan
    attention: AttentionPlan | None
    """Attention backend of the transformer; None if it does not run."""
    fits: bool | None
    """None: unknown."""
    weights: dict[Component, Path]
    loras: tuple[PlannedLora, ...]
    missing_weights: tuple[str, ...]
    outputs: tuple[PlannedFile, ...]
    sheet: Path | None
    """With a preview of each seed that is explored; None: none is."""
    picture: "PlanDocument | None"
    """Plan of the picture that is made first; None without one."""
    draft: "PlanDocument | None"
    """Plan of the draft; None without one."""
    skipped_steps: int
    """Steps that the video skips, since it starts from its draft."""
    extension: "PlanDocument | None"
    """Plan of each segment after the first; None for a video of one segment."""
    predicted: PredictedTime | None
    """The seconds that it would take on GPUs that are planned for with `--on`; None: there are none."""
    settings: GenerateSettings
    chain: InstanceOf[Chain] = Field(exclude=True, repr=False)

    @classmethod
    def of(
        cls,
        chain: Chain,
        *,
        files: Sequence[SampleFiles] | None = None,
        predicted: PredictedTime | None = None,
    ) -> "PlanDocument":
        """Return the document of a request.

        `files` are the files of its samples; None for those that `planned_outputs` chooses.
        """
        plan, picture, draft, segment = chain.video, *map(chain.find, (PICTURE, DRAFT, SEGMENT))
        settings, hardware = plan.settings, plan.hardware
        files = planned_outputs(chain)[0] if files is None else files
        pictures = picture_files(chain, files) if settings.picture.save else []
        return cls(
            model=settings.model.name,
            device=str(hardware.device),
            device_name=hardware.device_name,
            dtype=hardware.dtype_name,
            height=plan.height,
            width=plan.width,
            num_frames=plan.num_frames,
            fps=settings.video.fps,
            num_samples=chain.num_samples,
            condition_mode=plan.mode.name,
            latent_shape=plan.latent_shape,
            video_tokens=plan.video_tokens,
            text_tokens=settings.text.t5_max_length,
            num_inference_steps=plan.num_steps,
            solver=settings.sampling.solver,
            timesteps=plan.timesteps,
            reused_steps=len(plan.reused_steps),
            model_evaluations=chain.model_evaluations * chain.num_samples,
            cached_text=not (plan.encodes_text or plan.decodes_only),
            latents_gib=chain.latent_bytes / GIB,
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
            peak_gib=chain.peak_bytes / GIB,
            free_gib=hardware.free_bytes / GIB if hardware.memory_is_known else None,
            budget_gib=plan.budget_bytes / GIB if plan.budget_is_known else None,
            mesh=plan.mesh,
            exchange=plan.planned_exchange,
            offload=plan.offload,
            attention=plan.attention,
            fits=chain.fits if plan.budget_is_known else None,
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
            picture=None if picture is None else cls.of(alone(picture), files=pictures),
            draft=None if draft is None else cls.of(alone(draft), files=()),
            skipped_steps=plan.start,
            extension=None if segment is None else cls.of(alone(segment), files=()),
            predicted=predicted,
            settings=settings,
            chain=chain,
        )

    def lines(self) -> list[str]:
        """Return the plan for people."""
        chain, plan, picture = self.chain, self.chain.video, self.chain.find(PICTURE)
        channels, frames, rows, columns = self.latent_shape
        memory = ", ".join(f"{stage.name} {gib_or_less(stage.total_bytes)}" for stage in chain.stages)
        budget = " a device, whose memory is not known here"
        if self.budget_gib is not None:
            limited = plan.budget_bytes < plan.hardware.free_bytes
            budget = f" of {gib_or_less(plan.budget_bytes)} {'allowed' if limited else 'free'}: "
            budget += "fits" if self.fits else "does not fit"
        return [
            f"model     {self.model} on {self.device} ({self.device_name}), {self.dtype}",
            self._what(),
            f"latents   {channels}x{frames}x{rows}x{columns}, {gib_or_less(chain.latent_bytes)} a sample",
            f"tokens    {self.video_tokens} video + {self.text_tokens} text",
            *([f"first     a picture of {picture.what}"] if picture is not None else []),
            *([f"draft     {self._draft()}"] if self.draft is not None else []),
            f"sampling  {self.condition_mode}, {self.num_inference_steps} steps by {self.solver}, "
            f"{f'{self.reused_steps} of them from the cache, ' if self.reused_steps else ''}"
            f"{self.model_evaluations} model evaluations",
            *([f"prompts   {CACHED_TEXT_LINE}"] if self.cached_text else []),
            *([f"extend    {self._extension()}"] if self.extension is not None else []),
            f"memory    {memory}",
            *([f"mapped    {mapped}: weights that are read from their files"] if (mapped := self._mapped()) else []),
            *([f"devices   {self.mesh.size}, each as below: {describe_mesh(self.mesh)}"] if self.mesh.size > 1 else []),
            *([f"exchange  {self.exchange.line()}"] if self.exchange is not None else []),
            *([f"attention {self.attention.line()}"] if self.attention is not None else []),
            *(["compile   the transformer's blocks, when they are first called"] if self._compiles() else []),
            f"offload   {'; '.join(self._offloaded()) or 'none'}",
            f"peak      {gib_or_less(chain.peak_bytes)}{budget}",
            *(self.predicted.lines() if self.predicted is not None else ()),
            *(f"weights   {component}: {path}" for component, path in self.weights.items()),
            *(f"lora      {lora.line()}" for lora in plan.loras),
            *(f"missing   {name}" for name in self._all_missing()),
            *self._first_files(),
        ]

    def _offloaded(self) -> list[str]:
        offload = self.offload
        if (
            offload.modulation_on_host
            and offload.mode is not OffloadMode.BLOCKS
            and self.chain.video.fitting.files is None
        ):
            return ["modulation on the host, computed before the first step", *offload.lines()]
        return offload.lines()

    def _compiles(self) -> bool:
        return self.settings.compile and not self.chain.video.decodes_only

    def _all_missing(self) -> Iterable[str]:
        return dict.fromkeys((*(self.picture.missing_weights if self.picture else ()), *self.missing_weights))

    def _what(self) -> str:
        size = f"{self.num_samples} x {self.width}x{self.height}"
        if self.num_frames == 1:
            return f"picture   {size}"
        return f"video     {size}, {self.num_frames} frames at {self.fps} fps"

    def _draft(self) -> str:
        draft = self.chain.find(DRAFT)
        assert draft is not None
        return f"{draft.what}, from which it starts after step {self.skipped_steps}"

    def _extension(self) -> str:
        segments, settings = self.chain.segments, self.settings
        clip, overlap = settings.video.num_frames, settings.overlap
        return (
            f"{len(segments)} segments of {clip} frames, the last {overlap} of each given to the next: "
            f"{self.num_frames} frames"
        )

    def _mapped(self) -> str:
        sizes = ((stage.name, stage.mapped_bytes) for stage in self.chain.video.stages)
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
        require_fit(self.chain)


class PlannedShape(Document):
    """Rows that differ only in prompt, seed, references and name."""

    rows: int
    plan: PlanDocument
    """Plan of the first row."""


class BatchPlan(Document):
    """Plan of a run over many prompts."""

    SCHEMA = "osora.batch-plan/1"

    rows: int
    failed: tuple[FailedRow, ...]
    """Rows that would be refused, as far as known."""
    shapes: tuple[PlannedShape, ...]

    def lines(self) -> list[str]:
        """Return the plan for people."""
        shapes = "1 shape" if len(self.shapes) == 1 else f"{len(self.shapes)} shapes"
        head = f"rows      {self.rows} of {shapes}, and {len(self.failed)} that would be refused"
        plans = (line for shape in self.shapes for line in (f"shape     rows: {shape.rows}", *shape.plan.lines()))
        return [head, *failed_lines(self.failed), *plans]

    def require_fit(self) -> None:
        """Raise HardwareError if some stage of a shape needs more memory than may be used."""
        for shape in self.shapes:
            shape.plan.require_fit()


def plan_from_request(
    request: GenerateRequest, *, reporter: Reporter, context: RankContext | None = None
) -> PlanDocument:
    """Choose the model, complete the settings, and return the plan; errors are those of
    `resolve_generate_settings` and `plan_generation`.
    """
    if context is not None:
        request = request_of_rank(request, context)
    settings, choice = resolve_generate_settings(request, reporter=reporter)
    refuse_data_parallel(settings)
    note_plan(settings, reporter)
    if request.on is not None:
        return _plan_elsewhere(settings, request.on, reporter)
    for part in filter(None, (picture_settings(settings), settings)):
        warn_of_missing(partial(require_weights_of, part), reporter)
    hardware = planned_hardware(settings, reporter) if context is None else None
    chain = plan_generation(settings, reporter=reporter, hardware=hardware)
    if choice is not None:
        reporter.note(choice)
    return PlanDocument.of(chain)


def _plan_elsewhere(settings: GenerateSettings, machine: PlannedMachine, reporter: Reporter) -> PlanDocument:
    """Return the plan for GPUs that need not be here, with the time that is predicted for them."""
    parallel = settings.parallel
    machine.require(device=settings.runtime.device, ranks=parallel.world_size, ranks_per_node=parallel.ranks_per_node)
    chain = plan_generation(settings, reporter=reporter, hardware=hardware_of_ranks(settings, gpu=machine.gpu))
    return PlanDocument.of(chain, predicted=predict_time(chain, machine.gpu))


def plan_generation(settings: GenerateSettings, *, reporter: Reporter, hardware: Hardware | None = None) -> Chain:
    """Return what `run.generate` would do, after the checks that need neither weights nor enough memory.

    `hardware`: a device that is not here; None: as `make_plan`. Errors as `run.generate`, but for those of missing
    weights and of too little memory.
    """
    chain = make_chain(with_mode(settings, reporter), hardware=hardware, tries_device=hardware is None)
    plan = chain.video
    if plan.hardware.is_here:
        chain = without_cached_text(chain, PromptCache.of_user())
    _note_names(chain, reporter)
    references_of(plan, reporter)
    warn_about_planned_prompts(plan, reporter)
    for line in filter(None, (plan.size_note, plan.fitting.ignored)):
        reporter.note(line)
    if settings.output.makes_previews and plan.weights.complete and known_map(plan) is None:
        reporter.note(f"previews: {fitting_line(plan)}")
    return chain


def _note_names(chain: Chain, reporter: Reporter) -> None:
    """Report which results are there already, and what a run would do; errors are those that no other name avoids."""
    first = [sample_files(chain.settings, index) for index in range(chain.num_samples)]
    check_outputs(first, chain, create=False)
    if chain.settings.output.overwrite or all(sample.is_free for sample in first):
        return
    files, refused = planned_outputs(chain)
    if refused is not None:
        reporter.note(f"{refused.message}; {refused.hint}")
        return
    for sample, named in zip(files, first, strict=True):
        if sample.made_before:
            reporter.note(f"made before by the same request: {sample.media}")
        elif sample.media != named.media:
            reporter.note(f"{named.media} exists already: the result would be {sample.media.name}")
