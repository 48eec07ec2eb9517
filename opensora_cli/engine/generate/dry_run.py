"""Plan a generation without running it: the documents that `--dry-run` prints."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Self

import torch
from pydantic import AliasPath, ConfigDict, Field, InstanceOf

from opensora_cli.core.choices import Solver
from opensora_cli.core.device import has_gpu, torch_dtype
from opensora_cli.core.device_names import GPU, type_of_ranks
from opensora_cli.core.documents import Document
from opensora_cli.core.exceptions import HardwareError, OutputError
from opensora_cli.core.progress import Reporter
from opensora_cli.core.ranks import RankContext
from opensora_cli.engine.components.attention import AttentionPlan
from opensora_cli.engine.components.few_steps import require_turbo
from opensora_cli.engine.components.hardware import UNKNOWN_BYTES, Hardware
from opensora_cli.engine.components.parallelize import PlannedExchange
from opensora_cli.engine.components.weights import Component, require_weights_of, warn_of_missing
from opensora_cli.engine.estimate.offload import HostMemory, OffloadPlan
from opensora_cli.engine.estimate.predicted_time import PredictedTime
from opensora_cli.engine.generate.chain import Chain, make_chain, note_exceptions, require_fit
from opensora_cli.engine.generate.outputs import SampleFiles, check_outputs, note_earlier_work
from opensora_cli.engine.generate.predicted import predict_known_time
from opensora_cli.engine.generate.ranks import require_devices
from opensora_cli.engine.generate.references import references_of
from opensora_cli.engine.generate.request import picture_settings, with_mode
from opensora_cli.engine.generate.sidecar import choose_outputs, picture_files
from opensora_cli.engine.generate.text import warn_about_prompts
from opensora_cli.parallel.shares import MeshShape
from opensora_cli.settings.devices import DType
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.hardware import GpuSettings, PlannedMachine

_LISTED_FILES = 5


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


class PlannedJob(Document):
    """Plan of one job of a request."""

    model_config = ConfigDict(from_attributes=True)

    role: str
    """picture, draft, video or extend."""
    model: str = Field(validation_alias=AliasPath("settings", "model", "name"))
    height: int
    width: int
    num_frames: int
    """Frames of the result, with all segments."""
    condition_mode: str = Field(validation_alias=AliasPath("mode", "name"))
    latent_shape: tuple[int, int, int, int]
    """(C, T, H, W) of one sample."""
    latent_bytes: int
    """Size of the latents of one sample."""
    video_tokens: int
    text_tokens: int = Field(validation_alias=AliasPath("settings", "text", "t5_max_length"))
    num_inference_steps: int = Field(validation_alias="num_steps")
    skipped_steps: int = Field(validation_alias="start")
    """Steps that are skipped because the video starts from its draft."""
    reused_steps: tuple[int, ...]
    """Steps that reuse block outputs, with `sampling.step_cache`."""
    solver: Solver = Field(validation_alias=AliasPath("settings", "sampling", "solver"))
    timesteps: tuple[float, ...]
    model_evaluations: int
    """Model evaluations for one sample."""
    stages: tuple[PlannedStage, ...]
    offload: OffloadPlan
    mesh: MeshShape
    exchange: PlannedExchange | None = Field(validation_alias="planned_exchange")
    """Exchange of tokens for heads between ranks; None without one."""
    attention: AttentionPlan | None
    """Attention backend; None if the transformer does not run."""
    weights: dict[Component, Path] = Field(validation_alias="weight_paths")
    """Weights to read that were found."""
    missing_weights: tuple[str, ...]
    loras: tuple[PlannedLora, ...]


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

    SCHEMA = "osora.plan/7"

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
            num_samples=plan.settings.num_samples,
            model_evaluations=chain.model_evaluations * plan.settings.num_samples,
            jobs=chain.jobs,  # type: ignore[arg-type]  # pydantic reads the attributes of each job
            peak_bytes=chain.peak_bytes,
            free_bytes=hardware.free_bytes if hardware.memory_is_known else None,
            budget_bytes=usable,
            fits=None if usable is None else chain.fits,
            host=chain.host,
            outputs=tuple(map(PlannedFile.of, files)),
            pictures=tuple(map(PlannedFile.of, picture_files(chain, files) if plan.settings.picture.save else ())),
            sheet=files[0].sheet if plan.settings.output.explore and files else None,
            predicted=predicted,
            settings=plan.settings,
            chain=chain,
        )

    def lines(self) -> list[str]:
        """Return the plan as lines of text."""
        plan = self.chain.video
        found = [self.verdict, *(f"{name:<10}{text}" for name, text in self.chain.facts().items())]
        if self.predicted is not None:
            found += self.predicted.lines()
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

    def raise_for_problems(self) -> None:
        """Raise HardwareError if a stage needs more memory than may be used."""
        require_fit(self.chain)


def plan_generation(
    settings: GenerateSettings,
    *,
    reporter: Reporter,
    on: PlannedMachine | None = None,
    context: RankContext | None = None,
) -> PlanDocument:
    """Return the plan of a request, after the checks that need neither weights nor enough memory."""
    if settings.refine.is_on:
        reporter.note("refine: a plan asks no language model")
    chain = chain_to_plan(settings, reporter=reporter, on=on, context=context)
    plan, files = chain.video, tuple[SampleFiles, ...]()
    check_outputs(chain, create=False)
    try:
        files = choose_outputs(chain)
    except OutputError as error:
        reporter.note(f"{error.message}; {error.hint}")
    note_earlier_work(files, reporter)
    references_of(plan, reporter)
    warn_about_prompts(plan, reporter)
    note_exceptions(plan, reporter)
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
        hardware = _planned_hardware(settings, reporter) if context is None else None
    return make_chain(with_mode(settings, reporter), hardware=hardware, tries_device=hardware is None)


def _planned_hardware(settings: GenerateSettings, reporter: Reporter) -> Hardware | None:
    """Return the device to plan for, with a warning, if this machine lacks the devices; None otherwise."""
    try:
        if settings.parallel.world_size > 1:
            require_devices(settings)
    except HardwareError as error:
        is_here = has_gpu()
        planned = "the GPU of this machine" if is_here else "CUDA GPUs, whose free memory is not known"
        reporter.warn(f"this machine could not run it: {error.message}; planned on {planned}")
        return None if is_here else hardware_of_ranks(settings)
    return None


def hardware_of_ranks(settings: GenerateSettings, *, gpu: GpuSettings | None = None) -> Hardware:
    """Return the kind of device of the ranks, without asking a device; `gpu` describes a GPU of another machine."""
    kind, dtype_name = type_of_ranks(settings.runtime.device), settings.runtime.dtype
    auto = "float32" if kind == "cpu" else "bfloat16"
    dtype = torch_dtype(auto if dtype_name is DType.AUTO else dtype_name)
    if gpu is not None:
        return Hardware(torch.device(GPU), gpu.device_name, dtype, gpu.free_bytes, gpu.memory, gpu.host_memory)
    return Hardware(torch.device(kind), kind, dtype, free_bytes=UNKNOWN_BYTES, total_bytes=UNKNOWN_BYTES)
