"""From a plan to finished videos: every stage once, each freeing the models that the next has no room for."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import torch

from opensora_cli.core.exceptions import HardwareError
from opensora_cli.core.progress import Reporter, SilentReporter
from opensora_cli.core.rank_messages import broadcast_json
from opensora_cli.core.threads import threads_used
from opensora_cli.engine.components.hardware import limited_memory, start_peak_memory, tf32_products
from opensora_cli.engine.components.parallelize import describe_mesh
from opensora_cli.engine.components.velocity import PromptEmbeds
from opensora_cli.engine.components.weights import Component
from opensora_cli.engine.estimate.offload import TEXT
from opensora_cli.engine.generate.decode import SampleFrames, decode_samples, write_video
from opensora_cli.engine.generate.denoise import DenoisedSample, Whole, denoise_samples
from opensora_cli.engine.generate.documents import reread_line
from opensora_cli.engine.generate.loaded import LoadedModels, retried
from opensora_cli.engine.generate.outputs import picture_files
from opensora_cli.engine.generate.plan import DRAFT, PICTURE, ExecutionPlan
from opensora_cli.engine.generate.preview_map import preview_map
from opensora_cli.engine.generate.previews import Previews
from opensora_cli.engine.generate.ranks import Ranks
from opensora_cli.engine.generate.references import Reference, reference_latents, references_of, references_to
from opensora_cli.engine.generate.segments import Clip, Joined
from opensora_cli.engine.generate.stages import RunRecord
from opensora_cli.engine.generate.targets import SampleFiles
from opensora_cli.engine.generate.text import encode_text, with_prompt
from opensora_cli.media.read import read_picture
from opensora_cli.media.resize import fit_frames
from opensora_cli.settings.enums import Fit

V = TypeVar("V")


def require_room(plan: ExecutionPlan, reporter: Reporter) -> None:
    """Raise HardwareError if there is not enough memory, and note how the plan makes do with what there is."""
    plan.require_fit()
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


def require_weights(plan: ExecutionPlan, reporter: Reporter) -> None:
    """Raise CheckpointError if weights are missing, with a warning where they would not fit either."""
    if plan.picture is not None:
        require_weights(plan.picture, reporter)
    if not plan.fits and any(component in plan.weights.missing for component in plan.components):
        # Before 40 GB are downloaded that do not fit.
        try:
            plan.require_fit()
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


def text_embeds(plan: ExecutionPlan, models: LoadedModels, record: RunRecord) -> tuple[PromptEmbeds, ...]:
    """Encode the prompt of each segment, inside `computing`, equal ones once; errors are those of `make_videos`."""
    prompts = plan.settings.segment_prompts

    def encoded(prompt: str) -> PromptEmbeds:
        of_prompt = replace(plan, settings=with_prompt(plan.settings, prompt))
        return retried(lambda plan: encode_text(plan, models, record), of_prompt, TEXT, models, record)[0]

    embeds = {prompt: encoded(prompt) for prompt in dict.fromkeys(prompts)}
    return tuple(embeds[prompt] for prompt in prompts)


def make_videos(
    plan: ExecutionPlan,
    files: Sequence[SampleFiles],
    references: Sequence[Reference],
    models: LoadedModels,
    record: RunRecord,
    *,
    finish: Callable[[SampleFrames], V],
    saved: Mapping[int, DenoisedSample] | None = None,
    embeds: Sequence[PromptEmbeds] = (),
    ranks: Ranks | None = None,
    whole: Whole | None = None,
) -> tuple[V, ...]:
    """Do every stage once, inside `computing`; return what `finish` makes of each sample, in the order of `files`.

    Args:
        plan: of the run.
        files: the samples.
        references: what is given of files.
        models: that are lent to the stages.
        record: times and shows them.
        finish: see `decode_samples`.
        saved: by index, the latents of samples whose `saved` is there: all steps or some are done already.
        embeds: of the prompt of each segment; none: they are encoded here.
        ranks: that share the work; None: there is only this one.
        whole: the video of which this is a segment; None: it is all of it.

    Raises:
        CheckpointError: weights are broken or do not fit the settings.
        OutputError: latents or a result cannot be written.
        HardwareError: out of memory.
    """
    if plan.continuation is not None:
        return _extended(
            plan, files, references, models, record, finish=finish, saved=saved or {}, embeds=embeds, ranks=ranks
        )
    denoised, given = denoised_samples(
        plan, files, references, models, record, saved=saved or {}, embeds=embeds, ranks=ranks, whole=whole
    )
    videos: list[V] = []
    for samples, references in given:
        latents = [denoised[sample.index] for sample in samples]
        videos += decode_samples(plan, samples, latents, references, models, record, finish=finish, ranks=ranks)
    return tuple(videos)


def denoised_samples(
    plan: ExecutionPlan,
    files: Sequence[SampleFiles],
    references: Sequence[Reference],
    models: LoadedModels,
    record: RunRecord,
    *,
    saved: Mapping[int, DenoisedSample],
    embeds: Sequence[PromptEmbeds],
    ranks: Ranks | None,
    whole: Whole | None = None,
) -> tuple[dict[int, DenoisedSample], list[tuple[Sequence[SampleFiles], Sequence[Reference]]]]:
    """Do the stages before decoding; return the samples by index, and which of them are given what.

    Arguments and errors are those of `make_videos`.
    """
    denoised = dict(saved)
    begun = {
        sample.index: denoised.pop(sample.index).latents_CTHW for sample in files if sample.saved_steps is not None
    }
    missing = [sample for sample in files if sample.index not in denoised]
    given: list[tuple[Sequence[SampleFiles], Sequence[Reference]]] = [(files, references)]
    if missing:
        embeds = embeds or text_embeds(plan, models, record)
        if plan.picture is not None:
            # Each sample has its own. Right after its own text: the encoders of both are the same, and still loaded.
            pictures = _pictures(plan, missing, models, record, ranks)
            given = [([sample], pictures.get(sample.index, ())) for sample in files]
        fresh = [sample for sample in missing if sample.index not in begun]
        drafts = {} if plan.draft is None else _drafts(plan, fresh, models, record, embeds=embeds, ranks=ranks)
        encoded = [reference_latents(plan, references, models, record) for _, references in given]
        previews = _previews(plan, models, record) if ranks is None or ranks.is_main else None
        for (samples, _), reference in zip(given, encoded, strict=True):
            rest = [sample for sample in samples if sample.index not in denoised]
            if not rest:
                continue
            made = denoise_samples(
                plan,
                rest,
                embeds[0],
                reference,
                models,
                record,
                begun=begun,
                drafts=drafts,
                previews=previews,
                ranks=ranks,
                whole=whole,
            )
            denoised |= {sample.index: latents for sample, latents in zip(rest, made, strict=True)}
    return denoised, given


def _previews(plan: ExecutionPlan, models: LoadedModels, record: RunRecord) -> Previews | None:
    if not plan.settings.output.makes_previews:
        return None
    colours = preview_map(plan, models, record)
    return None if colours is None else Previews(plan, colours, record)


def _extended(
    plan: ExecutionPlan,
    files: Sequence[SampleFiles],
    references: Sequence[Reference],
    models: LoadedModels,
    record: RunRecord,
    *,
    finish: Callable[[SampleFrames], V],
    saved: Mapping[int, DenoisedSample],
    embeds: Sequence[PromptEmbeds],
    ranks: Ranks | None,
) -> tuple[V, ...]:
    """Make extended videos, one sample after the other, and each segment by segment; see `make_videos`."""
    if any(sample.index not in saved or sample.saved_steps is not None for sample in files):
        embeds = embeds or text_embeds(plan, models, record)
    parts = plan.segments
    sharing = [ranks, _sharing(parts[-1], plan, ranks)]
    videos = []
    for sample in files:
        joined, given = Joined(plan, sample, record), references
        for number, part in enumerate(parts):
            record.reporter.note(f"segment {number + 1} of {len(parts)}, seed {sample.seed}")
            segment, latents = _of_segment(sample, number, saved.get(sample.index), steps=len(plan.timesteps) - 1)
            clips = make_videos(
                part,
                [segment],
                given,
                models,
                record,
                finish=Clip.of,
                saved={} if latents is None else {sample.index: latents},
                embeds=embeds[number : number + 1],
                ranks=sharing[min(number, 1)],
                whole=Whole(plan, joined.latents),
            )
            for clip in clips:  # rank 0's
                joined.add(clip, segment.noise_seed)
                given = references_to(parts[-1], joined.last_frames())
            if ranks is not None:
                models.release()  # rank 0 alone has decoded; see `_pictures`
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
    return segment, DenoisedSample(there[number], denoise_s=0.0)


def _drafts(
    plan: ExecutionPlan,
    files: Sequence[SampleFiles],
    models: LoadedModels,
    record: RunRecord,
    *,
    embeds: Sequence[PromptEmbeds],
    ranks: Ranks | None,
) -> dict[int, torch.Tensor]:
    """Make the draft of each sample, in a run of its own; return it resized and encoded, by index, on rank 0 alone."""
    assert plan.draft is not None
    if not files:
        return {}
    given = references_of(plan.draft, SilentReporter()) if ranks is None or ranks.is_main else []
    drafts = [replace(sample, latents=None, saved=None) for sample in files]

    def shown(frames: SampleFrames) -> tuple[int, torch.Tensor]:
        return frames.sample.index, torch.cat([*frames.pieces()])

    with record.part(DRAFT) as own:
        sharing = _sharing(plan.draft, plan, ranks)
        made = make_videos(plan.draft, drafts, given, models, own, finish=shown, embeds=embeds, ranks=sharing)
    if ranks is not None:
        models.release()  # rank 0 alone has decoded; see `_pictures`
    encoded = {}
    for index, frames_THWC in made:
        # One at a time: in full size, as floats, they take far more memory than as they are.
        pixels_CTHW = fit_frames(frames_THWC, height=plan.height, width=plan.width, fit=Fit.STRETCH)
        latents = reference_latents(plan, [Reference(pixels_CTHW, at_head=True)], models, record)
        assert latents is not None
        [encoded[index]] = latents
    return encoded


def _pictures(
    plan: ExecutionPlan,
    files: Sequence[SampleFiles],
    models: LoadedModels,
    record: RunRecord,
    ranks: Ranks | None,
) -> dict[int, list[Reference]]:
    """Make the picture of each sample, in a run of its own, and return what it gives, by index; on rank 0 alone.

    One that was kept of the same request is not made again.
    """
    assert plan.picture is not None
    keeps = plan.settings.picture.save and record.keeps_results
    pictures = [picture_files(plan, sample) for sample in files]
    # What is profiled is made in any case.
    there = [keeps and record.block_times is None and picture.made_before for picture in pictures]
    there = there if ranks is None else broadcast_json(there)
    missing = [picture for picture, is_there in zip(pictures, there, strict=True) if not is_there]
    sharing = _sharing(plan.picture, plan, ranks)

    def given_to_video(decoding: SampleFrames) -> tuple[int, list[Reference]]:
        picture_1HWC = torch.cat([*decoding.pieces()])
        if keeps:
            write_video([picture_1HWC], decoding.plan, decoding.sample, decoding.figures)
        return decoding.sample.index, references_to(plan, picture_1HWC)

    with record.part(PICTURE) as own:
        given = dict(make_videos(plan.picture, missing, (), models, own, finish=given_to_video, ranks=sharing))
    if ranks is not None:
        # Rank 0 alone has decoded, and so has other models than the rest, with whom it loads the next one.
        models.release()
    for picture, is_there in zip(pictures, there, strict=True):
        if is_there and (ranks is None or ranks.is_main):
            record.reporter.note(f"made before by the same request: {picture.media}")
            given[picture.index] = references_to(plan, read_picture(picture.media)[None])
    return given


def _sharing(picture: ExecutionPlan, plan: ExecutionPlan, ranks: Ranks | None) -> Ranks | None:
    """Return the ranks as they share the work of the picture."""
    if ranks is None or (picture.mesh, picture.exchange) == (plan.mesh, plan.exchange):
        return ranks
    return Ranks(picture.mesh, ranks.device, picture.exchange)
