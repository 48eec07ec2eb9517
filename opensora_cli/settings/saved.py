"""Settings that a file of an earlier run may bring: the description of its video, and nothing else.

A sidecar or a file of latents may come from somebody else. The command line, the environment, `--config` and this
machine alone decide where to write, what to replace, which server to ask, which weights to read and which devices to
use.
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


def _keys(sections: Mapping[str, str]) -> frozenset[str]:
    return frozenset(
        f"{section}.{name}" if section else name for section in sections for name in sections[section].split()
    )


_MODEL = (
    "name in_channels vec_in_dim context_in_dim hidden_size mlp_ratio num_heads depth depth_single_blocks axes_dim "
    "theta qkv_bias guidance_embed cond_embed patch_size predicts_data"
)
_VAE = {
    "vae": "kind latent_channels block_out_channels layers_per_block norm_num_groups sample_size sample_tsize "
    "tile_overlap_factor scale_factor shift_factor time_compression_ratio spatial_compression_ratio spatial_tiling "
    "temporal_tiling",
    "vae.dc_ae": "latent_channels block_types width_list encoder_depth_list decoder_depth_list temporal "
    "spatial_tile_size temporal_tile_size tile_overlap_factor scaling_factor",
    "vae.flux_ae": "z_channels ch ch_mult num_res_blocks scale_factor shift_factor tile_size tile_overlap_factor",
}

DESCRIPTION = _keys(
    {
        "": "prompt prompts_at negative_prompt compile",
        "model": _MODEL,
        "text": "t5_max_length clip_max_length known_words_warning",
        "video": "resolution aspect_ratio height width num_frames fps resolutions aspect_ratios max_frames extend "
        "causal_lengths",
        "sampling": "num_inference_steps solver fast timesteps stop_at guidance_scale image_guidance_scale "
        "text_oscillation image_oscillation mean_guidance_of step_cache temporal_image_scaling guidance_interval "
        "flow_shift seed num_samples batch_size embedded_guidance",
        # References are read, never written, and sent to no server: see `load._refuse_sending_files`.
        "condition": "mode references fit ref_fps video_latent_frames seamless easy_latent_frames",
        # The prompt before it was rewritten. Results are named after it.
        "refine": "original",
        "picture": "first save resolution own_model",
        "picture.model": _MODEL,
        "draft": "resolution strength",
        "prompt_suffix": "motion_score add_fps",
        # Files beside the result, which are named after it.
        "output": "format metadata last_frame save_latents save_state_every preview_every",
        # Settings that change the bits of the result.
        "runtime": "model_choice dtype threads attention",
        "precision": "tf32 linear",
        "memory": "fp8_storage",
        "parallel": "compression",
    }
    | {f"{place}{section}": names for place in ("", "picture.") for section, names in _VAE.items()}
)
"""Settings that a file of an earlier run may bring. No others are taken."""

RESERVED = _keys(
    {
        "": "from_latents resume loras",
        "files": "transformer vae t5 clip hub_repo",
        "picture.files": "transformer vae hub_repo",
        "refine": "prompt motion_score instructions timeout_s tries",
        "output": "path name_from overwrite explore",
        "runtime": "weights device prompt_cache prompt_cache_limit",
        "memory": "offload resident_blocks limit host_weights",
        "parallel": "gpus devices nnodes all_to_all fast_link_ranks watch watch_limit_s data_parallel_degree "
        "ulysses_degree ring_degree cfg_parallel_degree tensor_parallel_degree ulysses_chunks",
    }
)
"""Settings that are never taken from such a file. They name files, folders, servers and devices."""

TYPED = frozenset({"refine.prompt", "refine.motion_score"})
"""Reserved settings that only the command line can set beside such a file, whose prompt is rewritten already."""

_FILES = tuple(sorted(key for key in RESERVED if "files." in key))
_NEEDED = ("runtime.weights", *_FILES, "loras")
_SAMPLED_WITH = frozenset(_NEEDED) - {"runtime.weights", "files.vae", "files.hub_repo"}
"""Files that decoding does not read. A file of latents records them."""


def description(saved: Layer, *, decodes: bool) -> dict[str, Given]:
    """Return the saved settings that a run takes. If it decodes latents, it also records the weights that made them."""
    keys = DESCRIPTION | _SAMPLED_WITH if decodes else DESCRIPTION
    taken = {key: given for key, given in saved.items() if key in keys}
    score = taken.get("prompt_suffix.motion_score")
    if score is not None and score.value == "auto":
        # It would ask a server.
        del taken["prompt_suffix.motion_score"]
    frames = saved.get("video.num_frames")
    usual = MediaFormat.PNG if frames is not None and str(frames.value) == "1" else MediaFormat.MP4
    ending = named_format(saved.get("output.path"))
    if not _has_value(taken.get("output.format")) and ending not in (None, usual):
        taken["output.format"] = Given(str(ending), saved["output.path"].source)
    return taken


def named_format(path: Given | None) -> MediaFormat | None:
    """Return the format that the ending of a file names, or None for a folder."""
    ending = "" if path is None else PurePath(str(path.value)).suffix.lower().removeprefix(".")
    return MediaFormat(ending) if ending in list(MediaFormat) else None


def files_needed(saved: Layer, settings: GenerateSettings, *, decodes: bool, given: Collection[str]) -> dict[str, str]:
    """Return the flags, by key, for the weights and adapters of an earlier run that differ from those of `settings`.

    Keys in `given` are omitted because the user chose other files.

    Raises:
        ValueError: `saved` is malformed.
    """
    values = settings.model_dump(mode="json")
    needed = {}
    for key in _NEEDED:
        if key in given or not _has_value(saved.get(key)) or (decodes and key in _SAMPLED_WITH):
            continue
        before = saved[key].value
        if before != _at(values, key):
            needed[key] = " ".join(map(escaped, _flags(key, before)))
    return needed


def flags_again(settings: GenerateSettings, usual: GenerateSettings, *, decodes: bool) -> list[str]:
    """Return the flags that continuing saved latents of `settings` needs. `usual` has the settings of the preset."""
    values = settings.model_dump(mode="json")
    saved = {key: Given(_at(values, key), "") for key in _NEEDED}
    flags = [*files_needed(saved, usual, decodes=decodes, given=()).values()]
    device = settings.runtime.device
    return flags if device == "auto" else [*flags, f"--device {device}"]


def recorded_adapters(saved: Layer) -> dict[str, LoraFile]:
    """Return the adapters of an earlier run by path. Raises ValueError if `saved` is malformed."""
    return {lora.path: lora for lora in _adapters(saved["loras"].value)} if "loras" in saved else {}


def _flags(key: str, value: object) -> list[str]:
    if key == "loras":
        return [f"--lora {shlex.quote(lora.shown)}" for lora in _adapters(value)]
    if not isinstance(value, str):
        raise ValueError(f"{key} is not a name")
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


def _at(values: Mapping[str, Any], key: str) -> object:
    *sections, name = key.split(".")
    for section in sections:
        values = values[section]
    return values[name]
