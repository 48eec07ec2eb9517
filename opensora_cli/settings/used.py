"""Which settings of a generation took part in it."""

from collections.abc import Iterator
from typing import Any

from opensora_cli.core.conditions import CONTINUING, Length, Source, condition_mode
from opensora_cli.settings.base import Section
from opensora_cli.settings.enums import Compression, VAEKind
from opensora_cli.settings.generate import GenerateSettings

_GUIDANCE = (
    "guidance_scale",
    "image_guidance_scale",
    "text_oscillation",
    "image_oscillation",
    "mean_guidance_of",
    "guidance_interval",
)

_NEW_IN_SAMPLING = ("stop_at", "step_cache", "solver", "timesteps", "mean_guidance_of", "guidance_interval")
"""What older versions did not have: where it is as it was for them, their files are those of the same request."""


def used_settings(settings: GenerateSettings) -> dict[str, Any]:
    """Return the settings that took part, as JSON has them; whatever the others are, the same file is made.

    `settings` have their condition mode. What depends on the machine is left out where it was not set.
    """
    values = settings.model_dump(mode="json")
    for key in _unused(settings):
        *sections, name = key.split(".")
        place = values
        for section in sections:
            place = place[section]
        place.pop(name, None)
    return values


def _unused(settings: GenerateSettings) -> Iterator[str]:
    # However many devices there are then: they change no more than rounding, if they send what they have.
    if settings.parallel.compression is Compression.NONE:
        yield "parallel"
    else:
        yield from (f"parallel.{name}" for name in type(settings.parallel).model_fields if name != "compression")
    yield from ("from_latents", "resume", "output.overwrite")
    if not settings.video.extend:
        yield "video.extend"
    if settings.draft.resolution is None:
        yield "draft"
    if not settings.prompts_at:
        yield "prompts_at"
    if not settings.condition.seamless:
        yield "condition.seamless"
    yield from (f"sampling.{name}" for name in _NEW_IN_SAMPLING if _is_default(settings.sampling, name))
    if _is_default(settings.precision, "linear"):
        yield "precision.linear"
    yield from (f"memory.{name}" for name in _unset(settings.memory))
    yield from (f"runtime.{name}" for name in ("prompt_cache", "prompt_cache_limit", *_unset(settings.runtime)))
    if not settings.loras:
        yield "loras"
    if not settings.compile:
        yield "compile"
    if not settings.picture.first:
        yield "picture"
    elif settings.picture.own_model:
        yield from ("picture.model", "picture.vae", "picture.files")
    # What was asked for is in the prompt and the motion score by now.
    if settings.refine.original is None:
        yield "refine"
    else:
        yield from (f"refine.{name}" for name in type(settings.refine).model_fields if name != "original")
    yield from _unused_of_autoencoder(settings)
    video = settings.video
    if video.height is None or video.width is None:
        yield from ("video.height", "video.width")
    else:
        yield from (f"video.{name}" for name in ("resolution", "resolutions", "aspect_ratio", "aspect_ratios"))
    yield from _unused_of_sampling(settings)


def _is_default(section: Section, name: str) -> bool:
    return bool(getattr(section, name) == type(section).model_fields[name].default)


def idle_guidance(settings: GenerateSettings) -> tuple[str, ...]:
    """Return the settings of guidance by branches where the model is distilled, and has none."""
    if not settings.model.guidance_embed:
        return ()
    return ("negative_prompt", *(f"sampling.{name}" for name in (*_GUIDANCE, "temporal_image_scaling")))


def _unset(section: Section) -> list[str]:
    return [name for name in type(section).model_fields if getattr(section, name) is None]


def _unused_of_autoencoder(settings: GenerateSettings) -> Iterator[str]:
    vae = settings.vae
    yield from (f"vae.{name}" for name in type(vae).model_fields if vae.owner(name) not in (None, vae.kind))
    if vae.kind is VAEKind.DC_AE:
        sizes = "vae.dc_ae.spatial_tile_size", "vae.dc_ae.temporal_tile_size", "vae.dc_ae.tile_overlap_factor"
    elif vae.kind is VAEKind.FLUX_AE:
        # A tile of time is a frame, whatever its size.
        sizes = "vae.flux_ae.tile_size", "vae.temporal_tiling", "vae.flux_ae.tile_overlap_factor"
    else:
        sizes = "vae.sample_size", "vae.sample_tsize", "vae.tile_overlap_factor"
    tiled = vae.spatial_tiling, vae.temporal_tiling
    yield from (size for size, has_effect in zip(sizes, (*tiled, any(tiled)), strict=True) if not has_effect)
    if vae.grid.is_causal:
        yield "video.causal_lengths"


def _unused_of_sampling(settings: GenerateSettings) -> Iterator[str]:
    yield "sampling.fast"  # what it stands for is there
    mode = condition_mode(settings.condition.mode or "t2v", num_latent_frames=settings.num_latent_frames)
    yield from idle_guidance(settings)
    makes_distilled = settings.picture.first and not settings.picture.own_model
    if not settings.model.guidance_embed and not (makes_distilled and settings.picture.model.guidance_embed):
        yield "sampling.embedded_guidance"
    if not mode.needs_reference:
        yield from ("condition.references", "condition.fit")
    modes = (mode, CONTINUING) if settings.video.extend else (mode,)
    if not any(each.needs_reference for each in modes):
        yield from ("sampling.image_guidance_scale", "sampling.image_oscillation")
    if not mode.gives_pictures:
        yield "sampling.temporal_image_scaling"
    if mode.source is not Source.VIDEO:
        yield "condition.ref_fps"
    if all(each.length is not Length.VIDEO for each in modes):
        yield "condition.video_latent_frames"
    if mode.length is not Length.EASY:
        yield "condition.easy_latent_frames"
