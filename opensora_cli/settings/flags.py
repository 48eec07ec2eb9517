"""The options of `osora generate` that are settings: one table of names, for the command line and for Python."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple, TypedDict, get_type_hints

from opensora_cli.core.exceptions import RequestError
from opensora_cli.settings.explain import Given, nearest, nearest_key
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.layers import all_keys


class Flag(NamedTuple):
    """What an option sets."""

    key: str
    is_negated: bool = False
    """Whether it turns the setting off."""
    each: str | None = None
    """What each of several files is; None: it has one value."""


_File = str | os.PathLike[str]
_Files = _File | Sequence[_File]


class Flags(TypedDict, total=False):
    """The options of one video by their names without dashes, `num_frames` for `--num-frames`.

    Every value may also be text, as on the command line, where `none` leaves a setting unset.
    """

    negative_prompt: Annotated[str | None, Flag("negative_prompt")]
    refine: Annotated[bool | None, Flag("refine.prompt")]
    from_latents: Annotated[_File | None, Flag("from_latents")]
    res: Annotated[str | None, Flag("video.resolution")]
    aspect_ratio: Annotated[str | None, Flag("video.aspect_ratio")]
    width: Annotated[int | str | None, Flag("video.width")]
    height: Annotated[int | str | None, Flag("video.height")]
    num_frames: Annotated[int | str | None, Flag("video.num_frames")]
    fps: Annotated[int | str | None, Flag("video.fps")]
    draft_res: Annotated[str | None, Flag("draft.resolution")]
    draft_strength: Annotated[float | str | None, Flag("draft.strength")]
    prompt_at: Annotated[str | Sequence[str] | None, Flag("prompts_at")]
    extend: Annotated[int | str | None, Flag("video.extend")]
    motion_score: Annotated[int | str | None, Flag("prompt_suffix.motion_score")]
    steps: Annotated[int | str | None, Flag("sampling.num_inference_steps")]
    fast: Annotated[bool | None, Flag("sampling.fast")]
    solver: Annotated[str | None, Flag("sampling.solver")]
    stop_at: Annotated[int | str | None, Flag("sampling.stop_at")]
    guidance_scale: Annotated[float | str | None, Flag("sampling.guidance_scale")]
    image_guidance_scale: Annotated[float | str | None, Flag("sampling.image_guidance_scale")]
    seed: Annotated[int | str | None, Flag("sampling.seed")]
    cond: Annotated[str | None, Flag("condition.mode")]
    ref: Annotated[_Files | None, Flag("condition.references", each="a picture or a video")]
    seamless: Annotated[bool | None, Flag("condition.seamless")]
    fit: Annotated[str | None, Flag("condition.fit")]
    ref_fps: Annotated[str | None, Flag("condition.ref_fps")]
    t2i2v: Annotated[bool | None, Flag("picture.first")]
    lora: Annotated[_Files | None, Flag("loras", each="an adapter")]
    out: Annotated[_File | None, Flag("output.path")]
    format: Annotated[str | None, Flag("output.format")]
    name_from: Annotated[str | None, Flag("output.name_from")]
    overwrite: Annotated[bool | None, Flag("output.overwrite")]
    save_last_frame: Annotated[bool | None, Flag("output.last_frame")]
    no_metadata: Annotated[bool | None, Flag("output.metadata", is_negated=True)]
    weights: Annotated[_File | None, Flag("runtime.weights")]
    device: Annotated[str | None, Flag("runtime.device")]
    dtype: Annotated[str | None, Flag("runtime.dtype")]
    attention: Annotated[str | None, Flag("runtime.attention")]
    threads: Annotated[int | str | None, Flag("runtime.threads")]
    no_cache: Annotated[bool | None, Flag("runtime.prompt_cache", is_negated=True)]
    offload: Annotated[str | None, Flag("memory.offload")]
    resident_blocks: Annotated[int | str | None, Flag("memory.resident_blocks")]
    memory_limit: Annotated[int | str | None, Flag("memory.limit")]
    gpus: Annotated[int | str | None, Flag("parallel.gpus")]
    devices: Annotated[str | Sequence[int] | None, Flag("parallel.devices")]


FLAGS: Mapping[str, Flag] = {
    "model": Flag("runtime.model_choice"),
    "num_samples": Flag("sampling.num_samples"),
    "resume": Flag("resume"),
    "save_state_every": Flag("output.save_state_every"),
    "preview_every": Flag("output.preview_every"),
    "save_picture": Flag("picture.save"),
    **{name: hint.__metadata__[0] for name, hint in get_type_hints(Flags, include_extras=True).items()},
}
"""The setting of each option."""


def option_of(name: str) -> str:
    """Return an option as it is typed: `--num-frames`."""
    return f"--{name.replace('_', '-')}"


def given_flags(values: Mapping[str, object], *, called: Callable[[str], str] = lambda name: name) -> dict[str, Given]:
    """Return the settings that options give, None where not given; `called` is how messages name an option.

    Raises RequestError for a name that is no option, with the nearest, and for one of several files that is empty.
    """
    given = {}
    for name, value in values.items():
        if name not in FLAGS:
            raise RequestError(f"{name} is not an option of generate", hint=_nearest(name))
        flag, source = FLAGS[name], called(name)
        if value is not None and (set_to := _value(flag, value, source)) is not None:
            given[flag.key] = Given(set_to, source)
    return given


def _value(flag: Flag, value: object, source: str) -> object:
    if flag.each is not None:
        files = value if isinstance(value, list | tuple) else [value]
        texts = [os.fspath(file) if isinstance(file, Path) else str(file) for file in files]
        if not all(text.strip(" ;") for text in texts):
            # Most often an unset variable of a script: without a word it would become a video from text alone.
            raise RequestError(f"{source} is empty: name {flag.each}, or drop {source}")
        # Several may already be in one.
        return ";".join(texts) or None
    if flag.is_negated and isinstance(value, bool):
        return not value
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _nearest(name: str) -> str:
    close = nearest(name, FLAGS)
    if close is None and (key := nearest_key(name, all_keys(GenerateSettings))) is not None:
        options = {flag.key: option for option, flag in FLAGS.items()}
        close = options.get(key) or f'set={{"{key}": ...}}'
    return f"did you mean {close}?" if close else f"there are {', '.join(FLAGS)}"
