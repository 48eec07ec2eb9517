"""Run the jobs of a chain, one after the other: text, references, denoising and decoding of each."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import torch

from opensora_cli.core.choices import Fit
from opensora_cli.core.device import limited_memory, peak_memory_gib, start_peak_memory
from opensora_cli.core.limits import threads_used
from opensora_cli.core.progress import Reporter, SilentReporter
from opensora_cli.engine.components.velocity import PromptEmbeds
from opensora_cli.engine.estimate.offload import DECODE, DENOISE
from opensora_cli.engine.generate.chain import Chain, alone
from opensora_cli.engine.generate.decode import Clip, Figures, decode_samples, hold, write_video
from opensora_cli.engine.generate.denoise import denoise_samples, encode_shared_references
from opensora_cli.engine.generate.events import Events
from opensora_cli.engine.generate.models import LoadedModels
from opensora_cli.engine.generate.plan import DRAFT, PICTURE, Plan
from opensora_cli.engine.generate.references import Reference, reference_latents, references_of, references_to
from opensora_cli.engine.generate.sample import Sample, unfinished
from opensora_cli.engine.generate.sidecar import picture_files
from opensora_cli.engine.generate.text import text_embeds
from opensora_cli.media.read import read_video
from opensora_cli.media.resize import fit_frames, to_uint8

V = TypeVar("V")

_LUMA = torch.tensor([0.299, 0.587, 0.114]).double()


@contextmanager
def computing(plan: Plan, reporter: Reporter) -> Iterator[None]:
    """Apply the threads and the memory limit of a plan inside the block."""
    assert plan.threads is not None
    device = plan.hardware.device
    if plan.attention is not None:
        reporter.note(f"attention: {plan.attention.line()}")
    start_peak_memory(device)
    with (
        threads_used(plan.threads, reporter),
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
    """Make the picture of each sample, its reference, on rank 0."""
    plan = chain.find(PICTURE)
    if plan is None:
        return
    files = picture_files(chain, [sample.files for sample in samples])

    def finish(clip: Clip) -> torch.Tensor:
        picture = hold(clip)
        # An earlier run of the request may have saved the same picture.
        if chain.settings.picture.save and not clip.files.made_before:
            write_video(picture)
        return picture.frames_THWC

    with events.of_job(PICTURE) as own:
        embeds = text_embeds(plan, models, own)
        pictures = [Sample(alone(plan), plan, each) for each in files]
        denoise_samples(pictures, embeds, models, own)
        made = [*decode_samples(pictures, models, own, finish=finish)]
    if models.ranks.count > 1:
        # Rank 0 alone has decoded. All ranks must load the next model together.
        models.release()
    for sample in samples:
        sample.references = references_to(sample.plan, made.pop(0)) if models.ranks.is_main else []


def _make_drafts(
    chain: Chain, samples: Sequence[Sample], embeds: Sequence[PromptEmbeds], models: LoadedModels, events: Events
) -> None:
    """Make the draft of each sample, and encode it in the size of the video, on rank 0."""
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
    for sample in samples:
        latents = None
        if models.ranks.is_main:
            # One draft at a time: full-size float frames take far more memory than the draft.
            pixels_CTHW = fit_frames(made.pop(0), height=video.height, width=video.width, fit=Fit.STRETCH)
            latents = reference_latents(video, [Reference(pixels_CTHW, at_head=True)], models, events)
        [sample.draft_CTHW] = models.ranks.same_tensors(latents)


def _make_segments(
    chain: Chain, sample: Sample, embeds: Sequence[PromptEmbeds], models: LoadedModels, events: Events
) -> Clip:
    """Make a video that is longer than one clip of its model, segment by segment.

    Each segment after the first is given the last frames of the one before, encoded again: the first latent frame of a
    causal autoencoder holds one frame, the last ones hold four each. Latents themselves came back worse, on the demo
    at 23.9 dB PSNR instead of 25.8.
    """
    plans, files, settings = chain.segments, sample.files, chain.settings
    given, latents = sample.references, tuple[torch.Tensor, ...]()
    pieces, measured, segments = list[torch.Tensor](), list[Figures](), list[dict[str, object]]()
    if settings.condition.continued is not None and models.ranks.is_main:
        pieces.append(_continued_frames(plans[0]))
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
        segment = Sample(chain, plan, of_segment, given, saved, latents)
        denoise_samples([segment], embeds[number : number + 1], models, events)
        for held in decode_samples([segment], models, events, finish=hold):
            frames_THWC = held.frames_THWC
            if pieces:
                overlap = settings.overlap if number else settings.given_frames
                kept_THWC, remade_THWC = _last_frames(pieces, overlap), frames_THWC[:overlap]
                frames_THWC = follow(kept_THWC, remade_THWC, frames_THWC[overlap:])
            measured.append(held.figures())
            segments.append(
                {
                    "prompt": settings.segment_prompts[number],
                    "seed": of_segment.noise_seed,
                    "start_frame": sum(map(len, pieces)),
                    "num_frames": len(frames_THWC),
                }
            )
            pieces.append(frames_THWC)
            latents += held.latents
            given = references_to(plans[-1], _last_frames(pieces, settings.overlap))
        if models.ranks.count > 1:
            models.release()  # as in `_make_pictures`

    def whole() -> Figures:
        own = {stage: sum(each.timings_s[stage] for each in measured) for stage in (DENOISE, DECODE)}
        return Figures(
            {**events.timings_s, **own},
            peak_memory_gib(chain.video.hardware.device),
            measured[0].given_frames_psnr_db,  # of the frames that the first segment was given
            tuple(segments),
        )

    return Clip(chain, files, events, latents, pieces, whole)


def _last_frames(pieces: Sequence[torch.Tensor], count: int) -> torch.Tensor:
    last_THWC = pieces[-1]
    for piece_THWC in reversed(pieces[:-1]):
        if len(last_THWC) >= count:
            break
        last_THWC = torch.cat([piece_THWC, last_THWC])
    return last_THWC[-count:]


def _continued_frames(plan: Plan) -> torch.Tensor:
    """Return the clip that the first segment continues, uint8 in the size of the video."""
    condition = plan.settings.condition
    frames_THWC = read_video(condition.references[0], num_frames=condition.continued).frames_THWC
    if frames_THWC.shape[1:3] == (plan.height, plan.width):
        return frames_THWC
    fitted = (
        fit_frames(frame_HWC[None], height=plan.height, width=plan.width, fit=condition.fit, picture=False)
        for frame_HWC in frames_THWC
    )
    return torch.cat([to_uint8(frame_C1HW) for frame_C1HW in fitted])


def follow(kept_THWC: torch.Tensor, remade_THWC: torch.Tensor, new_THWC: torch.Tensor) -> torch.Tensor:
    """Return new frames whose brightness continues the kept frames.

    A model reproduces given frames with a slightly different brightness, which the new frames follow: without a
    correction the video would flash. The first new frame is shifted, channel by channel: its mean then differs from the
    last kept frame like it differed from the last remade one. In luma it differs no more than consecutive kept frames.
    The shift decreases to zero over the new frames, so that the shifts of many segments do not add up.

    Args:
        kept_THWC: at least two frames that stay in the video, uint8.
        remade_THWC: the same frames as the new segment reproduces them.
        new_THWC: frames of the segment after these.
    """
    means_C, remade_C, first_C = (
        frame.double().mean((0, 1)) for frame in (kept_THWC[-1], remade_THWC[-1], new_THWC[0])
    )
    step_C = first_C - remade_C
    kept_TC = torch.stack([frame_HWC.double().mean((0, 1)) for frame_HWC in kept_THWC])
    largest = max(float(abs(_LUMA @ step)) for step in kept_TC.diff(dim=0))
    own = float(abs(_LUMA @ step_C))
    shift_C = means_C + step_C * min(1.0, largest / own if own else 1.0) - first_C
    followed_THWC = torch.empty_like(new_THWC)
    for index, frame_HWC in enumerate(new_THWC):
        left = 1 - index / len(new_THWC)
        followed_THWC[index] = (frame_HWC + (left * shift_C).float()).round().clamp(0, 255)
    return followed_THWC
