"""Plan a generation without running it: the documents that `--dry-run` prints."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

from pydantic import AliasPath, ConfigDict, Field, InstanceOf

from opensora_cli.core.documents import Document
from opensora_cli.core.exceptions import OsoraError, OutputError
from opensora_cli.core.progress import Reporter
from opensora_cli.core.ranks import RankContext
from opensora_cli.core.solvers import Solver
from opensora_cli.engine.components.attention import AttentionPlan
from opensora_cli.engine.components.few_steps import require_turbo
from opensora_cli.engine.components.parallelize import PlannedExchange, describe_mesh
from opensora_cli.engine.components.weights import Component, require_weights_of, warn_of_missing
from opensora_cli.engine.encode.prompt_cache import PromptCache
from opensora_cli.engine.estimate.offload import OffloadPlan
from opensora_cli.engine.estimate.predicted_time import PredictedTime
from opensora_cli.engine.estimate.verdict import HostMemory
from opensora_cli.engine.generate.batch import (
    FailedRow,
    RowReporter,
    failed_lines,
    failed_row,
    refuse_one_file,
    row_settings,
)
from opensora_cli.engine.generate.chain import DRAFT, PICTURE, Chain
from opensora_cli.engine.generate.outputs import SampleFiles, check_outputs, sample_files, sheet_path
from opensora_cli.engine.generate.plan import gib_or_less
from opensora_cli.engine.generate.planning import CACHED_TEXT_LINE, make_chain, note_ignored_offload, require_fit
from opensora_cli.engine.generate.predicted import predict_known_time
from opensora_cli.engine.generate.previews import known_map
from opensora_cli.engine.generate.prompts import Row, Shard
from opensora_cli.engine.generate.ranks import hardware_of_ranks, planned_hardware
from opensora_cli.engine.generate.references import references_of, with_mode
from opensora_cli.engine.generate.refinement import note_plan
from opensora_cli.engine.generate.request import picture_settings
from opensora_cli.engine.generate.sidecar import choose_outputs, picture_files
from opensora_cli.engine.generate.text import warn_about_planned_prompts, without_cached_text
from opensora_cli.parallel.shares import MeshShape
from opensora_cli.settings.enums import OffloadMode
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.hardware import PlannedMachine
from opensora_cli.settings.load import GenerateRequest

_LISTED_FILES = 5
_OF_A_ROW: Mapping[str, bool | set[str]] = {
    **dict.fromkeys(("prompt", "negative_prompt", "output"), True),
    "sampling": {"seed"},
    "condition": {"references"},
}
"""Settings that may differ between rows with the same plan."""


class PlannedStage(Document):
    """Device memory of one stage."""

    model_config = ConfigDict(from_attributes=True)

    name: str
    weight_bytes: int
    """Weights, without weights that a CPU maps from their files."""
    mapped_bytes: int
    """Weights that a CPU maps from their files; they take page cache only."""
    data_bytes: int
    """Inputs and outputs of the stage."""
    activation_bytes: int
    total_bytes: int


class PlannedLora(Document):
    """Adapter of the transformer."""

    model_config = ConfigDict(from_attributes=True)

    path: Path
    scale: float
    sha256: str
    ranks: tuple[int, ...]
    """Ranks of its layers, each once."""


def _plan(*path: str) -> Any:
    """Return a field that is read from an attribute of the plan of a job."""
    return Field(validation_alias=AliasPath("plan", *path))


class PlannedJob(Document):
    """Plan of one job of a request."""

    model_config = ConfigDict(from_attributes=True)

    role: str
    """picture, draft, video or extend."""
    model: str = _plan("settings", "model", "name")
    height: int = _plan("height")
    width: int = _plan("width")
    num_frames: int = _plan("num_frames")
    """Frames of the result, with all segments."""
    condition_mode: str = _plan("mode", "name")
    latent_shape: tuple[int, int, int, int] = _plan("latent_shape")
    """(C, T, H, W) of one sample."""
    latent_bytes: int = _plan("latent_bytes")
    """Size of the latents of one sample."""
    video_tokens: int = _plan("video_tokens")
    text_tokens: int = _plan("settings", "text", "t5_max_length")
    num_inference_steps: int = _plan("num_steps")
    skipped_steps: int = _plan("start")
    """Steps that are skipped because the video starts from its draft."""
    reused_steps: tuple[int, ...] = _plan("reused_steps")
    """Steps that reuse block outputs, with `sampling.step_cache`."""
    solver: Solver = _plan("settings", "sampling", "solver")
    timesteps: tuple[float, ...] = _plan("timesteps")
    model_evaluations: int = _plan("model_evaluations")
    """Model evaluations for one sample."""
    encodes_text: bool = _plan("encodes_text")
    """Whether prompts are encoded; False if the prompt cache has all prompts, or saved latents are decoded."""
    stages: tuple[PlannedStage, ...] = _plan("stages")
    offload: OffloadPlan = _plan("offload")
    mesh: MeshShape = _plan("mesh")
    exchange: PlannedExchange | None = _plan("planned_exchange")
    """Exchange of tokens for heads between ranks; None without one."""
    attention: AttentionPlan | None = _plan("attention")
    """Attention backend; None if the transformer does not run."""
    weights: dict[Component, Path] = _plan("weight_paths")
    """Weights to read that were found."""
    missing_weights: tuple[str, ...] = _plan("missing_weights")
    loras: tuple[PlannedLora, ...] = _plan("loras")


class PlannedFile(Document):
    """File that will be written."""

    path: Path
    sidecar: Path | None
    """Settings beside the file; None without metadata."""
    made_before: bool
    """Whether an earlier run of the same request made the file; the run keeps it."""

    @classmethod
    def of(cls, sample: SampleFiles) -> Self:
        """Return the file of a sample: a result, or the latents of an explored seed."""
        if sample.settings.output.explore and sample.latents is not None and not sample.made_before:
            return cls(path=sample.latents, sidecar=None, made_before=False)
        return cls(path=sample.media, sidecar=sample.sidecar, made_before=sample.made_before)

    def line(self) -> str:
        """Return the file as a line of text."""
        names = str(self.path) if self.sidecar is None else f"{self.path}, {self.sidecar.name}"
        return f"{'keeps' if self.made_before else 'writes':<10}{names}"


class PlanDocument(Document):
    """Plan of a generation, with its jobs, memory and files."""

    SCHEMA = "osora.plan/6"

    verdict: str
    """Whether the request fits, its memory, and its predicted time."""
    device: str
    device_name: str
    dtype: str
    num_samples: int
    model_evaluations: int
    """Model evaluations for all samples, without pictures."""
    jobs: tuple[PlannedJob, ...]
    """Jobs in order: the output of a job is the reference or the start of the next."""
    peak_bytes: int
    """Device memory of the largest stage."""
    free_bytes: int | None
    """Free memory of the device; None if the device is not in this machine."""
    budget_bytes: int | None
    """Usable memory: the free memory, or `memory.limit`; None if it is not known."""
    fits: bool | None
    """Whether all stages fit in memory; None if the usable memory is not known."""
    host: HostMemory
    outputs: tuple[PlannedFile, ...]
    pictures: tuple[PlannedFile, ...]
    """Files of the pictures that are made first and kept."""
    sheet: Path | None
    """Sheet with a preview of each explored seed; None without `--explore`."""
    predicted: PredictedTime | None
    """Predicted time on the GPUs; None if their speed is not known, and on a CPU."""
    settings: GenerateSettings
    chain: InstanceOf[Chain] = Field(exclude=True, repr=False)

    @classmethod
    def of(cls, chain: Chain, files: Sequence[SampleFiles] = (), *, predicted: PredictedTime | None = None) -> Self:
        """Return the document of a request that writes these files."""
        plan, hardware = chain.video, chain.video.hardware
        usable = chain.usable_bytes
        return cls(
            verdict=chain.verdict(None if predicted is None else predicted.seconds),
            device=str(hardware.device),
            device_name=hardware.device_name,
            dtype=hardware.dtype_name,
            num_samples=chain.num_samples,
            model_evaluations=chain.model_evaluations * chain.num_samples,
            jobs=chain.jobs,  # type: ignore[arg-type]  # pydantic reads the attributes of each job
            peak_bytes=chain.peak_bytes,
            free_bytes=hardware.free_bytes if hardware.memory_is_known else None,
            budget_bytes=usable,
            fits=None if usable is None else chain.fits,
            host=chain.host,
            outputs=tuple(map(PlannedFile.of, files)),
            pictures=tuple(map(PlannedFile.of, picture_files(chain, files) if plan.settings.picture.save else ())),
            sheet=sheet_path(files[0].target) if plan.settings.output.explore and files else None,
            predicted=predicted,
            settings=plan.settings,
            chain=chain,
        )

    def lines(self) -> list[str]:
        """Return the plan as lines of text."""
        chain, plan, settings = self.chain, self.chain.video, self.settings
        picture, draft, segments = chain.find(PICTURE), chain.find(DRAFT), len(chain.segments)
        size, frames = f"{self.num_samples} x {plan.width}x{plan.height}", plan.num_frames
        reused = f"{len(plan.reused_steps)} of them from the cache, " if plan.reused_steps else ""
        mapped = [f"{each.name} {gib_or_less(each.mapped_bytes)}" for each in plan.stages if each.mapped_bytes]
        facts = {
            "model": f"{settings.model.name} on {self.device} ({self.device_name}), {self.dtype}",
            "picture": size if frames == 1 else None,
            "video": f"{size}, {frames} frames at {settings.video.fps} fps" if frames > 1 else None,
            "latents": f"{'x'.join(map(str, plan.latent_shape))}, {gib_or_less(chain.latent_bytes)} a sample",
            "tokens": f"{plan.video_tokens} video + {settings.text.t5_max_length} text",
            "first": picture and f"a picture of {picture.summary}",
            "draft": draft and f"{draft.summary}, from which it starts after step {plan.start}",
            "sampling": f"{plan.mode.name}, {plan.num_steps} steps by {settings.sampling.solver}, {reused}"
            f"{self.model_evaluations} model evaluations",
            "prompts": None if plan.encodes_text or plan.decodes_only else CACHED_TEXT_LINE,
            "extend": f"{segments} segments of {settings.video.num_frames} frames, the last {settings.overlap} of each "
            f"given to the next: {frames} frames"
            if segments > 1
            else None,
            "memory": ", ".join(f"{stage.name} {gib_or_less(stage.total_bytes)}" for stage in chain.stages),
            "mapped": f"{', '.join(mapped)}: weights that are read from their files" if mapped else None,
            "devices": f"{plan.mesh.size}, each as below: {describe_mesh(plan.mesh)}" if plan.mesh.size > 1 else None,
            "exchange": plan.planned_exchange and plan.planned_exchange.line(),
            "attention": plan.attention and plan.attention.line(),
            "compile": "the transformer's blocks, when they are first called"
            if settings.compile and not plan.decodes_only
            else None,
            "offload": "; ".join(self._offloaded()) or "none",
            "host": self.host.line() if plan.hardware.device.type != "cpu" else None,
        }
        found = [self.verdict, *(f"{name:<10}{text}" for name, text in facts.items() if text)]
        found += [] if self.predicted is None else self.predicted.lines()
        found += [f"weights   {component}: {path}" for component, path in plan.weight_paths.items()]
        found += [f"lora      {lora.line()}" for lora in plan.loras]
        missing = dict.fromkeys(name for each in self.jobs for name in each.missing_weights)
        found += [f"missing   {name}" for name in missing]
        found += [file.line() for files in (self.outputs, self.pictures) for file in files[:_LISTED_FILES]]
        if len(self.outputs) > _LISTED_FILES:
            found.append(f"writes    and so on, up to {self.outputs[-1].path}")
        if self.sheet is not None:
            found.append(f"writes    {self.sheet}")
        return found

    def _offloaded(self) -> Iterable[str]:
        plan = self.chain.video
        if plan.offload.modulation_on_host and plan.offload.mode is not OffloadMode.BLOCKS and plan.files is None:
            yield "modulation on the host, computed before the first step"
        yield from plan.offload.lines()

    def raise_for_problems(self) -> None:
        """Raise HardwareError if a stage needs more memory than may be used."""
        require_fit(self.chain)


class PlannedShape(Document):
    """Rows that differ only in prompt, seed, references and name."""

    rows: int
    plan: PlanDocument
    """Plan of the first row."""


class BatchPlan(Document):
    """Plan of a run over many prompts."""

    SCHEMA = "osora.batch-plan/3"

    rows: int
    failed: tuple[FailedRow, ...]
    """Rows that would be refused."""
    shapes: tuple[PlannedShape, ...]

    def lines(self) -> list[str]:
        """Return the plans as lines of text. The plan that needs the most memory comes first."""
        shapes = "1 shape" if len(self.shapes) == 1 else f"{len(self.shapes)} shapes"
        head = f"rows      {self.rows} of {shapes}, and {len(self.failed)} that would be refused"
        largest_first = sorted(self.shapes, key=lambda shape: -shape.plan.peak_bytes)
        plans = (line for shape in largest_first for line in (*shape.plan.lines(), f"rows      {shape.rows}", ""))
        return [*plans, head, *failed_lines(self.failed)]

    def raise_for_problems(self) -> None:
        """Raise HardwareError if a stage of a shape needs more memory than may be used."""
        for shape in self.shapes:
            shape.plan.raise_for_problems()


def plan_generation(
    settings: GenerateSettings,
    *,
    reporter: Reporter,
    on: PlannedMachine | None = None,
    context: RankContext | None = None,
) -> PlanDocument:
    """Return the plan of a request, after the checks that need neither weights nor enough memory."""
    note_plan(settings, reporter)
    chain = chain_to_plan(settings, reporter=reporter, on=on, context=context)
    if chain.video.hardware.is_here:
        chain = without_cached_text(chain, PromptCache.of_user())
    plan, files = chain.video, _planned_files(chain, reporter)
    references_of(plan, reporter)
    warn_about_planned_prompts(plan, reporter)
    if plan.size_note is not None:
        reporter.note(plan.size_note)
    note_ignored_offload(plan, reporter)
    if settings.output.makes_previews and plan.weights.complete:
        known_map(plan, reporter)
    return PlanDocument.of(chain, files, predicted=predict_known_time(chain, on))


def chain_to_plan(
    settings: GenerateSettings,
    *,
    reporter: Reporter,
    on: PlannedMachine | None = None,
    context: RankContext | None = None,
) -> Chain:
    """Return the jobs of a request that will not run, on this machine or `on` another one."""
    hardware, parallel = None, settings.parallel
    if on is not None:
        device = settings.runtime.device
        on.require(device=device, ranks=parallel.world_size, ranks_per_node=parallel.ranks_per_node)
        hardware = hardware_of_ranks(settings, gpu=on.gpu)
    else:
        for part in filter(None, (picture_settings(settings), settings)):
            warn_of_missing(partial(require_weights_of, part), reporter)
        warn_of_missing(partial(require_turbo, settings), reporter)
        hardware = planned_hardware(settings, reporter) if context is None else None
    return make_chain(with_mode(settings, reporter), hardware=hardware, tries_device=hardware is None)


def _planned_files(chain: Chain, reporter: Reporter) -> Sequence[SampleFiles]:
    """Return the files that a run would write, with notes about existing ones; none if they would refuse the run.

    Raises OutputError if no file can have such a name.
    """
    first = [sample_files(chain.settings, index) for index in range(chain.num_samples)]
    check_outputs(first, chain, create=False)
    some_exist = not (chain.settings.output.overwrite or all(sample.is_free for sample in first))
    try:
        files = choose_outputs(chain)
    except OutputError as error:
        reporter.note(f"{error.message}; {error.hint}")
        return ()
    for sample, named in zip(files, first, strict=True) if some_exist else ():
        if sample.made_before:
            reporter.note(f"made before by the same request: {sample.media}")
        elif sample.media != named.media:
            reporter.note(f"{named.media} exists already: the result would be {sample.media.name}")
    return files


def plan_rows(request: GenerateRequest, rows: Sequence[Row], *, shard: Shard, reporter: Reporter) -> BatchPlan:
    """Return a plan for each group of rows that differ only in prompts, seed, references and name."""
    refuse_one_file(request)
    chosen, shown = shard.rows(rows), RowReporter(reporter)
    failed: list[FailedRow] = []
    plans: dict[str, PlanDocument] = {}
    counts: Counter[str] = Counter()
    for row in chosen:
        shown.row = row.number
        try:
            settings = row_settings(row, request, shown)
            shape = settings.model_dump_json(exclude=_OF_A_ROW)
            if shape not in plans:
                plans[shape] = plan_generation(settings, reporter=shown, on=request.on)
            counts[shape] += 1
        except OsoraError as error:
            failed.append(failed_row(row, error))
    shapes = tuple(PlannedShape(rows=counts[shape], plan=plan) for shape, plan in plans.items())
    return BatchPlan(rows=len(chosen), failed=tuple(failed), shapes=shapes)
