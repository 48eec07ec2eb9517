"""Settings files (`.py`) of the reference implementation for sampling and training, in the terms of osora.

The tables of names carry settings over. All other names are reported, unless their value is in `_USUAL`.
"""

import ast
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from opensora_cli.core.conditions import CONDITION_MODES
from opensora_cli.core.exceptions import FileProblem
from opensora_cli.core.section import Section, is_inside, nested
from opensora_cli.models.mmdit.config import MMDiTConfig
from opensora_cli.models.registry import OPEN_SORA_V2, OPEN_SORA_V2_DC_AE
from opensora_cli.models.vae.config import DCAEConfig, FluxAEConfig, HunyuanSizes
from opensora_cli.settings.layers import ConfigFile

Sections = tuple[dict[str, Any], list[str]]
"""Settings, nested as in a YAML file, and the names that were not carried over."""

_AUTOENCODERS: Mapping[str, tuple[str, str, type[Section]]] = {
    "hunyuan_vae": ("hunyuan", "vae", HunyuanSizes),
    "dc_ae": ("dc_ae", "vae.dc_ae", DCAEConfig),
    "autoencoder_2d": ("flux_ae", "vae.flux_ae", FluxAEConfig),
}
"""Kind of each autoencoder, the section of its sizes, and the sizes, which have the same names."""
_TILING = {"use_spatial_tiling": "vae.spatial_tiling", "use_temporal_tiling": "vae.temporal_tiling"}
_SHARED = {
    **{f"model.{name}": f"model.{name}" for name in MMDiTConfig.model_fields},
    "t5.max_length": "text.t5_max_length",
    "clip.max_length": "text.clip_max_length",
}
_SAMPLING = {
    "resolution": "video.resolution",
    "aspect_ratio": "video.aspect_ratio",
    "num_frames": "video.num_frames",
    "num_steps": "sampling.num_inference_steps",
    "guidance": "sampling.guidance_scale",
    "guidance_img": "sampling.image_guidance_scale",
    "flow_shift": "sampling.flow_shift",
    "text_osci": "sampling.text_oscillation",
    "image_osci": "sampling.image_oscillation",
    "scale_temporal_osci": "sampling.temporal_image_scaling",
}
"""Names in the section `sampling_option`. A name that stands alone wins over the one in the section."""
SAMPLING_NAMES = {
    **_SHARED,
    **_SAMPLING,
    "sampling_option.seed": "sampling.seed",
    "cond_type": "condition.mode",
    "dtype": "runtime.dtype",
    "fps_save": "video.fps",
    "img_resolution": "picture.resolution",
    "motion_score": "prompt_suffix.motion_score",
    "num_sample": "sampling.num_samples",
    "prompt": "prompt",
    "prompt_refine": "refine.prompt",
    "ref": "condition.references",
    "save_dir": "output.path",
    "use_t2i2v": "picture.first",
}
"""Setting of each name in a file for sampling."""
_TRAINING = {
    **_SHARED,
    **{f"condition_config.{mode}": f"train_mmdit.mode_weights.{mode}" for mode in CONDITION_MODES},
    "dataset.data_path": "data.table",
    "dataset.fps_max": "data.fps_max",
    "num_workers": "data.workers",
    "prefetch_factor": "data.prefetch",
    "dropout_ratio.t5": "train_mmdit.t5_dropout",
    "dropout_ratio.clip": "train_mmdit.clip_dropout",
    "model.from_pretrained": "init",
    "t5.from_pretrained": "train_mmdit.files.t5",
    "clip.from_pretrained": "train_mmdit.files.clip",
    "optim.lr": "optimizer.learning_rate",
    "optim.eps": "optimizer.eps",
    "optim.weight_decay": "optimizer.weight_decay",
    "grad_clip": "optimizer.max_grad_norm",
    "warmup_steps": "optimizer.warmup_steps",
    "ema_decay": "loop.ema_decay",
    "log_every": "loop.log_every",
    "seed": "loop.seed",
    "sigma_min": "train_mmdit.sigma_min",
    "outputs": "output",
    "ckpt_every": "checkpoints.every",
    "keep_n_latest": "checkpoints.keep",
    "dtype": "precision.compute",
}
_USUAL = """
accumulation_steps=1 batch_size=1 pp_size=1 temporal_reduction=4
in_channels=3 out_channels=3 out_ch=3 resolution=256 dropout=0 dropout=0.0
encoder_add_residual=False encoder_slice_t=False decoder_add_residual=False decoder_slice_t=False
from_pretrained=None plugin=None plugin_ae=None plugin_config=None plugin_config_ae=None guidance_img=None seed=None
prompt_as_path=False save_prefix= grad_checkpoint=False use_cosine_scheduler=False
offload_model=True offload_model=False enable_sequence_parallelism=True enable_sequence_parallelism=False
cond_type=t2v cond_type=None method=i2v shift=True adamw_mode=True cls=HybridAdam cls=AdamW cls=Adam
type=flux type=text_embedder type=text type=video_text transform_name=resize_crop
model_name=dc-ae-f32t4c128 from_scratch=True
"""
"""Values that need no setting here, by the last part of the name. Without references `t2v` is chosen anyway."""
_REPEATED = frozenset(("patch_size", "ae_spatial_compression", "lr", "eps", "grad_ckpt_settings"))
"""Names that other lines of the published files use."""
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_CODE = ...
"""Value of an assignment in a `.py` file that is code and not data."""
_PLAIN_VALUES = "such files are parsed, not executed: write the value itself"
_FOLDER = "ckpts"


