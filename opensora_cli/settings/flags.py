"""Options of `osora generate` that are settings: one table of rows for the command line and for Python.

This module imports no pydantic, which keeps command modules cheap to import.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypedDict, get_type_hints

from opensora_cli.core.exceptions import RequestError

if TYPE_CHECKING:
    from opensora_cli.settings.layers import Given

PROMPT, VIDEO, REFERENCE, SAMPLING = "Prompt", "Video", "Reference", "Sampling"
MACHINE, OUTPUT = "Memory and devices", "Output"


class Option(NamedTuple):
    """Row of a command's options. Type, default and help are those of the setting unless the row has its own."""

    key: str = ""
    """Dotted key of the setting; empty for an argument of the command's function."""
    panel: str = ""
    """Panel of the help text; empty for the panel of general options."""
    help: str = ""
    metavar: str = ""
    kind: Any = None
    default: str = ""
    """Default for the help text."""
    short: str = ""
    """Other names, such as `-o`."""
    is_common: bool = False
    """Whether `--help` shows the option of a command that has `--help-all`, too."""
    is_negated: bool = False
    """Whether the option turns its setting off."""


_File = str | os.PathLike[str]
_Files = _File | Sequence[_File]
_Text = str | None
_Int = int | str | None
_Float = float | str | None
_Bool = bool | None


class Flags(TypedDict, total=False):
    """Options of one video by their names without dashes, `num_frames` for `--num-frames`.

    Every value may also be text, as on the command line, where `none` unsets a setting.
    """

    negative_prompt: Annotated[_Text, Option("negative_prompt", PROMPT, metavar="TEXT")]
    motion_score: Annotated[_Int, Option("prompt_suffix.motion_score", PROMPT, metavar="N")]
    refine: Annotated[_Bool, Option("refine.prompt", PROMPT)]
    prompt_at: Annotated[str | Sequence[str] | None, Option("prompts_at", PROMPT, metavar="Ts=PROMPT")]
    res: Annotated[_Text, Option("video.resolution", VIDEO, "Size, as in 768px.", "SIZE", is_common=True)]
    aspect_ratio: Annotated[_Text, Option("video.aspect_ratio", VIDEO, metavar="W:H", is_common=True)]
    width: Annotated[_Int, Option("video.width", VIDEO)]
    height: Annotated[_Int, Option("video.height", VIDEO)]
    num_frames: Annotated[_Int, Option("video.num_frames", VIDEO, is_common=True)]
    fps: Annotated[_Int, Option("video.fps", VIDEO)]
    extend: Annotated[_Int, Option("video.extend", VIDEO)]
    # Files; in Python also pictures and videos in memory.
    ref: Annotated[_Files | object | None, Option("condition.references", REFERENCE, metavar="FILE", is_common=True)]
    cond: Annotated[_Text, Option("condition.mode", REFERENCE, metavar="MODE")]
    fit: Annotated[_Text, Option("condition.fit", REFERENCE)]
    seamless: Annotated[_Bool, Option("condition.seamless", REFERENCE)]
    t2i2v: Annotated[_Bool, Option("picture.first", REFERENCE)]
    steps: Annotated[_Int, Option("sampling.num_inference_steps", SAMPLING, is_common=True)]
    seed: Annotated[_Int, Option("sampling.seed", SAMPLING, is_common=True)]
    fast: Annotated[_Bool, Option("sampling.fast", SAMPLING, "Fewer evaluations, a similar video.", is_common=True)]
    turbo: Annotated[_Bool, Option("sampling.turbo", SAMPLING, is_common=True)]
    solver: Annotated[_Text, Option("sampling.solver", SAMPLING)]
    guidance_scale: Annotated[_Float, Option("sampling.guidance_scale", SAMPLING)]
    image_guidance_scale: Annotated[_Float, Option("sampling.image_guidance_scale", SAMPLING)]
    lora: Annotated[_Files | None, Option("loras", SAMPLING, metavar="FILE[:SCALE]")]
    draft_res: Annotated[_Text, Option("draft.resolution", SAMPLING, metavar="SIZE")]
    draft_strength: Annotated[_Float, Option("draft.strength", SAMPLING)]
    stop_at: Annotated[_Int, Option("sampling.stop_at", SAMPLING)]
    weights: Annotated[_File | None, Option("runtime.weights", MACHINE, metavar="DIR")]
    device: Annotated[_Text, Option("runtime.device", MACHINE, metavar="DEVICE")]
    gpus: Annotated[_Int, Option("parallel.gpus", MACHINE, is_common=True)]
    devices: Annotated[str | Sequence[int] | None, Option("parallel.devices", MACHINE, metavar="LIST", kind=str)]
    memory_limit: Annotated[_Int, Option("memory.limit", MACHINE, metavar="SIZE")]
    offload: Annotated[_Text, Option("memory.offload", MACHINE, metavar="MODE", is_common=True)]
    resident_blocks: Annotated[_Int, Option("memory.resident_blocks", MACHINE)]
    dtype: Annotated[_Text, Option("runtime.dtype", MACHINE)]
    attention: Annotated[_Text, Option("runtime.attention", MACHINE)]
    threads: Annotated[_Int, Option("runtime.threads", MACHINE)]
    out: Annotated[_File | None, Option("output.path", OUTPUT, metavar="PATH", short="-o", is_common=True)]
    format: Annotated[_Text, Option("output.format", OUTPUT)]
    name_from: Annotated[_Text, Option("output.name_from", OUTPUT)]
    overwrite: Annotated[_Bool, Option("output.overwrite", OUTPUT)]
    save_last_frame: Annotated[_Bool, Option("output.last_frame", OUTPUT)]
    no_metadata: Annotated[_Bool, Option("output.metadata", OUTPUT, "Write no sidecar and no tags.", is_negated=True)]
    from_latents: Annotated[_File | None, Option("from_latents", metavar="FILE")]


