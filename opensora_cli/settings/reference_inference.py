"""Configurations of the reference implementation for sampling, and for its autoencoders, as settings of osora."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

from opensora_cli.core.exceptions import FileProblem
from opensora_cli.settings.enums import ModelName
from opensora_cli.settings.reference import (
    TRANSFORMER_SIZES,
    ReferenceConfig,
    ReferenceValues,
    autoencoder,
    carried_over,
    plugin_degrees,
)
from opensora_cli.settings.reference_training import read_reference_training

_DEFAULT_FOLDER = "ckpts"
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_DC_AE = "dc-ae-f32t4c128"

_SAMPLING = {
    "resolution": "video.resolution",
    "aspect_ratio": "video.aspect_ratio",
    "num_frames": "video.num_frames",
    "num_steps": "sampling.num_inference_steps",
    "guidance": "sampling.guidance_scale",
    "guidance_img": "sampling.image_guidance_scale",
}
# Of the same meaning and form in both; what stands on its own wins over what is in sampling_option.
_SAME = {
    **TRANSFORMER_SIZES,
    **{f"sampling_option.{name}": ours for name, ours in _SAMPLING.items()},
    "sampling_option.flow_shift": "sampling.flow_shift",
    "sampling_option.text_osci": "sampling.text_oscillation",
    "sampling_option.image_osci": "sampling.image_oscillation",
    "sampling_option.scale_temporal_osci": "sampling.temporal_image_scaling",
    **_SAMPLING,
    "model.cond_embed": "model.cond_embed",
    "t5.max_length": "text.t5_max_length",
    "clip.max_length": "text.clip_max_length",
    "save_dir": "output.path",
    "num_sample": "sampling.num_samples",
    "prompt": "prompt",
    "prompt_refine": "refine.prompt",
    "ref": "condition.references",
}
_IMPLIED: dict[str, tuple[object, ...]] = {
    "batch_size": (1,),
    "dataset.type": ("text",),
    "model.type": ("flux",),
    "t5.type": ("text_embedder",),
    "clip.type": ("text_embedder",),
    # Without references it is t2v, with them what suits them.
    "cond_type": ("t2v",),
    "offload_model": (True, False),
    "prompt_as_path": (False,),
    "save_prefix": ("",),
    "sampling_option.method": ("i2v",),
    "sampling_option.shift": (True,),
    "plugin": (None, "hybrid", "zero2"),
    "plugin_config": (None,),
}
_DECIDES_NOTHING = "decides nothing here"
_ONE_BY_ONE = "videos are made one by one"
_REASONS = {
    "ae.model_name": "sizes are those of vae.dc_ae",
    "ae_spatial_compression": "follows from vae.kind",
    "batch_size": _ONE_BY_ONE,
    "dataset": "the prompt is given on the command line",
    "end_index": "the prompt is given on the command line",
    "model.fused_qkv": "the layout of a file is found out",
    "model.strict_load": "loading is always strict",
    "model.use_liger_rope": "the layout of a file is found out",
    "motion_score": "must be a number here, or auto: --motion-score N",
    "num_samples": "the prompt is given on the command line",
    "num_workers": _ONE_BY_ONE,
    "pretrained_lora_path": "give it with --lora",
    "prefetch_factor": _ONE_BY_ONE,
    "prompt_as_path": "files are named after prompt and seed",
    "sampling_option.height": "resolution and aspect_ratio win over it",
    "sampling_option.is_causal_vae": "follows from vae.kind",
    "sampling_option.seed": "the noise always has a seed: --seed N",
    "sampling_option.temporal_reduction": "follows from vae.kind",
    "sampling_option.width": "resolution and aspect_ratio win over it",
    "save_prefix": "files are named after prompt and seed",
    "seed": f"{_DECIDES_NOTHING}; sampling_option.seed is that of the noise",
    "start_index": "the prompt is given on the command line",
    "t5.shardformer": "devices share T5 by themselves",
}
_REASONS_OF_AUTOENCODER = {
    "batch_size": _ONE_BY_ONE,
    "bucket_config": "files keep their sizes",
    "dataset": "files are given on the command line",
    "model.model_name": "sizes are those of vae.dc_ae",
    "num_bucket_build_workers": _ONE_BY_ONE,
    "num_workers": _ONE_BY_ONE,
    "plugin": "one device is used",
    "prefetch_factor": _ONE_BY_ONE,
    "seed": _DECIDES_NOTHING,
}
_OF_TRAINING = ("optim", "bucket_config", "vae_loss_config")


def read_reference_generation(path: Path, *, num_devices: int) -> ReferenceConfig:
    """Read a `.py` file of the reference implementation for sampling in the terms of `GenerateSettings`.

    A model is split over at most `num_devices`, as there. What decides nothing, or is so here in any case, is left out
    without a word. Raises FileProblem if the file is missing, is not data, is of another kind of model, or is not for
    sampling.
    """
    values = ReferenceValues(path)
    if not values.has("sampling_option") and any(values.has(name) for name in _OF_TRAINING):
        raise FileProblem(f"{path} is not for sampling", hint=f"use osora train or osora vae with --config {path}")
    found: dict[str, object] = {}
    if values.has("model"):
        found["model.name"] = (ModelName.OPEN_SORA_V2_DC_AE if _has_dc_ae(values) else ModelName.OPEN_SORA_V2).value
        # False where it is not written.
        found["model.cond_embed"] = False
        found.update(_files(values))
    if values.has("ae"):
        found.update(autoencoder(values, "ae", path))
        _drop_sizes(values, found, "ae")
    if values.has("sampling_option"):
        found.update(_sampling(values))
    found.update(_picture(values, path))
    found.update(_dtype(values))
    if values.peek("cond_type") not in (None, "t2v"):
        found["condition.mode"] = values.take("cond_type")
    if values.has("plugin_config") and values.peek("plugin_config") is not None:
        degrees = plugin_degrees(values)
        found.update({name: min(degree, num_devices) for name, degree in degrees.items() if num_devices > 1})
    _leave_groups(values)
    values.take("patch_size")
    return carried_over(values, found, same=_SAME, implied=_IMPLIED, reasons=_REASONS)


def read_reference_autoencoder(path: Path) -> ReferenceConfig:
    """Read a `.py` file of the reference implementation for its autoencoders in the terms of `ReconstructSettings`.

    One for training is returned in the terms of `TrainSettings`. Errors as `read_reference_generation`.
    """
    values = ReferenceValues(path)
    if values.has("vae_loss_config"):
        return read_reference_training(path)
    if not values.has("model") or values.has("sampling_option"):
        raise FileProblem(f"{path} is not for an autoencoder", hint="configs/vae/inference/ of the reference has these")
    found = autoencoder(values, "model", path)
    _drop_sizes(values, found, "model")
    if (file := values.take_text("model.from_pretrained")) is not None:
        place = PurePosixPath(file)
        found["weights.file"] = place.name
        if str(place.parent) != _DEFAULT_FOLDER:
            found["runtime.weights"] = str(place.parent)
    found.update(_dtype(values))
    buckets = values.peek("bucket_config")
    lengths = [length for row in _mappings(buckets) for length in row if isinstance(length, int)]
    if lengths:
        found["clip.num_frames"] = max(lengths)
    return carried_over(values, found, same={"save_dir": "output.folder"}, implied={}, reasons=_REASONS_OF_AUTOENCODER)


def _mappings(value: object) -> list[Mapping[object, object]]:
    """Return the mappings in a mapping; whatever else a file holds is not for us."""
    return [below for below in value.values() if isinstance(below, Mapping)] if isinstance(value, Mapping) else []


def _files(values: ReferenceValues) -> Iterator[tuple[str, object]]:
    """Yield where the weights are: names below the folder of the transformer's."""
    files = {part: values.take_text(f"{part}.from_pretrained") for part in ("model", "ae", "t5", "clip")}
    if (alone := values.take_text("ckpt_path")) is not None:
        files["model"] = alone
    transformer = files["model"]
    folder = PurePosixPath(transformer).parent if transformer else PurePosixPath(_DEFAULT_FOLDER)
    if str(folder) != _DEFAULT_FOLDER:
        yield "runtime.weights", str(folder)
    for part, ours in (("model", "transformer"), ("ae", "vae"), ("t5", "t5"), ("clip", "clip")):
        if (file := files[part]) is not None:
            place = PurePosixPath(file)
            is_below = place.is_relative_to(folder)
            # Elsewhere it stays as it is: an absolute path, or the repository of a text encoder.
            yield f"files.{ours}", str(place.relative_to(folder) if is_below else place)