def read_settings(
    file: ConfigFile, read_reference: Callable[[ConfigFile], Sections], report: Callable[[str], None]
) -> Mapping[str, object]:
    """Return the sections in a YAML file, or those that `read_reference` finds in a `.py` file.

    `report` gets a line with the names that are not carried over.
    """
    if file.path.suffix != ".py":
        return file.values
    sections, left = read_reference(file)
    if left:
        report(f"{file.path}: not carried over: {', '.join(left)}")
    return sections


def read_reference_generation(file: ConfigFile) -> Sections:
    """Read a `.py` file for sampling in the terms of `GenerateSettings`.

    Raises FileProblem if the file is for another kind of model, or is not for sampling.
    """
    values, found, top = _Values(file), dict[str, Any](), file.values
    if "sampling_option" not in top and not top.keys().isdisjoint(("optim", "bucket_config", "vae_loss_config")):
        raise FileProblem(f"{file.path} is not for sampling", hint=f"use osora train --config {file.path}")
    if "sampling_option" in top:
        # Defaults of the reference implementation.
        found |= {"picture.first": False, "video.fps": 16, "prompt_suffix.motion_score": None}
    if is_deep := values.get("ae.type") == "dc_ae":
        found |= values.take({"sampling_option.is_causal_vae": "video.causal_lengths"})
    if "model" in top:
        found |= {"model.name": OPEN_SORA_V2_DC_AE if is_deep else OPEN_SORA_V2, "model.cond_embed": False}
        if "ckpt_path" in values:
            values["model.from_pretrained"] = values.pop("ckpt_path")
    if "ae" in top:
        found |= values.take_autoencoder("ae")
    for part, ours in (("model", "transformer"), ("ae", "vae"), ("t5", "t5"), ("clip", "clip")):
        found |= values.take_file(f"{part}.from_pretrained", f"files.{ours}")
    if values.get("sampling_option.shift") is False:
        del values["sampling_option.shift"]
        found["sampling.flow_shift"] = 1
    if "sampling_option.resolution" not in values:
        found |= values.take({f"sampling_option.{side}": f"video.{side}" for side in ("height", "width")})
    if values.get("motion_score") == "dynamic":
        del values["motion_score"]
        found["refine.motion_score"] = True
    if values.get("use_t2i2v"):
        found |= values.take({f"img_flux.{name}": f"picture.model.{name}" for name in MMDiTConfig.model_fields})
        if "img_flux_ae" in top:
            found |= values.take_autoencoder("img_flux_ae", prefix="picture.")
        for section, ours in (("img_flux", "transformer"), ("img_flux_ae", "vae")):
            found |= values.take_file(f"{section}.from_pretrained", f"picture.files.{ours}")
    found |= values.take({f"sampling_option.{name}": ours for name, ours in _SAMPLING.items()})
    values.drop("sampling_option.is_causal_vae")
    return nested(found | values.take(SAMPLING_NAMES)), values.left()


def read_reference_training(file: ConfigFile) -> Sections:
    """Read a `.py` file for training in the terms of `TrainSettings`.

    Raises FileProblem if the file is for another kind of model, or is not for training.
    """
    values, top = _Values(file), file.values
    if "sampling_option" in top:
        raise FileProblem(f"{file.path} is for sampling", hint=f"use osora generate --config {file.path}")
    if "vae_loss_config" in top:
        raise FileProblem(
            f"{file.path} trains an autoencoder", hint="start from a recipe, as in osora train --config vae_dc_ae"
        )
    modes = {mode: int(mode == "t2v" and "condition_config" not in top) for mode in CONDITION_MODES}
    found: dict[str, Any] = {"target": "mmdit", "optimizer.warmup_steps": 0, "model.cond_embed": False}
    found |= {f"train_mmdit.mode_weights.{mode}": weight for mode, weight in modes.items()}
    found |= values.take_autoencoder("ae") if "ae" in top else {}
    if isinstance(name := values.get("ae.from_pretrained"), str):
        vae = PurePosixPath(name)
        found |= {"train_mmdit.files.vae": vae.name, "weights": str(vae.parent)}
        values.drop("ae.from_pretrained")
    if values.get("plugin") in ("zero1", "zero2"):
        found["strategy"] = values.pop("plugin")
    buckets = values.take({name: name for name in [*values, "bucket_config"] if name.startswith("bucket_config")})
    if buckets:
        found["data.buckets"] = {name.removeprefix("bucket_config."): row for name, row in buckets.items()}
    betas = values.get("optim.betas", (0.9, 0.999))
    if isinstance(betas, list | tuple) and len(betas) == 2:
        found |= {"optimizer.beta1": betas[0], "optimizer.beta2": betas[1]}
        values.drop("optim.betas")
    for name, key, value in (
        ("use_cosine_scheduler", "optimizer.schedule", "cosine"),
        ("grad_checkpoint", "memory.checkpointing", "full"),
    ):
        if values.get(name) is True:
            values.drop(name)
            found[key] = value
    return nested(found | values.take(_TRAINING)), values.left()


