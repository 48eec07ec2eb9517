"""Settings that a file of an earlier run may bring: the description of its video, and nothing else.

A sidecar or a file of latents may come from somebody else. The command line, the environment, `--config` and this
machine alone decide where to write, what to replace, which server to ask, which weights to read and which devices to
use.
"""

import shlex
from collections.abc import Collection
from operator import attrgetter

from pydantic import ValidationError

from opensora_cli.core.choices import MediaFormat
from opensora_cli.core.formatting import escaped
from opensora_cli.core.section import NO_VALUE
from opensora_cli.settings.components import LoraFile
from opensora_cli.settings.explain import Given
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.generate_sections import named_format
from opensora_cli.settings.layers import Layer

_SIZES = ("model", "vae", "text", "picture.model", "picture.vae")
"""Sections that a file brings as a whole: they have only numbers and choices."""
# References are read, never written, and sent to no server: see `load._refuse_sending_files`.
_KEYS = """
prompt prompts_at negative_prompt prompt_suffix.motion_score prompt_suffix.add_fps refine.original
video.resolution video.aspect_ratio video.height video.width video.num_frames video.fps video.resolutions
video.aspect_ratios video.max_frames video.extend video.causal_lengths draft.resolution draft.strength
condition.mode condition.references condition.fit condition.ref_fps condition.video_latent_frames
condition.seamless condition.continued condition.easy_latent_frames
picture.first picture.save picture.resolution picture.own_model
sampling.num_inference_steps sampling.solver sampling.fast sampling.turbo sampling.timesteps sampling.stop_at
sampling.guidance_scale sampling.image_guidance_scale sampling.text_oscillation sampling.image_oscillation
sampling.mean_guidance_of sampling.step_cache sampling.temporal_image_scaling sampling.guidance_interval
sampling.flow_shift sampling.seed sampling.num_samples sampling.embedded_guidance
output.format output.metadata output.last_frame output.save_latents output.save_state_every output.preview_every
runtime.model_choice runtime.dtype runtime.threads runtime.attention compile
precision.tf32 precision.linear memory.fp8_storage parallel.compression
"""
_DESCRIPTION = frozenset(_KEYS.split())
"""Single settings that a file brings. All others are reserved."""
TYPED = frozenset({"refine.prompt", "refine.motion_score"})
"""Settings that only the command line can set beside such a file, whose prompt is rewritten already."""

_SAMPLED_WITH = (
    *("files.transformer", "files.t5", "files.clip", "files.turbo"),
    *("picture.files.transformer", "picture.files.vae", "picture.files.hub_repo", "loras"),
)
"""Files that decoding does not read. A file of latents records them."""
_FILES = ("runtime.weights", "files.vae", "files.hub_repo", *_SAMPLED_WITH)


def is_description(key: str) -> bool:
    """Return whether a file of an earlier run may bring a setting."""
    return key in _DESCRIPTION or key.startswith(tuple(f"{section}." for section in _SIZES))


def description(saved: Layer, *, decodes: bool) -> dict[str, Given]:
    """Return the saved settings that a run takes. If it decodes latents, it also records the weights that made them."""
    taken = {key: at for key, at in saved.items() if is_description(key) or (decodes and key in _SAMPLED_WITH)}
    score = taken.get("prompt_suffix.motion_score")
    if score is not None and score.value == "auto":
        # `auto` would ask a server.
        del taken["prompt_suffix.motion_score"]
    path, frames = saved.get("output.path"), saved.get("video.num_frames")
    ending = None if path is None else named_format(str(path.value))
    usual = MediaFormat.PNG if frames is not None and str(frames.value) == "1" else MediaFormat.MP4
    if path is not None and ending not in (None, usual) and not _has_value(taken.get("output.format")):
        taken["output.format"] = Given(str(ending), path.source)
    return taken


def files_needed(saved: Layer, settings: GenerateSettings, *, decodes: bool, given: Collection[str]) -> dict[str, str]:
    """Return the flags, by key, for the weights and adapters of an earlier run that differ from those of `settings`.

    Keys in `given` are omitted because the user chose other files.

    Raises:
        ValueError: `saved` is malformed.
    """
    needed = {}
    for key in _FILES:
        if key in given or not _has_value(saved.get(key)) or (decodes and key in _SAMPLED_WITH):
            continue
        value = saved[key].value
        if key == "loras":
            words = [word for lora in adapters_in(saved) for word in ("--lora", lora.shown)]
        elif not isinstance(value, str):
            raise ValueError(f"{key} is not a name")
        elif value == attrgetter(key)(settings):
            continue
        else:
            words = ["--weights", value] if key == "runtime.weights" else ["--set", f"{key}={value}"]
        needed[key] = escaped(shlex.join(words))
    return needed


def flags_again(settings: GenerateSettings, usual: GenerateSettings, *, decodes: bool) -> list[str]:
    """Return the flags that continuing saved latents of `settings` needs. `usual` has the settings of the preset."""
    saved = {key: Given(attrgetter(key)(settings), "") for key in _FILES}
    flags = [*files_needed(saved, usual, decodes=decodes, given=()).values()]
    device = settings.runtime.device
    return flags if device == "auto" else [*flags, f"--device {device}"]


def adapters_in(saved: Layer) -> tuple[LoraFile, ...]:
    """Return the adapters of an earlier run. Raises ValueError if `saved` is malformed."""
    files = saved["loras"].value if "loras" in saved else ()
    if not isinstance(files, list | tuple):
        raise ValueError("loras is no list")
    try:
        return tuple(LoraFile.model_validate(file) for file in files)
    except ValidationError as error:
        raise ValueError("loras is no list of adapters") from error


def _has_value(given: Given | None) -> bool:
    value = None if given is None else given.value
    return bool(value) and not (isinstance(value, str) and value.strip().lower() in NO_VALUE)