def _sampling(values: ReferenceValues) -> Iterator[tuple[str, object]]:
    option = "sampling_option"
    if values.peek(f"{option}.seed") is not None:
        yield "sampling.seed", values.take(f"{option}.seed")
    if values.peek(f"{option}.shift") is False:
        values.take(f"{option}.shift")
        yield "sampling.flow_shift", 1
    if values.peek(f"{option}.guidance_img", 0) is None:
        values.take(f"{option}.guidance_img")
    if not values.has(f"{option}.resolution"):
        for name in ("height", "width"):
            if values.has(f"{option}.{name}"):
                yield f"video.{name}", values.take(f"{option}.{name}")
    # What they are where they are not written.
    yield "video.fps", values.take("fps_save", 16)
    score = values.peek("motion_score")
    if score is None or str(score).isdigit():
        values.take("motion_score")
        yield "prompt_suffix.motion_score", score
    elif score == "dynamic":
        values.take("motion_score")
        yield "refine.motion_score", True
    if _has_dc_ae(values) and values.has(f"{option}.is_causal_vae"):
        yield "video.causal_lengths", values.take(f"{option}.is_causal_vae")
    elif values.peek(f"{option}.is_causal_vae") is True:
        values.take(f"{option}.is_causal_vae")
    if values.peek(f"{option}.temporal_reduction") == 4:
        values.take(f"{option}.temporal_reduction")


