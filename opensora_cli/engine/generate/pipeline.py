"""Run the jobs of a chain, one after the other: text, references, denoising and decoding of each."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import torch

from opensora_cli.core.choices import Fit
from opensora_cli.core.device import limited_memory, start_peak_memory, tf32_products
from opensora_cli.core.limits import threads_used
from opensora_cli.core.progress import Reporter, SilentReporter
from opensora_cli.engine.components.velocity import PromptEmbeds
from opensora_cli.engine.generate.chain import Chain, alone
from opensora_cli.engine.generate.decode import Clip, decode_samples, hold, write_video
from opensora_cli.engine.generate.denoise import denoise_samples, encode_shared_references
from opensora_cli.engine.generate.events import Events
from opensora_cli.engine.generate.models import LoadedModels
from opensora_cli.engine.generate.plan import DRAFT, PICTURE, Plan
from opensora_cli.engine.generate.references import Reference, reference_latents, references_of, references_to
from opensora_cli.engine.generate.sample import Sample, unfinished
from opensora_cli.engine.generate.sidecar import picture_files
from opensora_cli.engine.generate.text import text_embeds
from opensora_cli.media.resize import fit_frames

V = TypeVar("V")


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
    events: Events,
    *,
    finish: Callable[[Clip], V] | None,
) -> tuple[V, ...]:
    """Run every job of a chain for some samples, inside `computing`.

    Samples are made one after the other if all models stay loaded. Otherwise all are denoised before the first is
    decoded, so that each model is loaded once. Extended videos are made one by one.

    Returns the results of `finish`, a function of a decoded sample, such as `save`; None means to denoise without
    decoding. Of several ranks, rank 0 alone returns results.
    """
    embeds: tuple[PromptEmbeds, ...] = ()
    if missing := unfinished(samples):
        embeds = text_embeds(chain.video, models, events)
        _make_pictures(chain, missing, models, events)
        _make_drafts(chain, [sample for sample in missing if sample.begun is None], embeds, models, events)
    if finish is None:
        denoise_samples(samples, embeds, models, events)
        return ()
    videos: list[V] = []
    if len(chain.segments) > 1 or chain.settings.condition.continued is not None:
        for sample in samples:
            video = _make_segments(chain, sample, embeds, models, events)
            if models.ranks.is_main:
                videos.append(finish(video))
        return tuple(videos)
    encode_shared_references(missing, models, events)
    left = [*samples]
    while left:
        count = 1 if models.keep_all(chain.video) else len(left)
        denoise_samples(left[:count], embeds, models, events)
        videos += decode_samples(left[:count], models, events, finish=finish)
        del left[:count]
    return tuple(videos)


def _make_pictures(chain: Chain, samples: Sequence[Sample], models: LoadedModels, events: Events) -> None:
    """Make the picture of each sample, its reference, on rank 0, or read the one that an earlier run has saved."""
    plan = chain.find(PICTURE)
    if plan is None:
        return
    from opensora_cli.media.read import read_picture

    keeps = chain.settings.picture.save
    files = picture_files(chain, [sample.files for sample in samples])
    made_before = models.ranks.same([keeps and picture.made_before for picture in files])
    missing = [Sample(alone(plan), plan, each) for each, is_made in zip(files, made_before, strict=True) if not is_made]

    def finish(clip: Clip) -> torch.Tensor:
        picture_1HWC = torch.cat([*clip.pieces()])
        if keeps:
            write_video([picture_1HWC], clip.chain, clip.files, clip.figures)
        return picture_1HWC

    pictures: list[torch.Tensor] = []
    if missing:
        with events.of_job(PICTURE) as own:
            embeds = text_embeds(plan, models, own)
            denoise_samples(missing, embeds, models, own)
            pictures = [*decode_samples(missing, models, own, finish=finish)]
    if models.ranks.count > 1:
        # Rank 0 alone has decoded. All ranks must load the next model together.
        models.release()
    for sample, picture, is_made in zip(samples, files, made_before, strict=True):
        sample.references = []
        if not models.ranks.is_main:
            continue
        if is_made:
            events.reporter.note(f"made before by the same request: {picture.media}")
        picture_1HWC = read_picture(picture.media)[None] if is_made else pictures.pop(0)
        sample.references = references_to(sample.plan, picture_1HWC)


def _make_drafts(
    chain: Chain,
    samples: Sequence[Sample],
    embeds: Sequence[PromptEmbeds],
    models: LoadedModels,
    events: Events,
) -> None:
    """Make the draft of each sample, and encode it in the size of the video, on rank 0 alone."""
    plan, video = chain.find(DRAFT), chain.video
    if plan is None or not samples:
        return
    given = references_of(plan, SilentReporter()) if models.ranks.is_main else []
    drafts = [Sample(alone(plan), plan, replace(each.files, latents=None, saved=None), given) for each in samples]
    with events.of_job(DRAFT) as own:
        denoise_samples(drafts, embeds, models, own)
        made = [video.frames_THWC for video in decode_samples(drafts, models, own, finish=hold)]
    if models.ranks.count > 1:
        models.release()  # as in `_make_pictures`
    for sample in samples if models.ranks.is_main else ():
        # One draft at a time: full-size float frames take far more memory than the draft.
        pixels_CTHW = fit_frames(made.pop(0), height=video.height, width=video.width, fit=Fit.STRETCH)
        latents = reference_latents(video, [Reference(pixels_CTHW, at_head=True)], models, events)
        assert latents is not None
        [sample.draft_CTHW] = latents


def _make_segments(
    chain: Chain,
    sample: Sample,
    embeds: Sequence[PromptEmbeds],
    models: LoadedModels,
    events: Events,
) -> Clip:
    """Make an extended video, segment by segment. Each segment gets the last frames of the one before."""
    from opensora_cli.engine.generate.extend import ExtendedVideo, continued_clip

    plans, files = chain.segments, sample.files
    kept_THWC = continued_clip(plans[0]) if models.ranks.is_main else None
    video, given = ExtendedVideo(chain, files, events, kept_THWC), sample.references
    for number, plan in enumerate(plans):
        if len(plans) > 1:
            events.reporter.note(f"segment {number + 1} of {len(plans)}, seed {files.seed}")
        saved = sample.saved[number : number + 1]
        of_segment = replace(
            files,
            segment=number,
            saved=files.saved if saved else None,
            saved_steps=saved[0].steps if saved else None,
        )
        segment = Sample(chain, plan, of_segment, given, saved, video.latents)
        denoise_samples([segment], embeds[number : number + 1], models, events)
        for held in decode_samples([segment], models, events, finish=hold):
            video.add(held, seed=of_segment.noise_seed)
            given = references_to(plans[-1], video.last_frames(chain.settings.overlap))
        if models.ranks.count > 1:
            models.release()  # as in `_make_pictures`
    return video
