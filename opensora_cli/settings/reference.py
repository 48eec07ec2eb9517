"""Settings files (`.py`) of the reference implementation in the terms of osora.

A setting is carried over by the tables of names below, or by the function of its section. The names of all others are
reported, unless their value is in `_USUAL`.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from opensora_cli.core.conditions import CONDITION_MODES
from opensora_cli.core.exceptions import FileProblem
from opensora_cli.settings.base import nested
from opensora_cli.settings.enums import ModelName
from opensora_cli.settings.files import read_yaml
from opensora_cli.settings.python_config import read_python_config

Found = Iterator[tuple[str, object]]
"""Settings of osora by dotted key."""
Sections = tuple[dict[str, Any], list[str]]
"""Settings, nested as in a YAML file, and the names that were not carried over."""

_TRANSFORMER = (
    *("in_channels", "vec_in_dim", "context_in_dim", "hidden_size", "mlp_ratio", "num_heads", "depth"),
    *("depth_single_blocks", "axes_dim", "theta", "qkv_bias", "guidance_embed", "patch_size"),
)
_CAUSAL = (
    *("layers_per_block", "latent_channels", "block_out_channels", "scale_factor", "shift_factor"),
    *("time_compression_ratio", "spatial_compression_ratio"),
)
_DEEP = ("scaling_factor", "spatial_tile_size", "temporal_tile_size", "tile_overlap_factor")
_FLAT = ("ch", "ch_mult", "num_res_blocks", "z_channels", "scale_factor", "shift_factor")
_TILING = {"use_spatial_tiling": "vae.spatial_tiling", "use_temporal_tiling": "vae.temporal_tiling"}
_AUTOENCODERS: dict[str, tuple[str, dict[str, str]]] = {
    "hunyuan_vae": ("hunyuan", {**_TILING, **{name: f"vae.{name}" for name in _CAUSAL}}),
    "dc_ae": ("dc_ae", {**_TILING, **{name: f"vae.dc_ae.{name}" for name in _DEEP}}),
    "autoencoder_2d": ("flux_ae", {**_TILING, **{name: f"vae.flux_ae.{name}" for name in _FLAT}}),
}
_SAMPLING = {
    "resolution": "video.resolution",
    "aspect_ratio": "video.aspect_ratio",
    "num_frames": "video.num_frames",
    "num_steps": "sampling.num_inference_steps",
    "guidance": "sampling.guidance_scale",
    "guidance_img": "sampling.image_guidance_scale",
}
_OF_BOTH = {
    **{f"model.{name}": f"model.{name}" for name in (*_TRANSFORMER, "cond_embed")},
    "t5.max_length": "text.t5_max_length",
    "clip.max_length": "text.clip_max_length",
}
_OF_GENERATION = {
    **_OF_BOTH,
    **{f"sampling_option.{name}": ours for name, ours in _SAMPLING.items()},
    "sampling_option.flow_shift": "sampling.flow_shift",
    "sampling_option.text_osci": "sampling.text_oscillation",
    "sampling_option.image_osci": "sampling.image_oscillation",
    "sampling_option.scale_temporal_osci": "sampling.temporal_image_scaling",
    # A name that stands alone wins over the one in sampling_option.
    **_SAMPLING,
    "cond_type": "condition.mode",
    "save_dir": "output.path",
    "num_sample": "sampling.num_samples",
    "prompt": "prompt",
    "prompt_refine": "refine.prompt",
    "ref": "condition.references",
}
_OF_TRAINING = {
    **_OF_BOTH,
    "dataset.data_path": "data.table",
    "dataset.fps_max": "data.fps_max",
    "num_workers": "data.workers",
    "prefetch_factor": "data.prefetch",
    "dropout_ratio.t5": "train_mmdit.t5_dropout",
    "dropout_ratio.clip": "train_mmdit.clip_dropout",
    "t5.from_pretrained": "train_mmdit.files.t5",
    "clip.from_pretrained": "train_mmdit.files.clip",
    "optim.lr": "optimizer.learning_rate",
    "optim.eps": "optimizer.eps",
    "optim.weight_decay": "optimizer.weight_decay",
    "grad_clip": "optimizer.max_grad_norm",
    "warmup_steps": "optimizer.warmup_steps",
    "lr_scheduler.warmup_steps": "optimizer.warmup_steps",
    "ema_decay": "loop.ema_decay",
    "log_every": "loop.log_every",
    "seed": "loop.seed",
    "sigma_min": "train_mmdit.sigma_min",
    "outputs": "output",
    "ckpt_every": "checkpoints.every",
    "keep_n_latest": "checkpoints.keep",
    "dtype": "precision.compute",
    "vae_loss_config.perceptual_loss_weight": "train_vae.perceptual_weight",
    "mixed_image_ratio": "train_vae.single_frame_share",
    "discriminator.n_layers": "train_vae.discriminator.layers",
    "gen_loss_config.disc_weight": "train_vae.discriminator.weight",
    "disc_loss_config.disc_start": "train_vae.discriminator.start_step",
    "optim_discriminator.lr": "train_vae.discriminator.learning_rate",
}
_USUAL = """
accumulation_steps=1 batch_size=1 disc_factor=1 disc_factor=1.0 pp_size=1 temporal_reduction=4
in_channels=3 out_channels=3 out_ch=3 input_nc=3 resolution=256 dropout=0 dropout=0.0
encoder_add_residual=False encoder_slice_t=False decoder_add_residual=False decoder_slice_t=False
from_pretrained=None plugin=None plugin_ae=None plugin_config=None plugin_config_ae=None guidance_img=None
prompt_as_path=False save_prefix= grad_checkpoint=False use_t2i2v=False use_cosine_scheduler=False
offload_model=True offload_model=False enable_sequence_parallelism=True enable_sequence_parallelism=False
cond_type=t2v cond_type=None method=i2v shift=True adamw_mode=True cls=HybridAdam cls=AdamW cls=Adam
type=flux type=text_embedder type=text type=video_text type=N_Layer_discriminator_3D transform_name=resize_crop
conv_cls=conv3d disc_loss_type=hinge mixed_strategy=mixed_video_image
"""
"""Values that need no setting here, by the last part of the name. Without references `t2v` is chosen anyway."""
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_FOLDER = "ckpts"
_DEEP_NAME = "dc-ae-f32t4c128"


def read_settings(
    path: Path, read_reference: Callable[[Path], Sections], report: Callable[[str], None]
) -> Mapping[str, object]:
    """Return the sections in a YAML file, or those that `read_reference` finds in a `.py` file.

    `report` gets a line with the names that are not carried over. Raises FileProblem as these readers do.
    """
    if path.suffix != ".py":
        return read_yaml(path)
    sections, left = read_reference(path)
    if left:
        report(f"{path}: not carried over: {', '.join(left)}")
    return sections


def is_for_training(path: Path) -> bool:
    """Return whether a `.py` file is for training. Errors are those of `read_python_config`."""
    return "sampling_option" not in read_python_config(path)


def read_reference_generation(path: Path, *, num_devices: int) -> Sections:
    """Read a `.py` file for sampling in the terms of `GenerateSettings`.

    A model is split over at most `num_devices`. Raises FileProblem if the file is missing, is not data, is of another
    kind of model, or is not for sampling.
    """
    values = _Values(path)
    if not values.has("sampling_option") and any(map(values.has, ("optim", "bucket_config", "vae_loss_config"))):
        raise FileProblem(f"{path} is not for sampling", hint=f"use osora train or osora vae with --config {path}")
    found: dict[str, object] = {}
    is_deep = values.get("ae.type") == "dc_ae"
    if values.has("model"):
        found["model.name"] = (ModelName.OPEN_SORA_V2_DC_AE if is_deep else ModelName.OPEN_SORA_V2).value
        found["model.cond_embed"] = False
        found.update(_weights_to_sample(values))
    if values.has("ae"):
        found.update(_autoencoder(values, "ae"))
    if values.has("sampling_option"):
        found["picture.first"] = False
        found.update(_sampling(values, is_deep=is_deep))
    if values.pop("use_t2i2v", False):
        found.update(_picture(values))
    found.update(_runtime_dtype(values))
    degrees = _degrees(values)
    if num_devices > 1:
        found.update({name: min(degree, num_devices) for name, degree in degrees.items()})
    for name in ("plugin", "patch_size"):  # They decide nothing beside plugin_config and model.patch_size.
        values.pop(name, None)
    return values.carried_over(found, _OF_GENERATION)


def read_reference_autoencoder(path: Path) -> Sections:
    """Read a `.py` file for the autoencoders in the terms of `ReconstructSettings`.

    A file that trains one is read in the terms of `TrainSettings`. Errors are those of `read_reference_generation`.
    """
    values = _Values(path)
    if values.has("vae_loss_config"):
        return read_reference_training(path)
    if not values.has("model") or values.has("sampling_option"):
        raise FileProblem(f"{path} is not for an autoencoder", hint="configs/vae/inference/ of the reference has these")
    found = {**dict(_autoencoder(values, "model")), **dict(_runtime_dtype(values))}
    if (file := values.text("model.from_pretrained")) is not None:
        place = PurePosixPath(file)
        found["weights.file"] = place.name
        if str(place.parent) != _FOLDER:
            found["runtime.weights"] = str(place.parent)
    buckets = [values.pop(name) for name in tuple(values) if name.startswith("bucket_config.")]
    lengths = [length for row in buckets if isinstance(row, dict) for length in row if isinstance(length, int)]
    if lengths:
        found["clip.num_frames"] = max(lengths)
    values.pop("plugin", None)  # One device is used.
    return values.carried_over(found, {"save_dir": "output.folder"})


def read_reference_training(path: Path) -> Sections:
    """Read a `.py` file for training in the terms of `TrainSettings`.

    Raises FileProblem if the file is missing, is not data, is of another kind of model, or is not for training.
    """
    values = _Values(path)
    if values.has("sampling_option"):
        raise FileProblem(f"{path} is for sampling", hint=f"use osora generate --config {path}")
    found: dict[str, object] = {"optimizer.warmup_steps": 0}
    if values.has("vae_loss_config"):
        found["target"] = "vae"
        if values.has("model"):
            found.update(_autoencoder(values, "model"))
        found.update(values.renamed({"model.from_pretrained": "init"}))
        found.update(_losses(values, is_causal=found.get("vae.kind") == "hunyuan"))
        if values.pop("plugin", None) is not None:
            found["strategy"] = "ddp"  # Autoencoders are small.
            values.left.append("plugin")
    else:
        found["target"] = "mmdit"
        if values.has("ae"):
            found.update(_autoencoder(values, "ae"))
        found.update(_transformer(values))
        found.update(_strategy(values))
    found.update(_buckets_and_optimizer(values))
    return values.carried_over(found, _OF_TRAINING)


class _Values(dict[str, Any]):
    """The settings of a file by dotted name, which are popped as they are carried over."""

    def __init__(self, path: Path) -> None:
        super().__init__(_leaves(read_python_config(path), ""))
        self.path = path
        self.left: list[str] = []
        """Names that are not carried over, besides those that remain."""
        self._all = tuple(self)
        usual = set(_USUAL.split())
        for name in self._all:
            # Lists may be long.
            if not isinstance(self[name], list | tuple) and f"{name.rpartition('.')[2]}={self[name]}" in usual:
                del self[name]
        self._of_interest = tuple(self)

    def has(self, section: str) -> bool:
        """Return whether the file has a section, or a setting of this name."""
        return any(f"{name}.".startswith(f"{section}.") for name in self._all)

    def text(self, name: str) -> str | None:
        """Pop a text. Raises FileProblem if it is something else."""
        value = self.pop(name, None)
        if value is not None and not isinstance(value, str):
            raise FileProblem(f"{self.path}: {name}={value!r:.80} must be a text")
        return value

    def renamed(self, names: Mapping[str, str]) -> Found:
        """Pop the settings that are there, and yield them under their names here."""
        yield from ((ours, self.pop(theirs)) for theirs, ours in names.items() if theirs in self)

    def drop(self, name: str, value: object) -> None:
        """Drop a setting that has this value."""
        if name in self and self[name] == value:
            del self[name]

    def carried_over(self, found: dict[str, object], same: Mapping[str, str]) -> Sections:
        """Return `found` and the settings of the `same` meaning, nested, and the names that remain.

        A section of which nothing is carried over is named as a whole.
        """
        found |= dict(self.renamed(same))
        used = {name.partition(".")[0] for name in self._of_interest if name not in self}
        remaining = (name if (top := name.partition(".")[0]) in used else top for name in self)
        return nested(found), list(dict.fromkeys((*self.left, *remaining)))


def _leaves(values: Mapping[str, Any], prefix: str) -> Found:
    for key, value in values.items():
        if isinstance(value, dict) and value and all(isinstance(name, str) for name in value):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _autoencoder(values: _Values, section: str) -> Found:
    theirs = values.text(f"{section}.type")
    if theirs not in _AUTOENCODERS:
        raise FileProblem(
            f"{values.path}: {section}.type={theirs} is no autoencoder that osora knows",
            hint=f"these are: {', '.join(_AUTOENCODERS)}",
        )
    kind, names = _AUTOENCODERS[theirs]
    yield "vae.kind", kind
    yield from values.renamed({f"{section}.{name}": ours for name, ours in names.items()})
    if kind == "dc_ae" and values.get(f"{section}.model_name") in (None, _DEEP_NAME):
        for name in (f"{section}.model_name", f"{section}.from_scratch", "ae_spatial_compression"):
            values.pop(name, None)


def _weights_to_sample(values: _Values) -> Found:
    """Yield the names of weights below the folder of the transformer; a file elsewhere keeps its path."""
    files = {part: values.text(f"{part}.from_pretrained") for part in ("model", "ae", "t5", "clip")}
    files["model"] = values.text("ckpt_path") or files["model"]
    folder = PurePosixPath(files["model"]).parent if files["model"] else PurePosixPath(_FOLDER)
    if str(folder) != _FOLDER:
        yield "runtime.weights", str(folder)
    for part, ours in (("model", "transformer"), ("ae", "vae"), ("t5", "t5"), ("clip", "clip")):
        if (file := files[part]) is not None:
            place = PurePosixPath(file)
            yield f"files.{ours}", str(place.relative_to(folder) if place.is_relative_to(folder) else place)


def _sampling(values: _Values, *, is_deep: bool) -> Found:
    option = "sampling_option"
    if values.get(f"{option}.seed") is not None:
        yield "sampling.seed", values.pop(f"{option}.seed")
    if values.get(f"{option}.shift") is False:
        yield "sampling.flow_shift", int(not values.pop(f"{option}.shift"))
    if f"{option}.resolution" not in values:
        yield from values.renamed({f"{option}.{side}": f"video.{side}" for side in ("height", "width")})
    if is_deep:
        yield from values.renamed({f"{option}.is_causal_vae": "video.causal_lengths"})
    values.drop(f"{option}.is_causal_vae", True)
    # The reference has these where a file names none.
    yield "video.fps", values.pop("fps_save", 16)
    score = values.pop("motion_score", None)
    if score == "dynamic":
        yield "refine.motion_score", True
    else:
        yield "prompt_suffix.motion_score", score


def _picture(values: _Values) -> Found:
    """Yield how a picture is made first, and given to the video."""
    yield "picture.first", True
    yield from values.renamed({"img_resolution": "picture.resolution"})
    yield from values.renamed({f"img_flux.{name}": f"picture.model.{name}" for name in (*_TRANSFORMER, "cond_embed")})
    for section, ours in (("img_flux", "transformer"), ("img_flux_ae", "vae")):
        if (file := values.text(f"{section}.from_pretrained")) is not None:
            place = PurePosixPath(file)
            yield f"picture.files.{ours}", place.name if str(place.parent) == _FOLDER else str(place)
    if values.has("img_flux_ae"):
        yield from ((f"picture.{key}", value) for key, value in _autoencoder(values, "img_flux_ae"))


def _runtime_dtype(values: _Values) -> Found:
    if isinstance(name := values.get("dtype"), str) and name in _DTYPES:
        yield "runtime.dtype", _DTYPES[values.pop("dtype")]


def _degrees(values: _Values) -> dict[str, int]:
    """Return over how many devices a model is split, by setting, without those that are 1."""
    is_ring = values.pop("plugin_config.sequence_parallelism_mode", None) == "ring_attn"
    found = {}
    for theirs, ours in (("tp_size", "tensor_parallel"), ("sp_size", "ring" if is_ring else "ulysses")):
        degree = values.pop(f"plugin_config.{theirs}", 1)
        if type(degree) is not int or degree < 1:
            raise FileProblem(f"{values.path}: plugin_config.{theirs}={degree!r:.80} must be a number from 1 on")
        if degree > 1:
            found[f"parallel.{ours}_degree"] = degree
    return found


def _transformer(values: _Values) -> Found:
    yield from values.renamed({"model.from_pretrained": "init"})
    if (file := values.text("ae.from_pretrained")) is not None:
        yield "weights", [str(PurePosixPath(file).parent)]
        yield "train_mmdit.files.vae", PurePosixPath(file).name
    yield "model.cond_embed", False
    for mode in CONDITION_MODES:
        default = int(mode == "t2v" and not values.has("condition_config"))
        yield f"train_mmdit.mode_weights.{mode}", values.pop(f"condition_config.{mode}", default)
    # Names that other lines of the published files use.
    for name in ("lr", "eps", "patch_size", "grad_ckpt_settings"):
        values.pop(name, None)
    blocks = values.pop("model.grad_ckpt_settings", None)
    if not values.pop("grad_checkpoint", False):
        return
    yield "memory.checkpointing", True
    match blocks, values.get("model.depth", 19), values.get("model.depth_single_blocks", 38):
        case ([int(double), int(single)], int(depth), int(depth_single)):
            # The reference's number is of all blocks where there are fewer.
            yield "memory.checkpoint_double_blocks", double if double < depth else None
            yield "memory.checkpoint_single_blocks", single if single < depth_single else None
    if buffer := values.pop("grad_ckpt_buffer_size", 0):
        yield "memory.activation_offload", "all"
        yield "memory.activation_buffer", buffer


def _losses(values: _Values, *, is_causal: bool) -> Found:
    weight = values.pop("vae_loss_config.kl_loss_weight", 0)
    # Theirs is summed over latents and divided by pixels: 16 channels for 3 x 4 x 8 x 8 of them.
    yield "train_vae.kl_weight", weight * 16 / 768 if is_causal and isinstance(weight, int | float) else weight
    # The discriminator shares these with the autoencoder.
    for name in ("eps", "weight_decay", "betas"):
        values.drop(f"optim_discriminator.{name}", values.get(f"optim.{name}"))
    values.drop("gen_loss_config.gen_start", values.get("disc_loss_config.disc_start"))
    values.drop("disc_lr_scheduler.warmup_steps", values.get("lr_scheduler.warmup_steps", 0))


def _strategy(values: _Values) -> Found:
    plugin = values.pop("plugin", None)
    if plugin == "hybrid":
        stage, degrees = values.pop("plugin_config.zero_stage", 0), _degrees(values)
        yield "strategy", "hybrid" if degrees else f"zero{stage}" if stage else "ddp"
        yield from degrees.items()
    elif plugin is not None:
        yield "strategy", plugin


def _buckets_and_optimizer(values: _Values) -> Found:
    buckets = {}
    for name in [name for name in values if name.startswith("bucket_config.")]:
        resolution, _, ratio = name.removeprefix("bucket_config.").partition("_ar")
        buckets[resolution] = values.pop(name)
        if ratio:
            values.left.append(f"the aspect ratio of {name}")
    if buckets:
        yield "data.buckets", buckets
    match values.get("optim.betas", (0.9, 0.999)):
        case [first, second]:
            yield from (("optimizer.beta1", first), ("optimizer.beta2", second))
            values.pop("optim.betas", None)
    if values.pop("use_cosine_scheduler", False):
        yield "optimizer.schedule", "cosine"