def _picture(values: ReferenceValues, path: Path) -> Iterator[tuple[str, object]]:
    """Yield how a picture is made first, where one is."""
    if not values.peek("use_t2i2v"):
        if values.has("sampling_option"):
            yield "picture.first", False
        return
    yield "picture.first", True
    if (resolution := values.take_text("img_resolution")) is not None:
        yield "picture.resolution", resolution
    for name in ("type", "fused_qkv", "use_liger_rope", "strict_load"):
        values.take(f"img_flux.{name}")
    for theirs in (*TRANSFORMER_SIZES, "model.cond_embed"):
        name = theirs.partition(".")[2]
        if values.has(f"img_flux.{name}"):
            yield f"picture.model.{name}", values.take(f"img_flux.{name}")
    for section, ours in (("img_flux", "transformer"), ("img_flux_ae", "vae")):
        if (file := values.take_text(f"{section}.from_pretrained")) is not None:
            place = PurePosixPath(file)
            is_usual = str(place.parent) == _DEFAULT_FOLDER
            yield f"picture.files.{ours}", place.name if is_usual else str(place)
    if values.has("img_flux_ae"):
        yield from ((f"picture.{key}", value) for key, value in autoencoder(values, "img_flux_ae", path).items())


def _has_dc_ae(values: ReferenceValues) -> bool:
    return bool(values.peek("ae.type") == "dc_ae")


def _dtype(values: ReferenceValues) -> Iterator[tuple[str, object]]:
    name = values.peek("dtype")
    if isinstance(name, str) and name in _DTYPES:
        values.take("dtype")
        yield "runtime.dtype", _DTYPES[name]


def _drop_sizes(values: ReferenceValues, found: dict[str, object], section: str) -> None:
    if found["vae.kind"] == "dc_ae" and values.peek(f"{section}.model_name") in (None, _DC_AE):
        values.take(f"{section}.model_name")
        values.take(f"{section}.from_scratch")
        values.take("ae_spatial_compression")


def _leave_groups(values: ReferenceValues) -> None:
    """Take what is best listed in one line, and list it."""
    _leave(values, ("plugin_ae", "plugin_config_ae"), "devices share decoding by themselves")
    if not values.take("use_t2i2v"):
        _leave(values, ("img_flux", "img_flux_ae", "img_resolution"), "no picture is made first: --t2i2v makes one")


def _leave(values: ReferenceValues, names: Sequence[str], reason: str) -> None:
    there = [name for name in names if values.take(name) is not None]
    if there:
        values.note(f"{', '.join(there)}: {reason}")
