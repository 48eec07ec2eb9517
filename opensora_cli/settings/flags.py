"""The options of `osora generate` that are settings: one table of names and keys."""

from collections.abc import Mapping
from typing import NamedTuple

from opensora_cli.core.exceptions import RequestError
from opensora_cli.settings.explain import Given


class Flag(NamedTuple):
    """What an option sets."""

    key: str
    is_negated: bool = False
    """Whether it turns the setting off."""
    each: str | None = None
    """What each of several files is; None: it has one value."""


FLAGS: Mapping[str, Flag] = {
    "negative_prompt": Flag("negative_prompt"),
    "refine": Flag("refine.prompt"),
    "from_latents": Flag("from_latents"),
    "res": Flag("video.resolution"),
    "aspect_ratio": Flag("video.aspect_ratio"),
    "width": Flag("video.width"),
    "height": Flag("video.height"),
    "num_frames": Flag("video.num_frames"),
    "fps": Flag("video.fps"),
    "motion_score": Flag("prompt_suffix.motion_score"),
    "steps": Flag("sampling.num_inference_steps"),
    "guidance_scale": Flag("sampling.guidance_scale"),
    "image_guidance_scale": Flag("sampling.image_guidance_scale"),
    "seed": Flag("sampling.seed"),
    "num_samples": Flag("sampling.num_samples"),
    "cond": Flag("condition.mode"),
    "ref": Flag("condition.references", each="a picture or a video"),
    "fit": Flag("condition.fit"),
    "ref_fps": Flag("condition.ref_fps"),
    "lora": Flag("loras", each="an adapter"),
    "out": Flag("output.path"),
    "format": Flag("output.format"),
    "overwrite": Flag("output.overwrite"),
    "no_metadata": Flag("output.metadata", is_negated=True),
    "model": Flag("runtime.model_choice"),
    "weights": Flag("runtime.weights"),
    "device": Flag("runtime.device"),
    "dtype": Flag("runtime.dtype"),
    "attention": Flag("runtime.attention"),
    "threads": Flag("runtime.threads"),
    "offload": Flag("memory.offload"),
    "resident_blocks": Flag("memory.resident_blocks"),
    "memory_limit": Flag("memory.limit"),
    "gpus": Flag("parallel.gpus"),
    "devices": Flag("parallel.devices"),
}
"""The options by their names without dashes, `num_frames` for `--num-frames`."""


def option_of(name: str) -> str:
    """Return an option as it is typed: `--num-frames`."""
    return f"--{name.replace('_', '-')}"


def given_flags(values: Mapping[str, object]) -> dict[str, Given]:
    """Return the settings that options give, None where not given.

    Raises RequestError for one of several files that is empty.
    """
    given = {}
    for name, value in values.items():
        flag, option = FLAGS[name], option_of(name)
        if value is not None and (set_to := _value(flag, value, option)) is not None:
            given[flag.key] = Given(set_to, option)
    return given


def _value(flag: Flag, value: object, option: str) -> object:
    if isinstance(value, list):
        if not all(file.strip(" ;") for file in value):
            # Most often an unset variable of a script: without a word it would become a video from text alone.
            raise RequestError(f"{option} is empty: name {flag.each}, or drop {option}")
        # Several may already be in one.
        return ";".join(value) or None
    return not value if flag.is_negated else value
