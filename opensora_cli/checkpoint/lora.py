"""Adapters: opening them in any style, and merging them into and unmerging them from weights.

An adapter (Hu et al. 2021, LoRA) holds two small matrices A and B for each of its modules; the module computes with
W + scale · B·A. Merging computes the sum once, in fp32, and rounds it once to the dtype of W.

Adapters are PEFT's folders, and files with tensor names of diffusers, ComfyUI or kohya. `X.lora_A.weight` and
`X.lora_down.weight` are A, `X.lora_B.weight` and `X.lora_up.weight` are B; an optional `X.alpha` is divided by the
rank. X is the layer's path after the prefix of the style; kohya writes `_` for its dots. Some programs write alpha only
into the metadata of the file.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opensora_cli.checkpoint.files import reading, refuse_outside
from opensora_cli.checkpoint.formats.colossal import EMA_FILE, MODEL_FOLDER, RUNNING_STATES_FILE, SETTINGS_FILE
from opensora_cli.checkpoint.formats.peft import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    adapter_files,
    peft_scales,
    require_alpha,
)
from opensora_cli.checkpoint.formats.safetensors import open_safetensors
from opensora_cli.checkpoint.lazy import LazyTensor, rounded
from opensora_cli.checkpoint.transforms import FP8_DTYPES
from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.core.formatting import first_few, shown
from opensora_cli.core.reading import parse_object, read_json_object

KOHYA_PREFIXES = ("lora_unet_", "lora_transformer_", "lycoris_")
"""Prefixes of layer paths with underscores."""

_PEFT_PREFIX, _COMFYUI_PREFIX = "base_model.model.", "diffusion_model."
DOTTED_PREFIXES = (_PEFT_PREFIX, _COMFYUI_PREFIX, "transformer.", "model.")
"""Possible prefixes of layer paths with dots."""

_DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"
_DIFFUSERS_METADATA, _DIFFUSERS_PREFIX = "lora_adapter_metadata", "transformer."
_METADATA_ALPHAS = ("alpha", "lora_alpha", "network_alpha", "transformer.lora_alpha", "ss_network_alpha")
"""Names of alpha in the metadata of files: LightX2V, PEFT in one file, SimpleTuner, kohya."""

_FACTOR = re.compile(
    r"(?P<module>.+)\.(?:lora_(?P<letter>[AB])|lora[._](?P<word>down|up))(?:\.default)?\.weight", re.DOTALL
)
_ALPHA = ".alpha"


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """Low-rank update of one weight: scale · B·A, as a matrix of the weight's rows."""

    a: LazyTensor
    """Matrix A: (rank, in)."""
    b: LazyTensor
    """Matrix B: (out, rank)."""
    scale: float
    """Factor of B·A: alpha / rank, or alpha / sqrt(rank)."""

    @property
    def described(self) -> str:
        """The shapes of both matrices, for errors."""
        return f"A {list(self.a.shape)}, B {list(self.b.shape)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """An adapter; none of its tensors has been read."""

    path: Path
    files: tuple[Path, ...]
    """The files of the adapter."""
    metadata: Mapping[str, str]
    updates: Mapping[str, tuple[LowRank, ...]]
    """Updates by the names of the weights in the adapter's file."""

    @property
    def scales(self) -> str:
        """The lowest and the highest scale of the updates: `alpha / rank 0.5 to 1`."""
        scales = [update.scale for updates in self.updates.values() for update in updates]
        return "alpha / rank " + " to ".join(dict.fromkeys(f"{scale:g}" for scale in (min(scales), max(scales))))


def style_of(keys: Iterable[str]) -> str | None:
    """Return the naming style of an adapter's tensors; None if they are no adapter's."""
    name = next((key for key in keys if _FACTOR.fullmatch(key)), None)
    if name is None:
        return None
    prefixes = {_PEFT_PREFIX: "PEFT", _COMFYUI_PREFIX: "ComfyUI", **dict.fromkeys(KOHYA_PREFIXES, "kohya")}
    return next((style for prefix, style in prefixes.items() if name.startswith(prefix)), "diffusers")


