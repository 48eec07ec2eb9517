"""Training configurations of the reference implementation as settings of `osora train`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from opensora_cli.core.conditions import CONDITION_MODES
from opensora_cli.core.exceptions import FileProblem
from opensora_cli.settings.python_config import read_python_config

_AUTOENCODERS = {"hunyuan_vae": "hunyuan", "dc_ae": "dc_ae", "autoencoder_2d": "flux_ae"}

# Of the same meaning and form in both.
_SAME = {
    **{
        f"model.{key}": f"model.{key}"
        for key in (
            *("in_channels", "vec_in_dim", "context_in_dim", "hidden_size", "mlp_ratio", "num_heads", "depth"),
            *("depth_single_blocks", "axes_dim", "theta", "qkv_bias", "guidance_embed", "patch_size"),
        )
    },
    "dataset.data_path": "data.table",
    "dataset.fps_max": "data.fps_max",
    "num_workers": "data.workers",
    "prefetch_factor": "data.prefetch",
    "dropout_ratio.t5": "train_mmdit.t5_dropout",
    "dropout_ratio.clip": "train_mmdit.clip_dropout",
    "t5.max_length": "text.t5_max_length",
    "clip.max_length": "text.clip_max_length",
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
_OF_AUTOENCODER = {
    "use_spatial_tiling": "vae.spatial_tiling",
    "use_temporal_tiling": "vae.temporal_tiling",
    "scaling_factor": "vae.dc_ae.scaling_factor",
    "spatial_tile_size": "vae.dc_ae.spatial_tile_size",
    "temporal_tile_size": "vae.dc_ae.temporal_tile_size",
    "tile_overlap_factor": "vae.dc_ae.tile_overlap_factor",
    "layers_per_block": "vae.layers_per_block",
    "latent_channels": "vae.latent_channels",
}
# Values that are the default here.
_IMPLIED: dict[str, tuple[object, ...]] = {
    "dataset.type": ("video_text",),
    "dataset.transform_name": ("resize_crop",),
    "model.type": ("flux",),
    "ae.in_channels": (3,),
    "ae.out_channels": (3,),
    "t5.type": ("text_embedder",),
    "clip.type": ("text_embedder",),
    "optim.cls": ("HybridAdam", "AdamW", "Adam"),
    "optim.adamw_mode": (True,),
    "optim_discriminator.cls": ("HybridAdam", "AdamW", "Adam"),
    "optim_discriminator.adamw_mode": (True,),
    "accumulation_steps": (1,),
    "discriminator.type": ("N_Layer_discriminator_3D",),
    "discriminator.input_nc": (3,),
    "discriminator.conv_cls": ("conv3d",),
    "discriminator.from_pretrained": (None,),
    "gen_loss_config.disc_factor": (1,),
    "disc_loss_config.disc_factor": (1,),
    "disc_loss_config.disc_loss_type": ("hinge",),
    "mixed_strategy": ("mixed_video_image",),
}
# Why a line has no place here, by the beginning of its name.
_REASONS = {
    "grad_checkpoint": "is for the transformer's blocks",
    "disc_lr_scheduler": "the discriminator's rate rises and falls with the autoencoder's",
    "accumulation_steps": "set loop.micro_batches to so many times the devices with batches of their own",
    "ae.from_scratch": "weights come from train_mmdit.files.vae",
    "ae.model_name": "sizes are those of vae.dc_ae",
    "ae_spatial_compression": "follows from vae.kind",
    "async_io": "checkpoints are always written in the background",
    "cached_text": "set train_mmdit.cache, which osora data cache fills",
    "cached_video": "set train_mmdit.cache, which osora data cache fills",
    "clip.cache_dir": "text encoders are folders below `weights`",
    "epochs": "a run ends after loop.steps updates",
    "is_causal_vae": "follows from vae.kind",
    "load": "use --resume, or --resume-from FOLDER",
    "load_master_weights": "weights are always kept in fp32",
    "lora_config": "set lora.rank, lora.alpha and lora.targets",
    "model.fused_qkv": "the layout of a file is found out",
    "model.strict_load": "loading is always strict",
    "model.use_liger_rope": "the layout of a file is found out",
    "num_bucket_build_workers": "buckets are filled in one process",
    "pin_memory_cache_pre_alloc_numels": "there is no such cache",
    "plugin_config": "has no counterpart",
    "save_master_weights": "weights are always kept in fp32",
    "t5.cache_dir": "text encoders are folders below `weights`",
    "t5.shardformer": "has no counterpart in training",
    "update_warmup_steps": "schedules count from the first step of a run",
    "wandb_project": "there is TensorBoard instead",
}


@dataclass(frozen=True, slots=True)
class ReferenceTraining:
    """A configuration in the terms of `TrainSettings`."""

    sections: dict[str, Any]
    """Nested, as a YAML file has them."""
    left: tuple[str, ...]
    """A line for each setting that was not carried over: its name, value, and why."""


def read_reference_training(path: Path) -> ReferenceTraining:
    """Read a `.py` file of the reference implementation.

    What decides nothing, or is so here in any case, is left out without a word.
    Raises FileProblem if the file is missing, is not data, or is of another kind of model.
    """
    values = _Values(read_python_config(path))
    trains_vae = values.has("vae_loss_config")
    found: dict[str, object] = {"target": "vae" if trains_vae else "mmdit"}
    found.update(_autoencoder(values, "model" if trains_vae else "ae", path))
    if trains_vae:
        found.update(_vae_training(values, found))
    else:
        found.update(_transformer(values))
        # Names that other lines use.
        for name in ("lr", "eps", "patch_size"):
            values.take(name)
    found.update(_training(values))
    for theirs, ours in _SAME.items():
        if values.has(theirs):
            found[ours] = values.take(theirs)
    for name, usual in _IMPLIED.items():
        if values.has(name) and values.peek(name) in usual:
            values.take(name)
    return ReferenceTraining(_nested(found), tuple(values.left()))


class _Values:
    """The settings of a file by dotted names, of which some have been taken."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self._taken: set[str] = set()
        self._notes: list[str] = []

    def has(self, name: str) -> bool:
        return self._find(name) is not _NOTHING

    def peek(self, name: str, default: Any = None) -> Any:
        value = self._find(name)
        return default if value is _NOTHING else value

    def take(self, name: str, default: Any = None) -> Any:
        self._taken.add(name)
        return self.peek(name, default)

    def note(self, line: str) -> None:
        self._notes.append(line)

    def left(self) -> Iterator[str]:
        yield from self._notes
        for name, value in self._leaves(self._values, ""):
            reason = next((why for start, why in _REASONS.items() if f"{name}.".startswith(f"{start}.")), None)
            yield f"{name}={_shown(value)}: {reason or 'has no counterpart'}"

    def _leaves(self, values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        for key, value in values.items():
            name = f"{prefix}{key}"
            if name in self._taken:
                continue
            if isinstance(value, dict) and value and all(isinstance(below, str) for below in value):
                yield from self._leaves(value, f"{name}.")
            else:
                yield name, value

    def _find(self, name: str) -> Any:
        value: Any = self._values
        for key in name.split("."):
            if not isinstance(value, dict) or key not in value:
                return _NOTHING
            value = value[key]
        return value


_NOTHING = object()


def _autoencoder(values: _Values, section: str, path: Path) -> Iterator[tuple[str, object]]:
    if not values.has(section):
        return
    theirs = values.take(f"{section}.type")
    if theirs not in _AUTOENCODERS:
        raise FileProblem(
            f"{path}: {section}.type={theirs} is no autoencoder that osora knows",
            hint=f"these are: {', '.join(_AUTOENCODERS)}",
        )
    kind = _AUTOENCODERS[theirs]
    yield "vae.kind", kind
    for key, ours in _OF_AUTOENCODER.items():
        # Sizes of one kind are not those of another.
        is_own = "dc_ae" in ours if kind == "dc_ae" else "dc_ae" not in ours
        if values.has(f"{section}.{key}") and (is_own or "tiling" in ours):
            yield ours, values.take(f"{section}.{key}")
    file = values.take(f"{section}.from_pretrained")
    if file is not None and section == "model":
        yield "init", file
    elif file is not None:
        yield "weights", [str(PurePosixPath(file).parent)]
        yield "train_mmdit.files.vae", PurePosixPath(file).name
    if section == "model":
        values.take("model.from_scratch")
        values.take("model.model_name")


def _transformer(values: _Values) -> Iterator[tuple[str, object]]:
    weights = values.take("model.from_pretrained")
    if weights is not None:
        yield "init", weights
    yield "model.cond_embed", values.take("model.cond_embed", False)
    modes = values.take("condition_config") or {"t2v": 1}
    yield from ((f"train_mmdit.mode_weights.{mode}", modes.get(mode, 0)) for mode in CONDITION_MODES)
    values.take("grad_ckpt_settings")
    blocks = values.take("model.grad_ckpt_settings")
    if values.take("grad_checkpoint", False):
        yield "memory.checkpointing", True
        depths = values.peek("model.depth", 19), values.peek("model.depth_single_blocks", 38)
        for kind, count, depth in zip(("double", "single"), blocks or (), depths, strict=False):
            if count < depth:
                yield f"memory.checkpoint_{kind}_blocks", count
        if buffer := values.take("grad_ckpt_buffer_size", 0):
            yield "memory.activation_offload", "all"
            yield "memory.activation_buffer", buffer


def _vae_training(values: _Values, found: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    weight = values.take("vae_loss_config.kl_loss_weight", 0)
    # Theirs is summed over latents and divided by pixels: 16 channels for 3 x 4 x 8 x 8 of them.
    yield "train_vae.kl_weight", weight * 16 / 768 if found.get("vae.kind") == "hunyuan" else weight
    if not values.peek("grad_checkpoint"):
        values.take("grad_checkpoint")
    if values.peek("disc_lr_scheduler.warmup_steps") == values.peek("lr_scheduler.warmup_steps", 0):
        values.take("disc_lr_scheduler.warmup_steps")
    if values.peek("gen_loss_config.gen_start") == values.peek("disc_loss_config.disc_start"):
        values.take("gen_loss_config.gen_start")
    for key in ("eps", "weight_decay", "betas"):
        if values.peek(f"optim_discriminator.{key}") == values.peek(f"optim.{key}"):
            values.take(f"optim_discriminator.{key}")


def _training(values: _Values) -> Iterator[tuple[str, object]]:
    if values.has("bucket_config"):
        yield "data.buckets", _buckets(values)
    yield from zip(("optimizer.beta1", "optimizer.beta2"), values.take("optim.betas", (0.9, 0.999)), strict=True)
    if not values.has("warmup_steps") and not values.has("lr_scheduler.warmup_steps"):
        yield "optimizer.warmup_steps", 0
    if values.take("use_cosine_scheduler", False):
        yield "optimizer.schedule", "cosine"
    if values.has("plugin"):
        yield from _strategy(values)


def _buckets(values: _Values) -> dict[str, Any]:
    found = {}
    for resolution, lengths in values.take("bucket_config").items():
        name, _, ratio = resolution.partition("_ar")
        if ratio:
            values.note(f"bucket_config.{resolution}: clips of all aspect ratios are taken, not of {ratio} alone")
        found[name] = dict(lengths)
    return found


def _strategy(values: _Values) -> Iterator[tuple[str, object]]:
    plugin = values.take("plugin")
    if values.has("vae_loss_config"):
        values.note(f"plugin={plugin}: autoencoders are small, and trained with strategy=ddp")
        yield "strategy", "ddp"
        return
    if plugin != "hybrid":
        yield "strategy", plugin
        return
    tensor, sequence = values.take("plugin_config.tp_size", 1), values.take("plugin_config.sp_size", 1)
    stage = values.take("plugin_config.zero_stage", 0)
    yield "strategy", "hybrid" if tensor * sequence > 1 else ("ddp", "zero1", "zero2", "zero3")[stage]
    if values.peek("plugin_config.pp_size") == 1:
        values.take("plugin_config.pp_size")
    values.take("plugin_config.enable_sequence_parallelism")
    scheme = values.take("plugin_config.sequence_parallelism_mode")
    if tensor > 1:
        yield "parallel.tensor_parallel_degree", tensor
    if sequence > 1:
        yield f"parallel.{'ring' if scheme == 'ring_attn' else 'ulysses'}_degree", sequence


def _nested(found: Mapping[str, object]) -> dict[str, Any]:
    sections: dict[str, Any] = {}
    for key, value in found.items():
        *path, name = key.split(".")
        place = sections
        for section in path:
            place = place.setdefault(section, {})
        place[name] = value
    return sections


def _shown(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
