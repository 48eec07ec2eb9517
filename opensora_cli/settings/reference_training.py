"""Training configurations of the reference implementation as settings of `osora train`."""

from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from opensora_cli.core.conditions import CONDITION_MODES
from opensora_cli.core.exceptions import FileProblem
from opensora_cli.settings.reference import (
    TRANSFORMER_SIZES,
    ReferenceConfig,
    ReferenceValues,
    autoencoder,
    carried_over,
    plugin_degrees,
)

# Of the same meaning and form in both.
_SAME = {
    **TRANSFORMER_SIZES,
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
# Values that are the default here.
_IMPLIED: dict[str, tuple[object, ...]] = {
    "dataset.type": ("video_text",),
    "dataset.transform_name": ("resize_crop",),
    "model.type": ("flux",),
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


def read_reference_training(path: Path) -> ReferenceConfig:
    """Read a `.py` file of the reference implementation in the terms of `TrainSettings`.

    What decides nothing, or is so here in any case, is left out without a word.
    Raises FileProblem if the file is missing, is not data, is of another kind of model, or is not for training.
    """
    values = ReferenceValues(path)
    if values.has("sampling_option"):
        raise FileProblem(f"{path} is for sampling", hint=f"use osora generate --config {path}")
    trains_vae = values.has("vae_loss_config")
    section = "model" if trains_vae else "ae"
    found: dict[str, object] = {"target": "vae" if trains_vae else "mmdit"}
    if values.has(section):
        found.update(autoencoder(values, section, path))
        found.update(_weights(values, section))
    if trains_vae:
        found.update(_vae_training(values, found))
    else:
        found.update(_transformer(values))
        # Names that other lines use.
        for name in ("lr", "eps", "patch_size"):
            values.take(name)
    found.update(_training(values))
    return carried_over(values, found, same=_SAME, implied=_IMPLIED, reasons=_REASONS)


def _weights(values: ReferenceValues, section: str) -> Iterator[tuple[str, object]]:
    file = values.take(f"{section}.from_pretrained")
    if file is not None and section == "model":
        yield "init", file
    elif file is not None:
        yield "weights", [str(PurePosixPath(file).parent)]
        yield "train_mmdit.files.vae", PurePosixPath(file).name
    if section == "model":
        values.take("model.from_scratch")
        values.take("model.model_name")


def _transformer(values: ReferenceValues) -> Iterator[tuple[str, object]]:
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


def _vae_training(values: ReferenceValues, found: Mapping[str, object]) -> Iterator[tuple[str, object]]:
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


def _training(values: ReferenceValues) -> Iterator[tuple[str, object]]:
    if values.has("bucket_config"):
        yield "data.buckets", _buckets(values)
    yield from zip(("optimizer.beta1", "optimizer.beta2"), values.take("optim.betas", (0.9, 0.999)), strict=True)
    if not values.has("warmup_steps") and not values.has("lr_scheduler.warmup_steps"):
        yield "optimizer.warmup_steps", 0
    if values.take("use_cosine_scheduler", False):
        yield "optimizer.schedule", "cosine"
    if values.has("plugin"):
        yield from _strategy(values)


def _buckets(values: ReferenceValues) -> dict[str, Any]:
    found = {}
    for resolution, lengths in values.take("bucket_config").items():
        name, _, ratio = resolution.partition("_ar")
        if ratio:
            values.note(f"bucket_config.{resolution}: clips of all aspect ratios are taken, not of {ratio} alone")
        found[name] = dict(lengths)
    return found


def _strategy(values: ReferenceValues) -> Iterator[tuple[str, object]]:
    plugin = values.take("plugin")
    if values.has("vae_loss_config"):
        values.note(f"plugin={plugin}: autoencoders are small, and trained with strategy=ddp")
        yield "strategy", "ddp"
        return
    if plugin != "hybrid":
        yield "strategy", plugin
        return
    stage = values.take("plugin_config.zero_stage", 0)
    degrees = plugin_degrees(values)
    yield "strategy", "hybrid" if degrees else ("ddp", "zero1", "zero2", "zero3")[stage]
    yield from degrees.items()