class _Values(dict[str, Any]):
    """Settings of a file by dotted name, which are removed as they are carried over."""

    def __init__(self, file: ConfigFile) -> None:
        usual = set(_USUAL.split())
        # Lists may be long.
        super().__init__(
            (name, value)
            for name, value in _leaves(file.values, "")
            if name not in _REPEATED
            and (isinstance(value, list | tuple) or f"{name.rpartition('.')[2]}={value}" not in usual)
        )
        self._path, self._all = file.path, tuple(self)

    def take(self, names: Mapping[str, str]) -> dict[str, Any]:
        """Carry over the settings of a table. Raises FileProblem if one of them is code."""
        found = {}
        for theirs, ours in names.items():
            if code := [name for name in self if self[name] is _CODE and is_inside(theirs, [name])]:
                raise FileProblem(f"{self._path}: {code[0]} is not a plain value", hint=_PLAIN_VALUES)
            if theirs in self:
                value = self.pop(theirs)
                found[ours] = _DTYPES.get(str(value), value) if ours == "runtime.dtype" else value
        return found

    def take_autoencoder(self, section: str, *, prefix: str = "") -> dict[str, Any]:
        """Carry over an autoencoder. Raises FileProblem if osora does not have it."""
        theirs = self.pop(f"{section}.type", None)
        if not isinstance(theirs, str) or theirs not in _AUTOENCODERS:
            raise FileProblem(
                f"{self._path}: {section}.type={theirs!r:.80} is no autoencoder that osora knows",
                hint=f"these are: {', '.join(_AUTOENCODERS)}",
            )
        kind, place, sizes = _AUTOENCODERS[theirs]
        names = {**_TILING, **{name: f"{place}.{name}" for name in sizes.model_fields}}
        found = self.take({f"{section}.{name}": f"{prefix}{ours}" for name, ours in names.items()})
        return {f"{prefix}vae.kind": kind, **found}

    def take_file(self, name: str, key: str) -> dict[str, Any]:
        """Carry over a file of weights: its path below ./ckpts, or the absolute path of another file."""
        if not isinstance(self.get(name), str):
            return self.take({name: key})
        file = PurePosixPath(self.pop(name))
        if file.is_relative_to(_FOLDER):
            return {key: str(file.relative_to(_FOLDER))}
        # The names of text encoders are also those of their repositories.
        return {key: str(file) if key in ("files.t5", "files.clip") else os.path.abspath(file)}

    def drop(self, *names: str) -> None:
        """Ignore settings without a report."""
        for name in names:
            self.pop(name, None)

    def left(self) -> list[str]:
        """Return the names that remain. A section without a setting that is carried over is named as a whole."""
        used = {name.partition(".")[0] for name in self._all if name not in self}
        sections = ((name, name.partition(".")[0]) for name in self)
        return list(dict.fromkeys(name if section in used else section for name, section in sections))


def _leaves(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and value and all(isinstance(name, str) for name in value):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def read_python(path: Path, text: str) -> tuple[dict[str, Any], list[Path]]:
    """Return the assignments of a file and its bases: literals, `dict(...)` calls and names of numbers or text."""
    values: dict[str, Any] = {}
    try:
        tree = ast.parse(text, filename=str(path))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise FileProblem(f"{path} is not Python: {getattr(error, 'msg', None) or 'nested too deeply'}") from None
    for line in tree.body:
        match line:
            case ast.Expr(value=ast.Constant()):
                pass  # A description.
            case ast.Assign(targets=[ast.Name(id=name)], value=node):
                values[name] = _data(node, values)
            case _:
                raise FileProblem(f"{path}, line {line.lineno}: it is not NAME = VALUE", hint=_PLAIN_VALUES)
    bases = values.pop("_base_", [])
    names = [bases] if isinstance(bases, str) else bases
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise FileProblem(f"{path}: _base_ must be the name of a file, or a list of names")
    return values, [path.parent / name for name in names]


def _data(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """Return the value of an expression, with `_CODE` in place of code."""
    match node:
        case ast.Call(func=ast.Name(id="dict"), args=[], keywords=words) if all(word.arg for word in words):
            return {word.arg: _data(word.value, names) for word in words}
        case ast.Name(id=name):
            # Only short values, so that a short file cannot describe a large one.
            value = names.get(name, _CODE)
            return value if isinstance(value, str | int | float | None) else _CODE
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, MemoryError, RecursionError):
        return _CODE
