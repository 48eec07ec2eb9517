"""From a plan to finished videos: every stage once, each freeing the models that the next has no room for."""

from collections.abc import Callable, Iterator, Sequence
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
from opensora_cli.engine.generate.decode import SampleFrames, decode_samples, write_video
from opensora_cli.engine.generate.denoise import denoise_samples
from opensora_cli.engine.generate.documents import CACHED_TEXT_LINE
from opensora_cli.engine.generate.encoded_text import text_embeds
from opensora_cli.engine.generate.execution_plan import DRAFT, PICTURE, ExecutionPlan
from opensora_cli.engine.generate.loaded import LoadedModels
from opensora_cli.engine.generate.outputs import picture_files
from opensora_cli.engine.generate.preview_map import preview_map
from opensora_cli.engine.generate.previews import Previews
from opensora_cli.engine.generate.ranks import Ranks, broadcast_tensors
from opensora_cli.engine.generate.references import Reference, reference_latents, references_of, references_to
from opensora_cli.engine.generate.room import require_fit
from opensora_cli.engine.generate.segments import Joined, Segment
from opensora_cli.engine.generate.stages import RunRecord
from opensora_cli.engine.generate.targets import SampleFiles
from opensora_cli.engine.generate.work import DenoisedSample, Sample, Whole, unfinished
from opensora_cli.media.read import read_picture
from opensora_cli.media.resize import fit_frames
from opensora_cli.settings.enums import Fit

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
    if plan.fitting.ignored is not None:
        reporter.note(f"memory: {plan.fitting.ignored}")
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
    plan: ExecutionPlan,
    samples: Sequence[Sample],
    models: LoadedModels,
    record: RunRecord,
    *,
    finish: Callable[[SampleFrames], V],
    embeds: tuple[PromptEmbeds, ...] = (),
    ranks: Ranks | None = None,
) -> tuple[V, ...]:
    """Run every stage of a plan for its samples, inside `computing`; return the result of `finish` for each.

    All samples are denoised before the first is decoded, except extended videos, which are made one by one.

    Args:
        plan: the plan of all samples.
        samples: samples with their references and saved latents.
        models: loaded models.
        record: times and shows the stages.
        finish: see `decode_samples`.
        embeds: embeddings of the prompt of each segment; empty if they are still to be computed.
        ranks: processes that share the work; None for a single process.

    Raises:
        CheckpointError: weights are broken or do not fit the settings.
        OutputError: latents or a result cannot be written.
        HardwareError: out of memory.
    """
    if plan.continuation is not None:
        return _extended(plan, samples, models, record, finish=finish, ranks=ranks)
    denoised(plan, samples, models, record, embeds=embeds, ranks=ranks)
    return decode_samples(samples, models, record, finish=finish, ranks=ranks)


def denoised(
    plan: ExecutionPlan,
    samples: Sequence[Sample],
    models: LoadedModels,
    record: RunRecord,
    *,
    embeds: tuple[PromptEmbeds, ...] = (),
    ranks: Ranks | None,
) -> None:
    """Run the stages before decoding. Arguments and errors are those of `make_videos`."""
    missing = unfinished(samples)
    if not missing:
        return
    embeds = embeds or text_embeds(plan, models, record)
    if plan.picture is not None:
        # Right after the text of the video: both use the same encoders, which are still loaded.
        _make_pictures(plan, missing, models, record, ranks)
    if plan.draft is not None and (fresh := [sample for sample in missing if not sample.is_begun]):
        _make_drafts(plan, fresh, embeds, models, record, ranks)
    _encode_references(plan, missing, models, record, ranks)
    previews = _previews(plan, models, record) if ranks is None or ranks.is_main else None
    denoise_samples(missing, embeds[0], models, record, previews=previews, ranks=ranks)


def _previews(plan: ExecutionPlan, models: LoadedModels, record: RunRecord) -> Previews | None:
    if not plan.settings.output.makes_previews:
        return None
    colors = preview_map(plan, models, record)
    return None if colors is None else Previews(plan, colors, record)


def _extended(
    plan: ExecutionPlan,
    samples: Sequence[Sample],
    models: LoadedModels,
    record: RunRecord,
    *,
    finish: Callable[[SampleFrames], V],
    ranks: Ranks | None,
) -> tuple[V, ...]:
    """Make extended videos, one sample after the other and segment by segment; see `make_videos`."""
    embeds: tuple[PromptEmbeds, ...] = ()
    if unfinished(samples):
        embeds = text_embeds(plan, models, record)
    parts = plan.segments
    sharing = [ranks, _sharing(parts[-1], plan, ranks)]
    videos = []
    for sample in samples:
        joined, given = Joined(plan, sample.files, record), sample.references
        for number, part in enumerate(parts):
            record.reporter.note(f"segment {number + 1} of {len(parts)}, seed {sample.files.seed}")
            files, saved = _of_segment(sample.files, number, sample.saved, steps=len(plan.timesteps) - 1)
            segment = Sample(part, files, given, saved, whole=Whole(plan, joined.latents))
            made = make_videos(
                part,
                [segment],
                models,
                record,
                finish=Segment.of,
                embeds=embeds[number : number + 1],
                ranks=sharing[min(number, 1)],
            )
            for decoded in made:  # on rank 0
                joined.add(decoded, files.noise_seed)
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


