"""Which settings the file of an earlier run may bring: the description of its video, and nothing else.

A sidecar or saved latents may come from somebody else. Where to write, what to replace, whom to ask, which weights to
read and on which devices to run are decided by the command line, the environment, `--config` and this machine alone.
"""

import shlex
from collections.abc import Collection, Mapping
from pathlib import PurePath
from typing import Any

from pydantic import ValidationError

from opensora_cli.core.formatting import escaped
from opensora_cli.core.media_choices import MediaFormat
from opensora_cli.settings.base import NO_VALUE
from opensora_cli.settings.components import LoraFile
from opensora_cli.settings.explain import Given
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.layers import Layer

_MODEL = (
    *("name", "in_channels", "vec_in_dim", "context_in_dim", "hidden_size", "mlp_ratio", "num_heads", "depth"),
    *("depth_single_blocks", "axes_dim", "theta", "qkv_bias", "guidance_embed", "cond_embed", "patch_size"),
    "predicts_data",
)
_VAE = (
    *("kind", "latent_channels", "block_out_channels", "layers_per_block", "norm_num_groups", "sample_size"),
    *("sample_tsize", "tile_overlap_factor", "scale_factor", "shift_factor", "time_compression_ratio"),
    *("spatial_compression_ratio", "spatial_tiling", "temporal_tiling"),
)
_DC_AE = (
    *("latent_channels", "block_types", "width_list", "encoder_depth_list", "decoder_depth_list", "temporal"),
    *("spatial_tile_size", "temporal_tile_size", "tile_overlap_factor", "scaling_factor"),
)
_FLUX_AE = (
    *("z_channels", "ch", "ch_mult", "num_res_blocks", "scale_factor", "shift_factor", "tile_size"),
    "tile_overlap_factor",
)
_FILES = ("transformer", "vae", "t5", "clip", "hub_repo")
_PICTURE_FILES = ("transformer", "vae", "hub_repo")


def _keys(sections: Mapping[str, tuple[str, ...]]) -> frozenset[str]:
    return frozenset(f"{section}.{name}" if section else name for section, names in sections.items() for name in names)


DESCRIPTION = _keys(
    {
        "": ("prompt", "prompts_at", "negative_prompt", "compile"),
        "model": _MODEL,
        "vae": _VAE,
        "vae.dc_ae": _DC_AE,
        "vae.flux_ae": _FLUX_AE,
        "text": ("t5_max_length", "clip_max_length", "known_words_warning"),
        "video": (
            *("resolution", "aspect_ratio", "height", "width", "num_frames", "fps", "resolutions", "aspect_ratios"),
            *("max_frames", "extend", "causal_lengths"),
        ),
        "sampling": (
            *("num_inference_steps", "solver", "fast", "timesteps", "stop_at", "guidance_scale"),
            *("image_guidance_scale", "text_oscillation", "image_oscillation", "mean_guidance_of", "step_cache"),
            *("temporal_image_scaling", "guidance_interval", "flow_shift", "seed", "num_samples"),
            "embedded_guidance",
        ),
        # References are read and never written. They are sent to no server; see `load.load_generate_settings`.
        "condition": (
            *("mode", "references", "fit", "ref_fps", "video_latent_frames", "seamless", "easy_latent_frames"),
        ),
        # The text that was typed, after which the result is named.
        "refine": ("original",),
        "picture": ("first", "save", "resolution", "own_model"),
        "picture.model": _MODEL,
        "picture.vae": _VAE,
        "picture.vae.dc_ae": _DC_AE,
        "picture.vae.flux_ae": _FLUX_AE,
        "draft": ("resolution", "strength"),
        "prompt_suffix": ("motion_score", "add_fps"),
        # What belongs to a result, beside which it lies under the name of the result.
        "output": ("format", "metadata", "last_frame", "save_latents", "save_state_every", "preview_every"),
        # What decides the bits of the result.
        "runtime": ("model_choice", "dtype", "threads", "attention"),
        "precision": ("tf32", "linear"),
        "memory": ("fp8_storage",),
        "parallel": ("compression",),
    }
)
"""Settings that a file of an earlier run may bring. Everything that is not listed here is not taken."""

RESERVED = _keys(
    {
        "": ("from_latents", "resume", "loras"),
        "files": _FILES,
        "picture.files": _PICTURE_FILES,
        "refine": ("prompt", "motion_score", "instructions", "timeout_s", "tries"),
        "output": ("path", "name_from", "overwrite", "explore"),
        "runtime": ("weights", "device", "prompt_cache", "prompt_cache_limit"),
        "memory": ("offload", "resident_blocks", "limit", "host_weights"),
        "parallel": (
            *("gpus", "devices", "nnodes", "all_to_all", "fast_link_ranks", "watch", "watch_limit_s"),
            *("data_parallel_degree", "ulysses_degree", "ring_degree", "cfg_parallel_degree"),
            *("tensor_parallel_degree", "ulysses_chunks"),
        ),
    }
)
"""Settings that are never taken from such a file. They name files, places, servers and devices."""