FLAGS: Mapping[str, Option] = {
    "model": Option("runtime.model_choice", MACHINE, metavar="NAME", is_common=True),
    "num_samples": Option("sampling.num_samples", SAMPLING),
    "save_state_every": Option("output.save_state_every", OUTPUT),
    "preview_every": Option("output.preview_every", OUTPUT),
    "save_picture": Option("picture.save", OUTPUT),
    **{name: hint.__metadata__[0] for name, hint in get_type_hints(Flags, include_extras=True).items()},
}
"""Row of each option that is a setting. The rows before those of `Flags` exist on the command line alone."""
_EACH = {"condition.references": "a picture or a video", "loras": "an adapter"}
"""Noun for each of several files of a setting."""


def option_of(name: str) -> str:
    """Return an option in its typed form: `--num-frames`."""
    return f"--{name.replace('_', '-')}"


def given_flags(values: Mapping[str, object]) -> dict[str, "Given"]:
    """Return the settings that options give by their names without dashes. None means not given.

    Raises RequestError for an unknown name, with the nearest option, and for an empty name of a file.
    """
    given: dict[str, Given] = {}
    for name, value in values.items():
        if name not in FLAGS:
            raise RequestError(f"{name} is not an option of generate", hint=_nearest(name))
        given |= given_by(FLAGS[name], value, name)
    return given


def given_by(row: Option, value: object, source: str) -> dict[str, "Given"]:
    """Return the setting that one option gives, by key; empty for None.

    Raises RequestError if one of several files is empty.
    """
    from opensora_cli.settings.layers import Given

    if value is not None and row.key in _EACH:
        files = value if isinstance(value, list | tuple) else [value]
        texts = [os.fspath(file) if isinstance(file, Path) else str(file) for file in files]
        if not all(text.strip(" ;") for text in texts):
            # Usually an unset shell variable. Dropping it would make a video from text alone.
            raise RequestError(f"{source} is empty: name {_EACH[row.key]}, or drop {source}")
        # One text may already name several files.
        value = ";".join(texts) or None
    elif row.is_negated and isinstance(value, bool):
        value = not value
    elif isinstance(value, os.PathLike):
        value = os.fspath(value)
    return {} if value is None else {row.key: Given(value, source)}


def _nearest(name: str) -> str:
    from opensora_cli.core.formatting import nearest
    from opensora_cli.core.section import all_keys
    from opensora_cli.settings.generate import GenerateSettings
    from opensora_cli.settings.layers import nearest_key

    close = nearest(name, FLAGS)
    if close is None and (key := nearest_key(name, all_keys(GenerateSettings))) is not None:
        options = {row.key: option for option, row in FLAGS.items()}
        close = options.get(key) or f'set={{"{key}": ...}}'
    return f"did you mean {close}?" if close else f"there are {', '.join(FLAGS)}"
