"""Rules of what takes more than one clip: videos that are extended, prompts by time, drafts."""

from itertools import pairwise
from typing import TYPE_CHECKING

from opensora_cli.core.conditions import CONTINUING
from opensora_cli.settings.explain import either

if TYPE_CHECKING:
    from opensora_cli.settings.generate import GenerateSettings


def extension_problems(settings: "GenerateSettings") -> list[str]:
    """Return why a video cannot be extended."""
    video, condition, count = settings.video, settings.condition, settings.video.extend
    if not count:
        return []
    asked = f"video.extend={count}"
    if video.num_frames == 1:
        return [f"{asked} goes on with a video, and video.num_frames=1 makes a picture: drop --extend, or ask for more"]
    if not settings.model.cond_embed:
        return [f"{asked} needs a model that takes references (model.cond_embed=true): drop --extend"]
    problems = []
    grid = settings.vae.grid
    if video.causal_lengths and not grid.is_causal:
        problems.append(
            f"{asked} gives frames that vae.kind={settings.vae.kind} cannot encode: use video.causal_lengths=false"
        )
    given = condition.lengths.latent_frames(CONTINUING, causal=grid.is_causal)
    if given >= settings.num_latent_frames:
        problems.append(
            f"video.num_frames={video.num_frames} leaves no new frames to {asked}, which gives the last "
            f"{settings.overlap} to the next segment: use at least {grid.num_frames(given + 1)}"
        )
    if condition.seamless:
        problems.append(
            f"condition.seamless=true leaves out the last frame, and {asked} goes on after it: drop one of them"
        )
    if settings.sampling.stop_at is not None:
        problems.append(
            f"sampling.stop_at={settings.sampling.stop_at} ends a run in its first segment, and {asked} makes more: "
            "drop one of them"
        )
    return problems


def time_problems(settings: "GenerateSettings") -> list[str]:
    """Return what is wrong with prompts by time, the first of it: the rest may follow from that."""
    prompts = settings.prompts_at
    if not prompts:
        return []
    if not settings.video.extend:
        return [f"prompts_at={prompts[0].shown} has no effect without video.extend: give --extend, too"]
    if settings.refine.prompt:
        return ["refine.prompt=true rewrites one prompt, and prompts_at has more: drop one of them"]
    if not prompts[0].at_s and prompts[0].prompt != settings.prompt:
        return [
            f"prompt={settings.prompt} and prompts_at={prompts[0].shown} are both of the beginning: drop one of them"
        ]
    fps, starts = settings.video.fps, settings.segment_starts
    for earlier, later in pairwise(prompts):
        if later.at_s <= earlier.at_s:
            return [
                f"prompts_at={later.shown} must come after {earlier.at_s:g}s: give them in the order of their times"
            ]
    frames = [round(each.at_s * fps) for each in prompts]
    for each, frame, next_frame in zip(prompts, frames, (*frames[1:], settings.num_frames), strict=True):
        if not any(frame <= start < next_frame for start in starts):
            begin = ", ".join(f"{start / fps:.3g}s" for start in starts)
            return [
                f"prompts_at={each.shown} has no effect, since no segment begins between then and "
                f"{'the next' if frame < frames[-1] else 'the end'}: segments begin at {begin}"
            ]
    return []


def draft_problems(settings: "GenerateSettings") -> list[str]:
    """Return why no draft can be made first, but for its size, which is known later."""
    draft, video = settings.draft, settings.video
    if draft.resolution is None:
        if draft == type(draft)():
            return []
        return [f"draft.strength={draft.strength:g} has no effect without draft.resolution: give --draft-res, too"]
    asked = f"draft.resolution={draft.resolution}"
    if draft.resolution not in video.resolutions:
        return [f"{asked} is not a size of the {settings.model.name} model: use {either(video.resolutions)}"]
    if settings.sampling.num_inference_steps == 1:
        return [f"{asked} leaves nothing to sampling.num_inference_steps=1: use 2 or more"]
    problems = []
    if video.extend:
        problems.append(f"{asked} is of one clip, and video.extend={video.extend} makes more: drop one of them")
    if settings.picture.first:
        problems.append(
            f"{asked} and picture.first=true both come first: make the picture alone, and give it with --ref"
        )
    return problems