TYPED = frozenset({"refine.prompt", "refine.motion_score"})
"""Settings that count beside such a file only where they are typed: the prompt in the file is what was refined."""

_NEEDED = (
    "runtime.weights",
    *(f"files.{name}" for name in _FILES),
    *(f"picture.files.{name}" for name in _PICTURE_FILES),
    "loras",
)
_ONLY_SAMPLED_WITH = frozenset(_NEEDED) - {"runtime.weights", "files.vae", "files.hub_repo"}
"""Files that are not read where latents are decoded: the file of the latents says what made them."""


def description(saved: Layer, *, decodes: bool) -> dict[str, Given]:
    """Return what a run takes of the settings that an earlier one has saved.

    `decodes`: saved latents are decoded. Then the names of the weights that made them are kept as a record.
    """
    keys = DESCRIPTION | _ONLY_SAMPLED_WITH if decodes else DESCRIPTION
    taken = {key: given for key, given in saved.items() if key in keys}
    score = taken.get("prompt_suffix.motion_score")
    if score is not None and score.value == "auto":
        # It stands for a question to a server.
        del taken["prompt_suffix.motion_score"]
    ending = named_format(saved.get("output.path"))
    if not _has_value(taken.get("output.format")) and ending is not None and ending is not _usual_format(saved):
        taken["output.format"] = Given(ending.value, saved["output.path"].source)
    return taken


def named_format(path: Given | None) -> MediaFormat | None:
    """Return the format that the ending of a file names; None for a folder."""
    ending = "" if path is None else PurePath(str(path.value)).suffix.lower().removeprefix(".")
    return MediaFormat(ending) if ending in list(MediaFormat) else None


def files_needed(saved: Layer, settings: GenerateSettings, *, decodes: bool, given: Collection[str]) -> dict[str, str]:
    """Return the flags, by key, that name the weights and adapters of an earlier run where `settings` have others.

    Keys that are `given` are left out: other files may be wanted. It raises ValueError where `saved` is malformed.
    """
    values = settings.model_dump(mode="json")
    needed = {}
    for key in _NEEDED:
        if key in given or key not in saved or (decodes and key in _ONLY_SAMPLED_WITH):
            continue
        before = saved[key].value
        if _has_value(saved[key]) and before != _at(values, key):
            needed[key] = " ".join(map(escaped, _flags(key, before)))
    return needed


def flags_again(settings: GenerateSettings, usual: GenerateSettings, *, decodes: bool) -> list[str]:
    """Return the flags that saved latents of `settings` need to go on with, each as it is typed.

    `usual` are the settings of the preset.
    """
    values = settings.model_dump(mode="json")
    saved = {key: Given(_at(values, key), "") for key in _NEEDED}
    flags = [*files_needed(saved, usual, decodes=decodes, given=()).values()]
    device = settings.runtime.device
    return flags if device == "auto" else [*flags, f"--device {device}"]


def recorded_adapters(saved: Layer) -> dict[str, LoraFile]:
    """Return the adapters of an earlier run by path. It raises ValueError where `saved` is malformed."""
    return {lora.path: lora for lora in _adapters(saved["loras"].value)} if "loras" in saved else {}


def _flags(key: str, value: object) -> list[str]:
    if key == "loras":
        return [f"--lora {shlex.quote(lora.shown)}" for lora in _adapters(value)]
    if not isinstance(value, str):
        raise ValueError(f"{key} is no name")
    return [f"--weights {shlex.quote(value)}" if key == "runtime.weights" else f"--set {shlex.quote(f'{key}={value}')}"]


def _adapters(value: object) -> tuple[LoraFile, ...]:
    files = LoraFile.of_list(value)
    if not isinstance(files, tuple):
        raise ValueError("loras is no list")
    try:
        return tuple(LoraFile.model_validate(file) for file in files)
    except ValidationError as error:
        raise ValueError("loras is no list of adapters") from error


def _has_value(given: Given | None) -> bool:
    value = None if given is None else given.value
    return bool(value) and not (isinstance(value, str) and value.strip().lower() in NO_VALUE)


def _usual_format(saved: Layer) -> MediaFormat:
    frames = saved.get("video.num_frames")
    return MediaFormat.PNG if frames is not None and str(frames.value) == "1" else MediaFormat.MP4


def _at(values: Mapping[str, Any], key: str) -> object:
    *sections, name = key.split(".")
    for section in sections:
        values = values[section]
    return values[name]
