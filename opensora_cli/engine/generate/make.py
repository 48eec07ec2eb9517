"""From a plan to finished videos: every stage once, each freeing the models that the next has no room for."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from opensora_cli.core.exceptions import HardwareError
from opensora_cli.core.media_choices import Fit
from opensora_cli.core.progress import Reporter, SilentReporter
from opensora_cli.core.rank_messages import broadcast_json
from opensora_cli.core.threads import threads_used
from opensora_cli.engine.components.hardware import limited_memory, start_peak_memory, tf32_products
from opensora_cli.engine.components.parallelize import describe_mesh
from opensora_cli.engine.components.weights import Component
from opensora_cli.engine.generate.decode import SampleFrames, decode_clips, write_video
from opensora_cli.engine.generate.denoise import denoise_clips
from opensora_cli.engine.generate.documents import CACHED_TEXT_LINE, reread_line
from opensora_cli.engine.generate.encoded_text import text_embeds
from opensora_cli.engine.generate.execution_plan import DRAFT, PICTURE, ExecutionPlan
from opensora_cli.engine.generate.loaded import LoadedModels
from opensora_cli.engine.generate.outputs import picture_files
from opensora_cli.engine.generate.preview_map import preview_map
from opensora_cli.engine.generate.previews import Previews
from opensora_cli.engine.generate.ranks import Ranks, agreed_tensors
from opensora_cli.engine.generate.references import Reference, reference_latents, references_of, references_to
from opensora_cli.engine.generate.room import require_fit
from opensora_cli.engine.generate.segments import Joined, Segment
from opensora_cli.engine.generate.stages import RunRecord
from opensora_cli.engine.generate.targets import SampleFiles
from opensora_cli.engine.generate.work import Clip, DenoisedSample, Whole, Work, trying_all, unfinished
from opensora_cli.media.read import read_picture
from opensora_cli.media.resize import fit_frames

V = TypeVar("V")


def require_room(plan: ExecutionPlan, reporter: Reporter) -> None:
    """Raise HardwareError if there is not enough memory, and note how the plan makes do with what there is."""
    require_fit(plan)
    if plan.picture is not None:
        with_picture = ", ".join(plan.picture.offload.lines())
        reporter.note(f"picture: {plan.picture.what}" + (f"; memory: {with_picture}" if with_picture else ""))
    if plan.mesh.size > 1:
        reporter.note(f"devices: {plan.mesh.size}, {describe_mesh(plan.mesh)}")
        if plan.planned_exchange is not None:
            reporter.note(f"exchange: {plan.planned_exchange.line()}")
    if plan.offload.lines():
        reporter.note(f"memory: {'; '.join(plan.offload.lines())}")
    if plan.size_note is not None:
        reporter.note(plan.size_note)
    for line in filter(None, (reread_line(plan), plan.fitting.ignored)):
        reporter.note(f"memory: {line}")
    if not (plan.encodes_text or plan.decodes_only):
        reporter.note(f"prompts: {CACHED_TEXT_LINE}")


def require_weights(plan: ExecutionPlan, reporter: Reporter) -> None:
    """Raise CheckpointError if weights are missing, with a warning where they would not fit either."""
    if plan.picture is not None:
        require_weights(plan.picture, reporter)
    if not plan.fits and any(component in plan.weights.missing for component in plan.components):
        # Before 40 GB are downloaded that do not fit.
        try:
            require_fit(plan)
        except HardwareError as error:
            reporter.warn(f"with its weights this would not run here either: {error.message}")
    plan.weights.require(plan.components)
    if borrowed := plan.weights.borrowed():
        folder = plan.weights.path(Component.TRANSFORMER).parent
        reporter.note(f"weights: {', '.join(borrowed)} are the demo's own, since {folder} has none")


@contextmanager
def computing(plan: ExecutionPlan, reporter: Reporter) -> Iterator[None]:
    """Compute inside the block as a plan with threads says: with so many, in its precision, in no more memory."""
    assert plan.threads is not None
    device = plan.hardware.device
    if plan.attention is not None:
        reporter.note(f"attention: {plan.attention.line()}")
    start_peak_memory(device)
    with (
        threads_used(plan.threads, reporter),
        tf32_products(plan.settings.precision.tf32, device, note=reporter.note),
        limited_memory(device, plan.settings.memory.limit),
        torch.inference_mode(),
    ):
        yield


def make_videos(
    works: Sequence[Work],
    models: LoadedModels,
    record: RunRecord,
    *,
    finish: Callable[[SampleFrames], V],
    ranks: Ranks | None = None,
) -> list[tuple[V, ...]]:
    """Do every stage once for all works, inside `computing`; return what `finish` makes of the samples of each.

    Args:
        works: what is made together; one that has ended is left out from there on.
        models: that are lent to the stages.
        record: times and shows them.
        finish: see `decode_clips`.
        ranks: that share the work; None: there is only this one.

    Raises:
        CheckpointError: weights are broken or do not fit the settings.
        OutputError: latents or a result cannot be written.
        HardwareError: out of memory.
    """
    if works[0].plan.continuation is not None:
        extended: list[tuple[V, ...]] = [()] * len(works)
        for index, work in enumerate(works):
            with work.trying():
                extended[index] = _extended(work, models, record, finish=finish, ranks=ranks)
        return extended
    clips = denoised_clips(works, models, record, ranks=ranks)
    results: dict[int, list[V]] = {}
    if clips:
        with trying_all(clips):
            videos = decode_clips(clips, models, record, finish=finish, ranks=ranks)
            for clip, video in zip(clips, videos, strict=ranks is None or ranks.is_main):
                if video is not None:
                    results.setdefault(id(clip.work), []).append(video)
    return [tuple(results.get(id(work), ())) for work in works]


def denoised_clips(
    works: Sequence[Work], models: LoadedModels, record: RunRecord, *, ranks: Ranks | None
) -> list[Clip]:
    """Do the stages before decoding; return the clips that have latents. Arguments and errors as `make_videos`."""
    clips = [_clip(work, sample) for work in works for sample in work.files]
    if unfinished(clips):
        for work in dict.fromkeys(clip.work for clip in unfinished(clips)):
            with work.trying():
                work.embeds = work.embeds or text_embeds(work.plan, models, record)
        if works[0].plan.picture is not None and (missing := unfinished(clips)):
            # Each sample has its own. Right after its own text: the encoders of both are the same, and still loaded.
            _make_pictures(missing, models, record, ranks)
        if works[0].plan.draft is not None and (fresh := [clip for clip in unfinished(clips) if not clip.is_begun]):
            _make_drafts(fresh, models, record, ranks)
        _encode_references(unfinished(clips), models, record, ranks)
    if missing := unfinished(clips):
        with trying_all(missing):
            previews = _previews(missing[0].plan, models, record) if ranks is None or ranks.is_main else None
            denoise_clips(missing, models, record, previews=previews, ranks=ranks)
    return [clip for clip in clips if clip.denoised is not None and clip.work.error is None]


def _previews(plan: ExecutionPlan, models: LoadedModels, record: RunRecord) -> Previews | None:
    if not plan.settings.output.makes_previews:
        return None
    colours = preview_map(plan, models, record)
    return None if colours is None else Previews(plan, colours, record)


def _extended(
    work: Work,
    models: LoadedModels,
    record: RunRecord,
    *,
    finish: Callable[[SampleFrames], V],
    ranks: Ranks | None,
) -> tuple[V, ...]:
    """Make extended videos, one sample after the other, and each segment by segment; see `make_videos`."""
    plan = work.plan
    if any(sample.index not in work.saved or sample.saved_steps is not None for sample in work.files):
        work.embeds = work.embeds or text_embeds(plan, models, record)
    parts = plan.segments
    sharing = [ranks, _sharing(parts[-1], plan, ranks)]
    videos = []
    for sample in work.files:
        joined, given = Joined(plan, sample, record), work.references
        for number, part in enumerate(parts):
            record.reporter.note(f"segment {number + 1} of {len(parts)}, seed {sample.seed}")
            segment, latents = _of_segment(sample, number, work.saved.get(sample.index), steps=len(plan.timesteps) - 1)
            saved = {} if latents is None else {sample.index: latents}
            whole = Whole(plan, joined.latents)
            own = replace(
                work,
                plan=part,
                files=[segment],
                references=given,
                saved=saved,
                whole=whole,
                embeds=work.embeds[number : number + 1],
                stops_all=True,
            )
            [made] = make_videos([own], models, record, finish=Segment.of, ranks=sharing[min(number, 1)])
            for decoded in made:  # rank 0's
                joined.add(decoded, segment.noise_seed)
                given = references_to(parts[-1], joined.last_frames())
            if ranks is not None:
                models.release()  # rank 0 alone has decoded; see `_make_pictures`
        if ranks is None or ranks.is_main:
            videos.append(finish(joined))
    return tuple(videos)


def _of_segment(
    sample: SampleFiles, number: int, saved: DenoisedSample | None, *, steps: int
) -> tuple[SampleFiles, DenoisedSample | None]:
    """Return a segment of a sample, and those of the latents that it has saved which are the segment's.

    `steps` are those of one segment.
    """
    segment = replace(sample, segment=number, saved=None, saved_steps=None)
    there = () if saved is None else (*saved.before, saved.latents_CTHW)
    if number >= len(there):
        return segment, None
    done = steps if sample.saved_steps is None else sample.saved_steps - number * steps
    segment = replace(segment, saved=sample.saved, saved_steps=done if done < steps else None)
    past = saved.past if saved is not None and number == len(there) - 1 else ()
    return segment, DenoisedSample(there[number], denoise_s=0.0, past=past)


def _make_drafts(clips: Sequence[Clip], models: LoadedModels, record: RunRecord, ranks: Ranks | None) -> None:
    """Make the draft of each clip, in a run of their own; give it, resized and encoded, on rank 0 alone."""
    is_main = ranks is None or ranks.is_main
    works: dict[Work, Work] = {}
    for clip in clips:
        work, draft = clip.work, clip.plan.draft
        assert draft is not None
        with work.trying():
            if work not in works:
                given = references_of(draft, SilentReporter()) if is_main else []
                works[work] = Work(draft, (), given, embeds=work.embeds, stops_all=work.stops_all)
            works[work].files = [*works[work].files, replace(clip.sample, latents=None, saved=None)]

    def shown(frames: SampleFrames) -> tuple[Path, torch.Tensor]:
        return frames.sample.target, torch.cat([*frames.pieces()])

    plan = clips[0].plan
    assert plan.draft is not None
    made: dict[Path, torch.Tensor] = {}
    if works:
        sharing = _sharing(plan.draft, plan, ranks)
        with record.part(DRAFT) as own:
            for of_work in make_videos([*works.values()], models, own, finish=shown, ranks=sharing):
                made |= dict(of_work)
    for work, drafts in works.items():
        work.error = work.error or drafts.error
    if ranks is not None:
        models.release()  # rank 0 alone has decoded; see `_make_pictures`
    for clip in clips if is_main else ():
        if clip.work.error is None:
            with clip.work.trying():
                # One at a time: in full size, as floats, they take far more memory than as they are.
                frames_THWC = made.pop(clip.sample.target)
                pixels_CTHW = fit_frames(frames_THWC, height=plan.height, width=plan.width, fit=Fit.STRETCH)
                latents = reference_latents(plan, [Reference(pixels_CTHW, at_head=True)], models, record)
                assert latents is not None
                [clip.draft_CTHW] = latents


def _clip(work: Work, sample: SampleFiles) -> Clip:
    is_denoised = sample.index in work.saved and sample.saved_steps is None
    return Clip(work, sample, work.references, denoised=work.saved[sample.index] if is_denoised else None)


def _encode_references(clips: Sequence[Clip], models: LoadedModels, record: RunRecord, ranks: Ranks | None) -> None:
    """Give every clip the latents of its references, which rank 0 encodes: once for all clips that have the same."""
    encoded: dict[int, Sequence[torch.Tensor] | None] = {}
    for clip in clips:
        key = id(clip.references)
        with clip.work.trying():
            if key not in encoded:
                latents = reference_latents(clip.plan, clip.references, models, record)
                if ranks is not None and clip.plan.mode.needs_reference:
                    latents = agreed_tensors(latents, device=ranks.device)
                encoded[key] = latents
            clip.reference_latents = encoded[key]


def _make_pictures(clips: Sequence[Clip], models: LoadedModels, record: RunRecord, ranks: Ranks | None) -> None:
    """Make the picture of each clip, in a run of their own, and give it; on rank 0 alone.

    One that was kept of the same request is not made again.
    """
    plan = clips[0].plan
    assert plan.picture is not None
    keeps = plan.settings.picture.save and record.keeps_results
    own: dict[Work, list[Clip]] = {}
    for clip in clips:
        own.setdefault(clip.work, []).append(clip)
    files = [file for work, of_work in own.items() for file in picture_files(work.plan, [c.sample for c in of_work])]
    clips = [clip for of_work in own.values() for clip in of_work]
    # What is profiled is made in any case.
    there = [keeps and record.block_times is None and picture.made_before for picture in files]
    there = there if ranks is None else broadcast_json(there)
    works: dict[Work, Work] = {}
    given: dict[Path, Clip] = {}
    for clip, picture, is_there in zip(clips, files, there, strict=True):
        clip.references = []
        if not is_there:
            of_clip = works.setdefault(clip.work, _pictures_of(clip.work))
            of_clip.files = [*of_clip.files, picture]
            given[picture.target] = clip

    def given_to_video(decoding: SampleFrames) -> None:
        picture_1HWC = torch.cat([*decoding.pieces()])
        if keeps:
            write_video([picture_1HWC], decoding.plan, decoding.sample, decoding.figures)
        clip = given[decoding.sample.target]
        clip.references = references_to(clip.plan, picture_1HWC)

    if works:
        sharing = _sharing(plan.picture, plan, ranks)
        with record.part(PICTURE) as part:
            make_videos([*works.values()], models, part, finish=given_to_video, ranks=sharing)
    for work, pictures in works.items():
        work.error = pictures.error
    if ranks is not None:
        # Rank 0 alone has decoded, and so has other models than the rest, with whom it loads the next one.
        models.release()
    for clip, picture, is_there in zip(clips, files, there, strict=True):
        if is_there and (ranks is None or ranks.is_main):
            record.reporter.note(f"made before by the same request: {picture.media}")
            clip.references = references_to(clip.plan, read_picture(picture.media)[None])


def _pictures_of(work: Work) -> Work:
    assert work.plan.picture is not None
    return Work(work.plan.picture, (), embeds=work.picture_embeds, stops_all=work.stops_all)


def _sharing(picture: ExecutionPlan, plan: ExecutionPlan, ranks: Ranks | None) -> Ranks | None:
    """Return the ranks as they share the work of the picture."""
    if ranks is None or (picture.mesh, picture.exchange) == (plan.mesh, plan.exchange):
        return ranks
    return Ranks(picture.mesh, ranks.device, picture.exchange)
