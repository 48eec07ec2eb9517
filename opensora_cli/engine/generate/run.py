"""Run `osora generate`: from settings to files, or from a request to a video in memory."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import Field

from opensora_cli.core.choices import MediaFormat
from opensora_cli.core.device import peak_memory_gib
from opensora_cli.core.documents import Document
from opensora_cli.core.exceptions import MediaError, RequestError
from opensora_cli.core.files import remove_left
from opensora_cli.core.limits import ThreadChoice
from opensora_cli.core.progress import Reporter, SilentReporter
from opensora_cli.core.ranks import RankContext
from opensora_cli.engine.components.attention import AttentionPlan, attention_use, keep_attention
from opensora_cli.engine.components.hardware import rank_hardware
from opensora_cli.engine.generate.chain import Chain, make_chain, require_runnable
from opensora_cli.engine.generate.decode import Clip, GeneratedVideo, hold, report_given_frames, save
from opensora_cli.engine.generate.dry_run import hardware_of_ranks
from opensora_cli.engine.generate.events import Events, Hooks
from opensora_cli.engine.generate.models import LoadedModels
from opensora_cli.engine.generate.outputs import SampleFiles, check_outputs, note_earlier_work, sample_files
from opensora_cli.engine.generate.pipeline import computing, make
from opensora_cli.engine.generate.plan import VIDEO
from opensora_cli.engine.generate.ranks import Ranks, joined_ranks, require_devices, start_ranks
from opensora_cli.engine.generate.references import references_of
from opensora_cli.engine.generate.refinement import refined
from opensora_cli.engine.generate.request import refined_with_mode, resolve, with_mode
from opensora_cli.engine.generate.sample import Sample, open_latents, read_saved, unfinished
from opensora_cli.engine.generate.sidecar import choose_outputs, refuse_pictures, request_hashes
from opensora_cli.engine.generate.text import warn_about_prompts
from opensora_cli.engine.launch.rank import WatchedReporter
from opensora_cli.media.read import read_video
from opensora_cli.media.write import contact_sheet, film_strip, write_media
from opensora_cli.settings.applies import used_settings
from opensora_cli.settings.devices import AttentionChoice
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.load import SIDECAR_SCHEMA, GenerateRequest


class ExploredSeed(Document):
    """Sample that `--explore` started."""

    seed: int
    state: Path
    """Latents to continue from."""
    steps: int | None
    """Steps done; None means all steps."""
    preview: Path | None
    """Animation of the last prediction; None without previews."""
    line: str = Field(exclude=True)
    """Command that finishes the sample, with its seed."""

    @classmethod
    def of(cls, sample: SampleFiles) -> "ExploredSeed":
        assert sample.latents is not None
        steps = sample.saved_steps if sample.is_explored else sample.settings.sampling.stop_at
        return cls(
            seed=sample.seed,
            state=sample.latents,
            steps=steps,
            preview=sample.preview if sample.preview.is_file() else None,
            line=f"{sample.command(sample.latents, is_begun=steps is not None)}  # seed {sample.seed}",
        )


class GenerateResult(Document):
    """Results of a run with settings and timings. `--from` makes the results again."""

    SCHEMA = SIDECAR_SCHEMA

    videos: tuple[GeneratedVideo, ...] = Field(serialization_alias="outputs")
    explored: tuple[ExploredSeed, ...] | None = None
    """Explored seeds; absent without `--explore`."""
    sheet: Path | None = None
    """Sheet with a preview of each explored seed; absent without one."""
    model: str
    device: str
    model_evaluations: int = 0
    """Model evaluations for all samples."""
    timings_s: dict[str, float] = Field(default={})
    """Seconds of each stage."""
    threads: ThreadChoice | None = None
    """CPU threads; absent if nothing was computed."""
    peak_allocated_gib: float | None = None
    """Peak memory of a CUDA device; absent on a CPU."""
    peak_resident_gib: float | None = None
    """Peak memory of the process, with mapped files of weights; absent on a CUDA device."""
    attention: AttentionPlan | None = None
    """Attention backend of the transformer, with the reason; absent if saved latents were decoded."""
    settings: GenerateSettings

    def to_json(self) -> dict[str, Any]:
        """Return the document without empty keys, and without settings that had no effect."""
        document = {key: value for key, value in super().to_json().items() if value is not None}
        return {**document, "settings": used_settings(self.settings)}

    def lines(self) -> list[str]:
        lines = [str(video.path) for video in self.videos]
        if self.sheet is not None:
            lines.append(str(self.sheet))
        return [*lines, *(seed.line for seed in self.explored or ())]

    def lines_after_notes(self) -> list[str]:
        """Return the lines without the videos: notes have named each as saved, or as made before."""
        return self.lines()[len(self.videos) :]


def generate(
    settings: GenerateSettings,
    *,
    reporter: Reporter | None = None,
    context: RankContext | None = None,
    models: LoadedModels | None = None,
    device: str | None = None,
    rank_flags: Sequence[str] | None = None,
    hooks: Hooks | None = None,
) -> GenerateResult | None:
    """Make the videos that `settings` describe, and write them to files.

    Everything that can be checked is checked before the first weight is read. Each video is saved as soon as it is
    decoded. A result that the same request has made before is kept. A result of another request keeps its name, and the
    new one is NAME_2. The argument of KeyboardInterrupt lists what is finished and how to continue.

    Args:
        context: set in one of several ranks, which all call this function and join.
        models: models that stay loaded after the run; None to load models for this run.
        device: device of a process that makes videos beside others; None for the device of the settings.
        rank_flags: options of the command line for the ranks that this process may start; None to start none.
        hooks: functions of the program that runs the generation.

    Returns None if ranks were started; rank 0 prints the result.
    """
    reporter = reporter or SilentReporter()
    if context is None and rank_flags is not None and settings.parallel.world_size > 1:
        require_devices(settings)
        settings = refined(settings, reporter=reporter)
        # Reading the free memory of a device creates a CUDA context that stays until this process ends.
        hardware = hardware_of_ranks(settings)
        chain = make_chain(with_mode(settings, SilentReporter()), hardware=hardware, tries_device=False)
        if (earlier := _earlier_result(chain, choose_outputs(chain), reporter)) is None:
            start_ranks(settings, "generate", rank_flags)
        return earlier
    with ExitStack() as stack:
        if context is not None:
            reporter = WatchedReporter(reporter)
            settings, joined = stack.enter_context(joined_ranks(settings, context, reporter))
            models = stack.enter_context(LoadedModels(ranks=joined))
        models = models or stack.enter_context(LoadedModels(stay=settings.num_samples > 1))
        ranks, is_main = models.ranks, models.ranks.is_main
        chain = plan_here(settings, models, reporter=reporter, device=device)
        chosen = choose_outputs(chain, ranks=ranks)
        if (earlier := _earlier_result(chain, chosen, reporter)) is not None:
            return earlier
        require_runnable(chain, reporter)
        references = references_of(chain.video, reporter) if is_main else []
        if is_main:
            warn_about_prompts(chain.video, reporter)
            check_outputs(chain, create=True)
        chosen = choose_outputs(chain, claims=stack, ranks=ranks)
        files = [sample for sample in chosen if not sample.made_before]
        note_earlier_work(chosen, reporter)
        if is_main:
            refuse_pictures(chain, files)
        saved = [read_saved(chain, sample, ranks) for sample in files]
        chain = _with_attention_before(chain, files, ranks)
        events, output = Events(reporter, hooks=hooks), chain.settings.output
        stack.enter_context(computing(chain.video, reporter))
        if is_main:
            stack.enter_context(events.rescue(files))
        samples = [
            Sample(chain, chain.video, sample, references, latents)
            for sample, latents in zip(files, saved, strict=True)
            if not sample.is_explored
        ]
        evaluations = sum(chain.evaluations_after(each.files.saved_steps or 0) for each in unfinished(samples))
        videos = make(chain, samples, models, events, finish=None if output.explore else save)
        kept = [GeneratedVideo.of(chain, sample) for sample in chosen if sample.made_before]
        return GenerateResult(
            videos=tuple(sorted([*kept, *videos], key=lambda video: video.seed)),
            explored=tuple(map(ExploredSeed.of, files)) if output.explore else None,
            sheet=_write_sheet(chosen) if output.explore and is_main else None,
            model=chain.settings.model.name,
            device=str(chain.video.hardware.device),
            model_evaluations=evaluations,
            timings_s={stage: round(seconds, 3) for stage, seconds in events.timings_s.items()},
            **peak_memory_gib(chain.video.hardware.device),
            threads=chain.video.threads,
            attention=chain.video.attention,
            settings=chain.settings,
        )


def plan_here(
    settings: GenerateSettings, models: LoadedModels, *, reporter: Reporter, device: str | None = None
) -> Chain:
    """Return the jobs of a request for the rank with the least memory, in which loaded models count as free.

    All ranks call it, with settings that have a condition mode. A single process chooses the mode here, and refines the
    prompt. Models that fit stay loaded.
    """
    ranks, parallel = models.ranks, settings.parallel
    if ranks.device is None:
        if parallel.world_size > (parallel.data_parallel_degree or 1):
            raise RequestError(
                f"{parallel.world_size} devices are asked for, and this is one process",
                hint="start with osora generate --gpus N, torchrun or srun",
            )
        settings = refined_with_mode(settings, reporter)
    hardware = rank_hardware(settings, device=device if ranks.device is None else str(ranks.device))
    free = ranks.least(hardware.free_bytes + models.bytes_on(hardware.device))
    chain = make_chain(settings, hardware=replace(hardware, free_bytes=free))
    return chain.change(models.planned, only=VIDEO).with_threads()


def _earlier_result(chain: Chain, files: Sequence[SampleFiles], reporter: Reporter) -> GenerateResult | None:
    """Return the result of a run that has nothing to compute; None if a sample is missing."""
    if not all(sample.made_before for sample in files):
        return None
    # A run that was killed right after the result may have left temporary files.
    remove_left(files[0].media.parent)
    note_earlier_work(files, reporter)
    return GenerateResult(
        videos=tuple(GeneratedVideo.of(chain, sample) for sample in files),
        model=chain.settings.model.name,
        device=str(chain.video.hardware.device),
        settings=chain.settings,
    )


def _write_sheet(files: Sequence[SampleFiles]) -> Path:
    """Write the sheet with the last preview of each explored seed."""
    cells = []
    for sample in files:
        try:
            strip_HWC = film_strip(read_video(sample.preview).frames_THWC)
        except MediaError:
            strip_HWC = None
        cells.append((f"seed {sample.seed}" + (" (finished)" if sample.made_before else ""), strip_HWC))
    return write_media([contact_sheet(cells)[None]], files[0].sheet, fps=1, format=MediaFormat.PNG)


def _with_attention_before(chain: Chain, files: Sequence[SampleFiles], ranks: Ranks) -> Chain:
    """Return the chain with the attention backend of the first unfinished latents, which rank 0 reads."""
    begun = [sample.saved for sample in files if sample.saved is not None and sample.saved_steps is not None]
    plan, attention = chain.video, chain.video.attention
    if not begun or attention is None or chain.settings.runtime.attention is not AttentionChoice.AUTO:
        return chain
    backend = ranks.same(open_latents(begun[0]).attention if ranks.is_main else None)
    kept = keep_attention(attention, backend, attention_use(chain.settings, plan.hardware, plan.mesh))
    return chain.change(lambda each: replace(each, attention=kept), only=VIDEO)


def hold_from_request(
    request: GenerateRequest, models: LoadedModels, *, reporter: Reporter
) -> tuple[Clip, Callable[[int, str], str]]:
    """Resolve the settings of a request; return its first sample in memory, and its `request_hashes` at that time."""
    settings = resolve(request, reporter=reporter)
    if settings.resume is not None:
        raise RequestError("resume continues a run that writes files", hint="use osora generate --from FILE")
    if settings.output.explore:
        raise RequestError("output.explore leaves files and no video", hint="use osora generate --explore K")
    chain = plan_here(settings.replace({"picture.save": False}), models, reporter=reporter)
    require_runnable(chain, reporter)
    references = references_of(chain.video, reporter)
    warn_about_prompts(chain.video, reporter)
    hashes = request_hashes(chain)
    files = replace(sample_files(chain.settings, 0), latents=None)
    saved = read_saved(chain, files, models.ranks)
    sample = Sample(chain, chain.video, files, references, saved)
    with computing(chain.video, reporter):
        [video] = make(chain, [sample], models, Events(reporter), finish=hold)
    report_given_frames(video)
    return video, hashes