def _make_drafts(
    plan: ExecutionPlan,
    samples: Sequence[Sample],
    embeds: tuple[PromptEmbeds, ...],
    models: LoadedModels,
    record: RunRecord,
    ranks: Ranks | None,
) -> None:
    """Make the draft of each sample, and encode it in the size of the video, on rank 0 alone."""
    assert plan.draft is not None
    is_main = ranks is None or ranks.is_main
    given = references_of(plan.draft, SilentReporter()) if is_main else []
    drafts = [Sample(plan.draft, replace(each.files, latents=None, saved=None), given) for each in samples]
    with record.part(DRAFT) as own:
        sharing = _sharing(plan.draft, plan, ranks)
        made = [*make_videos(plan.draft, drafts, models, own, finish=_frames, embeds=embeds, ranks=sharing)]
    if ranks is not None:
        models.release()  # rank 0 alone has decoded; see `_make_pictures`
    for sample in samples if is_main else ():
        # One at a time: full-size float frames take far more memory than the draft.
        frames_THWC = made.pop(0)
        pixels_CTHW = fit_frames(frames_THWC, height=plan.height, width=plan.width, fit=Fit.STRETCH)
        latents = reference_latents(plan, [Reference(pixels_CTHW, at_head=True)], models, record)
        assert latents is not None
        [sample.draft_CTHW] = latents


def _frames(decoding: SampleFrames) -> torch.Tensor:
    return torch.cat([*decoding.pieces()])


def _encode_references(
    plan: ExecutionPlan, samples: Sequence[Sample], models: LoadedModels, record: RunRecord, ranks: Ranks | None
) -> None:
    """Encode the references of every sample on rank 0: once for samples with the same references."""
    encoded: dict[int, Sequence[torch.Tensor] | None] = {}
    for sample in samples:
        key = id(sample.references)
        if key not in encoded:
            latents = reference_latents(plan, sample.references, models, record)
            if ranks is not None and plan.mode.needs_reference:
                latents = broadcast_tensors(latents, device=ranks.device)
            encoded[key] = latents
        sample.reference_latents = encoded[key]


def _make_pictures(
    plan: ExecutionPlan, samples: Sequence[Sample], models: LoadedModels, record: RunRecord, ranks: Ranks | None
) -> None:
    """Make the picture of each sample, which becomes its reference, on rank 0 alone.

    A picture that was kept of the same request is not made again.
    """
    assert plan.picture is not None
    keeps = plan.settings.picture.save and record.keeps_results
    files = picture_files(plan, [sample.files for sample in samples])
    made_before = [keeps and picture.made_before for picture in files]
    made_before = made_before if ranks is None else broadcast_json(made_before)
    missing = [Sample(plan.picture, each) for each, is_made in zip(files, made_before, strict=True) if not is_made]

    def finish(decoding: SampleFrames) -> torch.Tensor:
        picture_1HWC = _frames(decoding)
        if keeps:
            write_video([picture_1HWC], decoding.plan, decoding.sample, decoding.figures)
        return picture_1HWC

    pictures: list[torch.Tensor] = []
    if missing:
        sharing = _sharing(plan.picture, plan, ranks)
        with record.part(PICTURE) as part:
            pictures = [*make_videos(plan.picture, missing, models, part, finish=finish, ranks=sharing)]
    if ranks is not None:
        # Rank 0 alone has decoded, and so has other models than the rest, with whom it loads the next one.
        models.release()
    for sample, picture, is_made in zip(samples, files, made_before, strict=True):
        sample.references = []
        if ranks is not None and not ranks.is_main:
            continue
        if is_made:
            record.reporter.note(f"made before by the same request: {picture.media}")
        picture_1HWC = read_picture(picture.media)[None] if is_made else pictures.pop(0)
        sample.references = references_to(plan, picture_1HWC)


def _sharing(part: ExecutionPlan, plan: ExecutionPlan, ranks: Ranks | None) -> Ranks | None:
    """Return the ranks as they share the work of a part."""
    if ranks is None or (part.mesh, part.exchange) == (plan.mesh, plan.exchange):
        return ranks
    return Ranks(part.mesh, ranks.device, part.exchange)
