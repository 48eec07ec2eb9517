"""`osora generate`: from settings to videos, one stage after the other, each freeing its models before the next."""

import dataclasses
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist

from opensora_cli.core.exceptions import RequestError
from opensora_cli.core.folder_lock import remove_left
from opensora_cli.core.progress import Reporter, SilentReporter
from opensora_cli.core.rank_messages import broadcast_json
from opensora_cli.core.ranks import RankContext
from opensora_cli.core.threads import ThreadChoice
from opensora_cli.engine.components.attention import keep_attention
from opensora_cli.engine.components.hardware import peak_memory_gib
from opensora_cli.engine.estimate.offload import ON_DEVICE
from opensora_cli.engine.generate.decode import Figures, GeneratedVideo, SampleFrames, report_given_frames, save
from opensora_cli.engine.generate.denoise import saved_samples
from opensora_cli.engine.generate.documents import GenerateResult
from opensora_cli.engine.generate.events import RunRecord
from opensora_cli.engine.generate.explore import explore, explored_of, is_made, write_sheet
from opensora_cli.engine.generate.models import LoadedModels
from opensora_cli.engine.generate.outputs import (
    check_outputs,
    choose_outputs,
    refuse_pictures,
    request_hashes,
)
from opensora_cli.engine.generate.pipeline import computing, make
from opensora_cli.engine.generate.plan import DRAFT, PICTURE, VIDEO, Chain
from opensora_cli.engine.generate.planning import (
    attention_use,
    make_chain,
    rank_hardware,
    require_room,
    require_weights,
)
from opensora_cli.engine.generate.ranks import (
    Ranks,
    hardware_of_ranks,
    planned_on_ranks,
    require_devices,
    start_ranks,
)
from opensora_cli.engine.generate.references import references_of, with_mode
from opensora_cli.engine.generate.refinement import refined
from opensora_cli.engine.generate.request import Resolved, resolve
from opensora_cli.engine.generate.sample import Sample
from opensora_cli.engine.generate.saved_latents import open_latents
from opensora_cli.engine.generate.targets import Claims, SampleFiles, last_frame_path, sample_files
from opensora_cli.engine.generate.text import without_cached_text
from opensora_cli.engine.launch.rank import WatchedReporter
from opensora_cli.settings.enums import AttentionChoice
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.load import GenerateRequest


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Context of a run: who reports, which ranks take part, which models are loaded."""

    reporter: Reporter
    context: RankContext | None = None
    """Set in one of several ranks."""
    ranks: Ranks | None = None
    """All of them, once they have met."""
    model_note: str | None = None
    """Note about the model that was chosen automatically; None for a requested model."""
    threads_source: str | None = None
    """Source of the number of threads; None if not known."""
    cancel: threading.Event | None = None
    """Set by another thread to stop the run after the current step, with its state saved."""
    models: LoadedModels | None = None
    """Models that stay loaded after the run; None to load models for this run."""

    @property
    def is_main(self) -> bool:
        """Whether this process reads references, and writes files."""
        return self.ranks is None or self.ranks.is_main

    def lending(self) -> AbstractContextManager[LoadedModels]:
        """Return what lends the models inside the block."""
        if self.ranks is None:
            return LoadedModels() if self.models is None else nullcontext(self.models)
        tensor, machine = self.ranks.tensor_group, self.ranks.machine_group
        return LoadedModels(text_group=dist.group.WORLD, tensor_group=tensor, machine_group=machine)


def generate_from_request(
    request: GenerateRequest | Resolved,
    *,
    reporter: Reporter,
    context: RankContext | None = None,
    rank_flags: Sequence[str] = (),
    cancel: threading.Event | None = None,
) -> GenerateResult | None:
    """Choose the model, complete the settings, and generate, with several devices in processes of their own.

    Args:
        request: settings as they are given, or resolved.
        reporter: shows progress and previews.
        context: set in one of several ranks.
        rank_flags: options of the command line for ranks that are started here.
        cancel: set by another thread to stop the run after its current step, as Ctrl-C does.

    Returns None if ranks were started; rank 0 prints the result. Raises RankFailure if a rank failed. Other errors are
    those of `generate` and `resolve`.
    """
    resolved = resolve(request, reporter=reporter, context=context)
    settings, model_note = resolved.settings, resolved.model_note()
    if context is None and settings.parallel.world_size > 1:
        require_devices(settings)
        settings = refined(settings, reporter=reporter)
        made = _check_before_ranks(settings, reporter)
        if made is None:
            if model_note is not None:
                reporter.note(model_note)
            start_ranks(settings, flags=rank_flags)
        return made
    source = resolved.threads_source
    run = Run(reporter=reporter, context=context, model_note=model_note, threads_source=source, cancel=cancel)
    return _generate(settings, run)


def generate(
    settings: GenerateSettings,
    *,
    reporter: Reporter | None = None,
    context: RankContext | None = None,
) -> GenerateResult:
    """Make the videos that `settings` describe.

    Everything that can be checked is checked before the first weight is read. The latents of all samples are made first
    and saved; then they are decoded and saved as videos, one by one, and their files removed. With `from_latents` only
    the latter happens, and that file stays. A result that the same request has made before is kept, and not made again;
    one of another request keeps its name, and the new one is NAME_2. `context` is set in one of several ranks, all of
    which call this.

    Raises:
        RequestError: the request contradicts itself, or asks for more devices than this process has to itself.
        MediaError: a reference is missing, broken or too short.
        CheckpointError: weights are missing (all are named) or broken, or saved latents are.
        OutputError: a named result exists already from another request, or a result cannot be written.
        HardwareError: there is no such device, or not enough memory.
        KeyboardInterrupt: its argument lists what is finished and how to continue.
    """
    return _generate(settings, Run(reporter=reporter or SilentReporter(), context=context))


@dataclasses.dataclass(frozen=True, slots=True)
class HeldVideo:
    """One finished sample in memory."""

    chain: Chain
    sample: SampleFiles
    frames_THWC: torch.Tensor
    """uint8 RGB, on the CPU."""
    figures: Figures
    request_sha256: Callable[[int, str], str]
    """Hashes of the request when the video was made; see `outputs.request_hashes`."""


def hold_from_request(request: GenerateRequest, models: LoadedModels, *, reporter: Reporter) -> HeldVideo:
    """Choose the model, complete the settings, and return the first sample in memory.

    No file is written, not even of its picture. Errors are those of `generate_from_request`, except OutputError.
    """
    resolved = resolve(request, reporter=reporter)
    settings, model_note, source = resolved.settings, resolved.model_note(), resolved.threads_source
    if settings.resume is not None:
        raise RequestError("resume goes on with a run that writes files", hint="use osora generate --resume FILE")
    if settings.output.explore:
        raise RequestError("output.explore leaves files and no video", hint="use osora generate --explore K")
    settings = settings.replace({"picture.save": False})
    chain = plan_here(completed(settings, reporter), models, by=source)
    require_weights(chain, reporter)
    require_room(chain, reporter)
    references = references_of(chain.video, reporter)
    hashes = request_hashes(chain)
    files = dataclasses.replace(sample_files(chain.settings, 0), latents=None)
    saved = saved_samples(chain, [files], None).get(0)
    if model_note is not None:
        reporter.note(model_note)
    chain = chain.with_threads(by=source)
    events = RunRecord(reporter, keeps_results=False)

    def hold(decoding: SampleFrames) -> HeldVideo:
        frames_THWC = torch.cat([*decoding.pieces()])
        figures, made_first = decoding.figures(), chain.find(PICTURE) is not None
        report_given_frames(figures.given_frames_psnr_db, files.seed, reporter, made_first=made_first)
        return HeldVideo(decoding.chain, files, frames_THWC, figures, hashes)

    with computing(chain.video, reporter):
        [video] = make(chain, [Sample(chain, chain.video, files, references, saved)], models, events, finish=hold)
    return video


def watched(reporter: Reporter) -> WatchedReporter:
    """Return a reporter of a rank, whose stages the launcher watches."""
    first = [f"{part} {stage}" for part in (PICTURE, DRAFT) for stage in ON_DEVICE]
    return WatchedReporter(reporter, on_device=[*ON_DEVICE, *first])


def _generate(settings: GenerateSettings, run: Run) -> GenerateResult:
    if run.context is not None:
        reporter = watched(run.reporter)
        with planned_on_ranks(settings, run.context, reporter) as (chain, ranks):
            return carry_out(chain, dataclasses.replace(run, reporter=reporter, ranks=ranks))
    return carry_out(plan_here(completed(settings, run.reporter), run.models, by=run.threads_source), run)


def carry_out(chain: Chain, run: Run, *, repeats: bool = False) -> GenerateResult:
    """Make the samples of a plan, except those that an earlier run of the same request has made.

    Errors are those of `generate`. `repeats` is that of `Claims`.
    """
    require_weights(chain, run.reporter)
    found = _agreed(chain, run.ranks, lambda: choose_outputs(chain))
    if all(sample.made_before for sample in found):
        return _made_before(chain, found, run.reporter)
    with Claims(repeats=repeats) as claims:
        return _make(chain, run, claims)


def _agreed(
    chain: Chain, ranks: Ranks | None, choose: Callable[[], tuple[SampleFiles, ...]]
) -> tuple[SampleFiles, ...]:
    """Return the names that rank 0 chooses, on all ranks."""
    chosen = choose() if ranks is None or ranks.is_main else ()
    if ranks is None:
        return chosen
    rows = broadcast_json(
        [
            (sample.number, sample.made_before, sample.saved and str(sample.saved), sample.saved_steps)
            for sample in chosen
        ]
    )
    return chosen or tuple(
        dataclasses.replace(
            sample_files(chain.settings, index, number=number),
            made_before=made_before,
            saved=saved and Path(saved),
            saved_steps=steps,
        )
        for index, (number, made_before, saved, steps) in enumerate(rows)
    )


def _made_before(chain: Chain, files: Sequence[SampleFiles], reporter: Reporter) -> GenerateResult:
    """Return the result of a run that has nothing to compute."""
    for sample in files:
        # Its run may have been killed right after it.
        remove_left(sample.media.parent)
        _note_made(chain.settings, sample, reporter, " (--overwrite makes it again)")
    return _result_of(chain, [GeneratedVideo.of_earlier_run(chain, sample) for sample in files])


def _note_made(settings: GenerateSettings, sample: SampleFiles, reporter: Reporter, again: str) -> None:
    reporter.note(f"made before by the same request: {sample.media}{again}")
    last_frame = last_frame_path(sample.target)
    if settings.output.last_frame and not last_frame.exists():
        reporter.warn(f"{last_frame} is not there: the video was made without it; --overwrite makes both")


def _result_of(chain: Chain, kept: Sequence[GeneratedVideo]) -> GenerateResult:
    return GenerateResult(
        videos=tuple(kept),
        model=chain.settings.model.name,
        device=str(chain.video.hardware.device),
        model_evaluations=0,
        timings_s={},
        settings=chain.settings,
    )


def _claimed(chain: Chain, run: Run, claims: Claims) -> tuple[SampleFiles, ...]:
    """Check the folder of results, and claim the names of all samples, on all ranks."""

    def choose() -> tuple[SampleFiles, ...]:
        check_outputs([sample_files(chain.settings, index) for index in range(chain.num_samples)], chain, create=True)
        return choose_outputs(chain, claims=claims)

    chosen = _agreed(chain, run.ranks, choose)
    are_left = any(not sample.made_before for sample in chosen)
    if are_left and run.model_note is not None:
        run.reporter.note(run.model_note)
    for sample in chosen:
        if sample.made_before:
            _note_made(chain.settings, sample, run.reporter, "" if are_left else " (--overwrite makes it again)")
        elif sample.saved is not None and chain.settings.from_latents is None:
            after = "" if sample.saved_steps is None else f", after step {sample.saved_steps}"
            word = "kept:" if chain.settings.output.explore and is_made(chain.settings, sample) else "going on from"
            run.reporter.note(f"{word} latents of the same request: {sample.saved}{after}")
    return chosen


def _with_attention_before(chain: Chain, files: Sequence[SampleFiles], ranks: Ranks | None) -> Chain:
    """Return the chain with the attention backend of the first unfinished latents; all ranks use what rank 0 reads."""
    begun = [sample.saved for sample in files if sample.saved is not None and sample.saved_steps is not None]
    plan, attention = chain.video, chain.video.attention
    if not begun or attention is None or chain.settings.runtime.attention is not AttentionChoice.AUTO:
        return chain
    backend = open_latents(begun[0]).attention if ranks is None or ranks.is_main else None
    if ranks is not None:
        backend = broadcast_json(backend)
    use = attention_use(chain.settings, plan.hardware, plan.mesh)
    kept = keep_attention(attention, backend, use)
    return chain.change(lambda each: dataclasses.replace(each, attention=kept), only=VIDEO)


def _make(chain: Chain, run: Run, claims: Claims) -> GenerateResult:
    require_room(chain, run.reporter)
    references = references_of(chain.video, run.reporter) if run.is_main else []
    chosen = _claimed(chain, run, claims)
    kept = [GeneratedVideo.of_earlier_run(chain, sample) for sample in chosen if sample.made_before]
    files = [sample for sample in chosen if not sample.made_before]
    if not files:  # another run has made them since this one looked first
        return _result_of(chain, kept)
    if run.is_main:
        refuse_pictures(chain, files)
    saved = saved_samples(chain, files, run.ranks)
    chain = _with_attention_before(chain.with_threads(by=run.threads_source), files, run.ranks)
    samples = [Sample(chain, chain.video, each, references, saved.get(each.index)) for each in files]
    record = RunRecord(run.reporter, cancel=run.cancel)
    with computing(chain.video, run.reporter), run.lending() as models, _rescued(chain.settings, files, record, run):
        if chain.settings.output.explore:
            explore(chain, samples, models, record, ranks=run.ranks)
            videos: tuple[GeneratedVideo, ...] = ()
        else:
            videos = make(chain, samples, models, record, finish=save, ranks=run.ranks)
    explores = chain.settings.output.explore
    return GenerateResult(
        videos=tuple(sorted([*kept, *videos], key=lambda video: video.seed)),
        explored=explored_of(chain.settings, files) if explores else None,
        sheet=write_sheet(chosen, run.reporter) if explores and run.is_main else None,
        model=chain.settings.model.name,
        device=str(chain.video.hardware.device),
        model_evaluations=sum(
            chain.evaluations_after(sample.saved_steps or 0)
            for sample in files
            if sample.saved is None or sample.saved_steps is not None
        ),
        timings_s={stage: round(seconds, 3) for stage, seconds in record.timings_s.items()},
        **peak_memory_gib(chain.video.hardware.device),
        threads=chain.video.threads,
        attention=chain.video.attention,
        linear_products=record.linear_products,
        settings=chain.settings,
    )


def _rescued(
    settings: GenerateSettings, files: Sequence[SampleFiles], record: RunRecord, run: Run
) -> AbstractContextManager[None]:
    """Return the context that reports the saved state when a run ends early, on rank 0 alone."""
    if not run.is_main:
        return nullcontext()
    output = settings.output
    # Without a sidecar nobody knows which request has made a result.
    return record.rescue(files, may_repeat=output.metadata and not output.overwrite)


def _check_before_ranks(settings: GenerateSettings, reporter: Reporter) -> GenerateResult | None:
    """Refuse what rank 0 would refuse, but for the memory, which each rank knows of its own device.

    Returns the result where all of it was made before, and None where ranks are to make it.
    """
    # Not asked for its free memory: the context that this makes would stay until the end.
    hardware = hardware_of_ranks(settings)
    chain = make_chain(with_mode(settings, SilentReporter()), hardware=hardware, tries_device=False)
    require_weights(chain, SilentReporter())
    files = choose_outputs(chain)
    if all(sample.made_before for sample in files):
        return _made_before(chain, files, reporter)
    check_outputs(files, chain, create=False)
    references_of(chain.video, SilentReporter())
    return None


def completed(settings: GenerateSettings, reporter: Reporter) -> GenerateSettings:
    """Return settings for a single process, with a refined prompt if that is wanted, and with a condition mode.

    Raises RequestError if they ask for several devices, or no mode suits the references, and MediaError as `with_mode`.
    """
    parallel = settings.parallel
    if parallel.world_size > (parallel.data_parallel_degree or 1):
        raise RequestError(
            f"{parallel.world_size} devices are asked for, and this is one process",
            hint="start with osora generate --gpus N, torchrun or srun",
        )
    return with_mode(refined(settings, reporter=reporter), reporter)


def plan_here(
    settings: GenerateSettings,
    models: LoadedModels | None,
    *,
    device: str | None = None,
    by: str | None = None,
    threads: ThreadChoice | None = None,
) -> Chain:
    """Return the jobs of a request for a process that shares no video with others; see `make_chain`.

    Args:
        settings: settings with a condition mode.
        models: loaded models, which the plan may keep or release.
        device: device of one of several ranks; None means the device of `settings`.
        by: source of the number of threads.
        threads: threads of an earlier plan; None to choose them.
    """
    models = LoadedModels() if models is None else models
    hardware = rank_hardware(settings, device=device)
    # The memory of loaded models can be released.
    free = hardware.free_bytes + models.bytes_on(hardware.device)
    chain = make_chain(settings, hardware=dataclasses.replace(hardware, free_bytes=free))
    if threads is not None:
        chain = chain.change(lambda plan: dataclasses.replace(plan, threads=threads))
    return without_cached_text(chain, models.prompts, by=by).change(models.planned, only=VIDEO)