def describe_adapter(shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """Return style, ranks and number of layers of an adapter's tensors; None if they are no adapter's."""
    matches = {key: match for key in shapes if (match := _FACTOR.fullmatch(key))}
    ranks = {shapes[key][0] for key, match in matches.items() if _letter(match) == "A" and shapes[key]}
    if not ranks:
        return None
    rank = " to ".join(str(rank) for rank in sorted({min(ranks), max(ranks)}))
    layers = len({match["module"] for match in matches.values()})
    return f"LoRA in the style of {style_of(matches)}, rank {rank} in {layers} layers"


def open_adapter(path: Path) -> Adapter:
    """Open an adapter without reading its matrices: a folder of PEFT or diffusers, a file, or a training's checkpoint.

    Its updates have the names of the file; the caller finds the weights of a model by these names.

    Raises:
        CheckpointError: the adapter is missing or broken, or is no adapter.
        RequestError: the adapter is of a kind that cannot be added.
    """
    with reading(path):
        if not path.exists():
            raise CheckpointError(f"{path} is no folder with an adapter, and no file of one")
    if (path / RUNNING_STATES_FILE).is_file():
        return _open_checkpoint(path)
    if (path / _DIFFUSERS_FILE).is_file() and not (path / CONFIG_FILE).exists():
        path = path / _DIFFUSERS_FILE
    config_file, weights = adapter_files(path)
    fields = _read_fields(config_file) if path.is_dir() or path.name == WEIGHTS_FILE else None
    entries, metadata = open_safetensors(weights if fields is None else _regular_file(weights))
    style = style_of(entries)
    if style is None:
        raise CheckpointError(
            f"{weights} has no lora_A and lora_B, and no lora_down and lora_up: it is no adapter",
            hint="weights of a whole transformer are named with --weights FOLDER --set files.transformer=FILE",
        )
    if style == "PEFT" and fields is None:
        fields = _read_fields(config_file)
    matrices, alphas = _matrices_and_alphas(weights, entries)
    ranks = {module: a.shape[0] for module, (a, _) in matrices.items()}
    if fields is not None:
        scales = peft_scales(config_file, fields, ranks)
    else:
        scales = _scales(weights, metadata, ranks)
        scales |= {module: alpha / ranks[module] for module, alpha in alphas.items()}
    return Adapter(
        path=weights if fields is None else path,
        files=(weights,) if fields is None else (config_file, weights),
        metadata=metadata,
        updates={f"{module}.weight": (LowRank(a=a, b=b, scale=scales[module]),) for module, (a, b) in matrices.items()},
    )


def _open_checkpoint(folder: Path) -> Adapter:
    """Open the adapter in a checkpoint of a training: its averaged weights if there are any.

    The settings of the training, beside the checkpoint, have alpha. None means the rank.
    """
    averaged = folder / EMA_FILE
    weights = [averaged] if averaged.is_file() else sorted((folder / MODEL_FOLDER).glob("*.safetensors"))
    if len(weights) != 1:
        raise CheckpointError(f"{folder} has {len(weights)} files of weights: it is no checkpoint of an adapter")
    adapter, settings_file = open_adapter(weights[0]), folder.parent / SETTINGS_FILE
    lora = read_json_object(settings_file, problem=CheckpointError).get("lora")
    alpha = lora.get("alpha") if isinstance(lora, dict) else None
    if alpha is None:
        return adapter
    alpha = require_alpha(settings_file, "lora.alpha", alpha)
    updates = {
        name: tuple(replace(each, scale=alpha / each.a.shape[0]) for each in updates)
        for name, updates in adapter.updates.items()
    }
    return replace(adapter, updates=updates)


def _read_fields(path: Path) -> dict[str, Any]:
    return read_json_object(_regular_file(path), problem=CheckpointError)


def _regular_file(path: Path) -> Path:
    """Return a file of an adapter, after checking that it is a regular file in the adapter's folder."""
    with reading(path):
        if not refuse_outside(path, path.parent).is_file():
            hint = None if path.exists() else "an adapter is the folder that PEFT saved"
            raise CheckpointError(f"{path} {'is not a file' if path.exists() else 'does not exist'}", hint=hint)
    return path


def _letter(match: re.Match[str]) -> str:
    """Return whether a name belongs to matrix A or B of a layer."""
    return match["letter"] or {"down": "A", "up": "B"}[match["word"]]


def _matrices_and_alphas(
    path: Path, entries: Mapping[str, LazyTensor]
) -> tuple[dict[str, tuple[LazyTensor, LazyTensor]], dict[str, float]]:
    """Return the matrices A and B of each layer, which have a common rank, and the alphas of layers that have one."""
    pairs: dict[str, dict[str, LazyTensor]] = {}
    alphas, others = {}, []
    for key, entry in entries.items():
        if match := _FACTOR.fullmatch(key.removeprefix(_PEFT_PREFIX)):
            pairs.setdefault(match["module"], {})[_letter(match)] = entry
        elif key.endswith(_ALPHA):
            alphas[key.removesuffix(_ALPHA)] = entry
        else:
            others.append(key)
    others += [f"{module}{_ALPHA}" for module in alphas if module not in pairs]
    if others:
        raise CheckpointError(f"{path} has {len(others)} tensors that are not of LoRA: {first_few(others)}")
    matrices = {}
    for module, pair in pairs.items():
        if len(pair) < 2:
            raise CheckpointError(f"{path}: {shown(module)} has one of its two matrices and not the other")
        a, b = matrices[module] = pair["A"], pair["B"]
        if not len(a.shape) == len(b.shape) == 2 or a.shape[0] < 1 or b.shape[1] != a.shape[0]:
            raise CheckpointError(
                f"{path}: {shown(module)} has A {list(a.shape)} and B {list(b.shape)}, no matrices of a common rank"
            )
        if not all(each.dtype.is_floating_point and each.dtype.itemsize > 1 for each in (a, b)):
            raise CheckpointError(f"{path}: {shown(module)} has factors that are not of 16 bits or more")
    for module, entry in alphas.items():
        if entry.numel != 1 or entry.dtype.is_complex:
            raise CheckpointError(f"{path}: {shown(module + _ALPHA)} {list(entry.shape)} must be a single number")
    return matrices, {
        module: require_alpha(path, f"{module}{_ALPHA}", float(entry.read().double().item()))
        for module, entry in alphas.items()
    }


def _scales(path: Path, metadata: Mapping[str, str], ranks: Mapping[str, int]) -> dict[str, float]:
    """Return the scale of each layer: from PEFT's configuration in diffusers' metadata, or an alpha there, or 1."""
    if (text := metadata.get(_DIFFUSERS_METADATA)) is not None:
        try:
            fields = parse_object(text.encode("utf-8", "surrogateescape"))
        except ValueError as error:
            raise CheckpointError(f"{path}: its metadata {_DIFFUSERS_METADATA} are broken: {error}") from None
        own = {key.removeprefix(_DIFFUSERS_PREFIX): value for key, value in fields.items()}
        if "lora_alpha" in own:
            found = peft_scales(path, own, {each.removeprefix(_DIFFUSERS_PREFIX): rank for each, rank in ranks.items()})
            return {module: found[module.removeprefix(_DIFFUSERS_PREFIX)] for module in ranks}
    elif name := next((name for name in _METADATA_ALPHAS if metadata.get(name, "None") != "None"), None):
        try:
            alpha = float(metadata[name])
        except ValueError:
            alpha = math.nan
        alpha = require_alpha(path, f"metadata {name}", alpha)
        return {module: alpha / rank for module, rank in ranks.items()}
    return dict.fromkeys(ranks, 1.0)


def require_fit(adapter: Adapter, shapes: Mapping[str, tuple[int, ...]], *, hint: str) -> None:
    """Raise CheckpointError, with `hint` for unknown names, unless each update fits a weight of these shapes."""
    unknown = [name for name in adapter.updates if name not in shapes]
    if unknown:
        raise CheckpointError(
            f"{adapter.path} is for {len(unknown)} weights that are not in the model: {first_few(unknown)}", hint=hint
        )
    misfits = [
        f"{name} {list(shapes[name])} (adapter: {update.described})"
        for name, updates in adapter.updates.items()
        for update in updates
        if shapes[name] != (update.b.shape[0], update.a.shape[1])
    ]
    if misfits:
        raise CheckpointError(f"{adapter.path} does not fit the model: {first_few(misfits)}")


def merge(entries: Mapping[str, LazyTensor], adapter: Adapter, *, scale: float = 1.0) -> dict[str, LazyTensor]:
    """Add an adapter's updates, times `scale`, to a model's tensors, which have the names of their training.

    The negative scale of a merge undoes it, up to rounding. Raises CheckpointError if the adapter is for tensors that
    are missing, have other shapes, or are not floating point with at least 16 bits.
    """
    shapes = {name: entry.shape for name, entry in entries.items()}
    require_fit(
        adapter,
        shapes,
        hint="osora ckpt convert changes names (--rename OLD=NEW), and removes tensors (--drop)",
    )
    dtypes = {name: entries[name].dtype for name in adapter.updates}
    unfit = [name for name, dtype in dtypes.items() if not dtype.is_floating_point or dtype in FP8_DTYPES]
    if unfit:
        raise CheckpointError(
            f"an adapter cannot be merged into {str(dtypes[unfit[0]]).removeprefix('torch.')}: {first_few(unfit)}",
            hint="osora ckpt convert --dtype bf16 makes weights of 16 bits",
        )
    return {
        name: _merged(entry, adapter.updates[name], scale=scale, name=name) if name in adapter.updates else entry
        for name, entry in entries.items()
    }


def _merged(base: LazyTensor, updates: Sequence[LowRank], *, scale: float, name: str) -> LazyTensor:
    """Return the sum of a weight and its low-rank updates times `scale`."""

    def read() -> Tensor:
        weight = base.read()
        total = torch.zeros(base.shape, dtype=torch.promote_types(base.dtype, torch.float32))
        for update in updates:
            total += (update.b.read().to(total) @ update.a.read().to(total)).mul_(update.scale * scale)
        return rounded(total + weight, base.dtype, name=name)

    return LazyTensor(base.shape, base.dtype, read)
