"""The jobs of a request, one after the other: text, references, denoising and decoding of each."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import torch

from opensora_cli.core.media_choices import Fit
from opensora_cli.core.progress import Reporter, SilentReporter
from opensora_cli.core.rank_messages import broadcast_json
from opensora_cli.core.threads import threads_used
from opensora_cli.engine.components.hardware import limited_memory, start_peak_memory, tf32_products
from opensora_cli.engine.components.velocity import PromptEmbeds
from opensora_cli.engine.generate.decode import SampleFrames, decode_samples, write_video
from opensora_cli.engine.generate.denoise import denoise_samples
from opensora_cli.engine.generate.events import RunRecord
from opensora_cli.engine.generate.extend import Joined, Segment
from opensora_cli.engine.generate.models import LoadedModels
from opensora_cli.engine.generate.outputs import picture_files
from opensora_cli.engine.generate.plan import DRAFT, PICTURE, Chain, Plan, alone
from opensora_cli.engine.generate.previews import Previews, preview_map
from opensora_cli.engine.generate.ranks import Ranks, broadcast_tensors
from opensora_cli.engine.generate.references import Reference, reference_latents, references_of, references_to
from opensora_cli.engine.generate.sample import DenoisedSample, Sample, unfinished
from opensora_cli.engine.generate.targets import SampleFiles
from opensora_cli.engine.generate.text import text_embeds
from opensora_cli.media.read import read_picture
from opensora_cli.media.resize import fit_frames

V = TypeVar("V")
Embeds = tuple[PromptEmbeds, ...]


@contextmanager
def computing(plan: Plan, reporter: Reporter) -> Iterator[None]:
    """Apply the threads, the precision and the memory limit of a plan inside the block."""
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


def make(
    chain: Chain,
    samples: Sequence[Sample],
    models: LoadedModels,
    events: RunRecord,
    *,
    finish: Callable[[SampleFrames], V],
    ranks: Ranks | None = None,
) -> tuple[V, ...]:
    """Run every job of a chain for some samples, inside `computing`; return the result of `finish` for each sample.

    All samples of a job are denoised before the first is decoded, so that models are loaded once. Extended videos are
    made one by one.

    Args:
        chain: jobs of the request.
        samples: samples of the video, with their references and saved latents.
        models: loaded models.
        events: shows and times the stages, and tells when to stop.
        finish: function of a decoded sample, such as `save` or `hold`.
        ranks: processes that share the work; None for a single process.

    Raises:
        CheckpointError: weights are broken or do not fit the settings.
        OutputError: latents or a result cannot be written.
        HardwareError: out of memory.
    """
    embeds = _before_video(chain, samples, models, events, ranks)
    if len(chain.segments) == 1:
        return _run_job(samples, embeds, models, events, finish=finish, ranks=ranks)
    videos = []
    for sample in samples:
        joined = _extend(chain, sample, embeds, models, events, ranks)
        if ranks is None or ranks.is_main:
            videos.append(finish(joined))
    return tuple(videos)


def denoise_only(
    chain: Chain, samples: Sequence[Sample], models: LoadedModels, events: RunRecord, *, ranks: Ranks | None
) -> None:
    """Run a chain without decoding its video. Arguments and errors are those of `make`."""
    embeds = _before_video(chain, samples, models, events, ranks)
    _denoise(samples, embeds, models, events, ranks)


def _before_video(
    chain: Chain, samples: Sequence[Sample], models: LoadedModels, events: RunRecord, ranks: Ranks | None
) -> Embeds:
    """Make the pictures and drafts of unfinished samples; return the embeddings of the prompt of each segment."""
    missing = unfinished(samples)
    if not missing:
        return ()
    embeds = text_embeds(chain.video, models, events)
    _make_pictures(chain, missing, models, events, ranks)
    _make_drafts(chain, [sample for sample in missing if not sample.is_begun], embeds, models, events, ranks)
    return embeds


def _run_job(
    samples: Sequence[Sample],
    embeds: Embeds,
    models: LoadedModels,
    events: RunRecord,
    *,
    finish: Callable[[SampleFrames], V],
    ranks: Ranks | None,
) -> tuple[V, ...]:
    """Denoise and decode all samples of one job."""
    _denoise(samples, embeds, models, events, ranks)
    return decode_samples(samples, models, events, finish=finish, ranks=ranks)


def _denoise(
    samples: Sequence[Sample], embeds: Embeds, models: LoadedModels, events: RunRecord, ranks: Ranks | None
) -> None:
    missing = unfinished(samples)
    if not missing:
        return
    plan = missing[0].plan
    encoded: dict[int, Sequence[torch.Tensor] | None] = {}
    for sample in missing:
        if (key := id(sample.references)) not in encoded:  # samples may share their references
            latents = reference_latents(plan, sample.references, models, events)
            if ranks is not None and plan.mode.needs_reference:
                latents = broadcast_tensors(latents, device=ranks.device)
            encoded[key] = latents
        sample.reference_latents = encoded[key]
    previews = None
    if plan.settings.output.makes_previews and (ranks is None or ranks.is_main):
        colors = preview_map(plan, models, events)
        previews = None if colors is None else Previews(plan, colors, events)
    denoise_samples(missing, embeds[0], models, events, previews=previews, ranks=ranks)


def _make_pictures(
    chain: Chain, samples: Sequence[Sample], models: LoadedModels, events: RunRecord, ranks: Ranks | None
) -> None:
    """Make the picture of each sample, which becomes its reference, on rank 0 alone.

    A picture that was kept of the same request is not made again.
    """
    plan = chain.find(PICTURE)
    if plan is None:
        return
    keeps = chain.settings.picture.save and events.keeps_results
    files = picture_files(chain, [sample.files for sample in samples])
    made_before = [keeps and picture.made_before for picture in files]
    made_before = made_before if ranks is None else broadcast_json(made_before)
    missing = [Sample(alone(plan), plan, each) for each, is_made in zip(files, made_before, strict=True) if not is_made]

    def finish(decoding: SampleFrames) -> torch.Tensor:
        picture_1HWC = _frames(decoding)
        if keeps:
            write_video([picture_1HWC], decoding.chain, decoding.sample, decoding.figures)
        return picture_1HWC

    pictures: list[torch.Tensor] = []
    if missing:
        with events.part(PICTURE) as own:
            embeds = text_embeds(plan, models, own)
            sharing = _sharing(plan, chain.video, ranks)
            pictures = [*_run_job(missing, embeds, models, own, finish=finish, ranks=sharing)]
    if ranks is not None:
        # Rank 0 alone has decoded, and so has other models than the rest, with whom it loads the next one.
        models.release()
    for sample, picture, is_made in zip(samples, files, made_before, strict=True):
        sample.references = []
        if ranks is not None and not ranks.is_main:
            continue
        if is_made:
            events.reporter.note(f"made before by the same request: {picture.media}")
        picture_1HWC = read_picture(picture.media)[None] if is_made else pictures.pop(0)
        sample.references = references_to(sample.plan, picture_1HWC)


def _make_drafts(
    chain: Chain,
    samples: Sequence[Sample],
    embeds: Embeds,
    models: LoadedModels,
    events: RunRecord,
    ranks: Ranks | None,
) -> None:
    """Make the draft of each sample, and encode it in the size of the video, on rank 0 alone."""
    plan, video = chain.find(DRAFT), chain.video
    if plan is None or not samples:
        return
    is_main = ranks is None or ranks.is_main
    given = references_of(plan, SilentReporter()) if is_main else []
    drafts = [Sample(alone(plan), plan, replace(each.files, latents=None, saved=None), given) for each in samples]
    with events.part(DRAFT) as own:
        made = [*_run_job(drafts, embeds, models, own, finish=_frames, ranks=_sharing(plan, video, ranks))]
    if ranks is not None:
        models.release()  # rank 0 alone has decoded; see `_make_pictures`
    for sample in samples if is_main else ():
        # One at a time: full-size float frames take far more memory than the draft.
        frames_THWC = made.pop(0)
        pixels_CTHW = fit_frames(frames_THWC, height=video.height, width=video.width, fit=Fit.STRETCH)
        latents = reference_latents(video, [Reference(pixels_CTHW, at_head=True)], models, events)
        assert latents is not None
        [sample.draft_CTHW] = latents


def _extend(
    chain: Chain,
    sample: Sample,
    embeds: Embeds,
    models: LoadedModels,
    events: RunRecord,
    ranks: Ranks | None,
) -> Joined:
    """Make an extended video, segment by segment; each is given the last frames of the one before."""
    plans = chain.segments
    joined, given, sharing = Joined(chain, sample.files, events), sample.references, ranks
    for number, plan in enumerate(plans):
        events.reporter.note(f"segment {number + 1} of {len(plans)}, seed {sample.files.seed}")
        files, saved = _of_segment(sample.files, number, sample.saved, steps=plan.num_steps)
        segment = Sample(chain, plan, files, given, saved, before=joined.latents)
        if number == 1:
            sharing = _sharing(plan, plans[0], ranks)
        own = embeds[number : number + 1]
        for decoded in _run_job([segment], own, models, events, finish=Segment.of, ranks=sharing):  # on rank 0
            joined.add(decoded, files.noise_seed)
            given = references_to(plans[-1], joined.last_frames())
        if ranks is not None:
            models.release()  # rank 0 alone has decoded; see `_make_pictures`
    return joined


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


def _frames(decoding: SampleFrames) -> torch.Tensor:
    return torch.cat([*decoding.pieces()])


def _sharing(plan: Plan, video: Plan, ranks: Ranks | None) -> Ranks | None:
    """Return the ranks as they share the work of another job."""
    if ranks is None or (plan.mesh, plan.exchange) == (video.mesh, video.exchange):
        return ranks
    return Ranks(plan.mesh, ranks.device, plan.exchange)
