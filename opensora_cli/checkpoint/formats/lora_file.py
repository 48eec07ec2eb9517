"""Adapters: PEFT's folders, and files with tensor names of diffusers, ComfyUI or kohya.

`X.lora_A.weight` and `X.lora_down.weight` are A, `X.lora_B.weight` and `X.lora_up.weight` are B; an optional `X.alpha`
is divided by the rank. X is the layer's path after the prefix of the style; kohya writes `_` for its dots.
"""

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from opensora_cli.checkpoint.formats.peft import CONFIG_FILE, WEIGHTS_FILE, PeftConfig, adapter_files
from opensora_cli.checkpoint.formats.safetensors import open_safetensors
from opensora_cli.checkpoint.lazy import LazyTensor
from opensora_cli.checkpoint.lora import Adapter, LowRank
from opensora_cli.checkpoint.readable import reading, refuse_outside
from opensora_cli.core.exceptions import CheckpointError, RequestError
from opensora_cli.core.formatting import first_few
from opensora_cli.core.reading import read_bytes
from opensora_cli.core.strict_json import parse_object, shown

KOHYA_PREFIXES = ("lora_unet_", "lora_transformer_", "lycoris_")
"""Prefixes of layer paths with underscores."""

_PEFT_PREFIX, _COMFYUI_PREFIX = "base_model.model.", "diffusion_model."
DOTTED_PREFIXES = (_PEFT_PREFIX, _COMFYUI_PREFIX, "transformer.", "model.")
"""Possible prefixes of layer paths with dots."""

_PICKLED_FILE = "adapter_model.bin"
_DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"
_DIFFUSERS_METADATA = "lora_adapter_metadata"
_MAX_ALPHA = 1_000_000
_MAX_CONFIG_BYTES = 1_000_000

_FACTOR = re.compile(
    r"(?P<module>.+)\.(?:lora_(?P<letter>[AB])|lora[._](?P<word>down|up))(?:\.default)?\.weight", re.DOTALL
)
_TABLE_FACTOR = re.compile(r"(?P<module>.+)\.lora_embedding_(?P<letter>[AB])", re.DOTALL)
_IS_TABLE = "is a table"
_ALPHA = ".alpha"
_TEXT_ENCODERS = re.compile(r"(?:lora_te\d?_|text_encoders?[._\d])", re.DOTALL)

_OTHER_KINDS = {
    r"dora_scale|lora_magnitude_vector": "DoRA",
    r"hada_[wt]": "LoHa",
    r"lokr_[wt]": "LoKr",
    r"oft_|boft_": "OFT",
    r"lora_mid": "LoRA with a third matrix",
    r"(?:lora_[AB]|lora[._](?:down|up))(?:\.default)?\.bias": "LoRA with biases",
    r"(?:diff|diff_b|set_weight|w_norm|b_norm)$": "differences of whole tensors",
    r"on_input": "IA3",
    r"[ab][12]\.weight$": "GLoRA",
}


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
    """Open an adapter, without reading its matrices: a folder of PEFT or diffusers, or a file.

    Its updates have the names of the file; the caller finds the weights of a model by these names.

    Raises:
        CheckpointError: the adapter is missing or broken, or is no adapter.
        RequestError: the adapter is of a kind that cannot be added.
    """
    with reading(path):
        is_folder, is_there = path.is_dir(), path.exists()
    if not is_there:
        raise CheckpointError(f"{path} is no folder with an adapter, and no file of one")
    if is_folder and (path / _DIFFUSERS_FILE).is_file() and not (path / CONFIG_FILE).exists():
        path = path / _DIFFUSERS_FILE
    config_file, weights = adapter_files(path)
    fields = _read_fields(config_file) if path.is_dir() or path.name == WEIGHTS_FILE else None
    if fields is not None and not weights.exists() and (path / _PICKLED_FILE).exists():
        raise CheckpointError(
            f"{path} has {_PICKLED_FILE} and no {WEIGHTS_FILE}",
            hint=f"convert it: osora ckpt convert {path / _PICKLED_FILE} {weights}",
        )
    entries, metadata = open_safetensors(weights if fields is None else _regular_file(weights))
    style = "PEFT" if fields is not None else style_of(entries)
    if style == "PEFT":
        named = {key.removeprefix(_PEFT_PREFIX): entry for key, entry in entries.items()}
        return _open_peft(path, weights, named, metadata, fields or _read_fields(config_file))
    _refuse_other_kinds(weights, entries)
    if style is None:
        raise CheckpointError(
            f"{weights} has no lora_A and lora_B, and no lora_down and lora_up: it is no adapter",
            hint="weights of a whole transformer are named with --weights FOLDER --set files.transformer=FILE",
        )
    factors, others = _factors(entries)
    alphas = {key.removesuffix(_ALPHA): others.pop(key) for key in list(others) if key.endswith(_ALPHA)}
    unknown = [*others, *(f"{module}{_ALPHA}" for module in alphas if module not in factors)]
    if unknown:
        raise CheckpointError(f"{weights} has {len(unknown)} tensors that are not of LoRA: {first_few(unknown)}")
    stated = _stated_scales(weights, metadata, factors)
    updates = {}
    for module, pair in factors.items():
        a, b = _matrices(weights, module, pair)
        scale = _alpha(weights, module, alphas[module]) / a.shape[0] if module in alphas else stated.get(module, 1.0)
        updates[f"{module}.weight"] = (LowRank(a=a, b=b, scale=scale, transposed=_IS_TABLE in pair),)
    return Adapter(path=weights, files=(weights,), style=style, metadata=metadata, updates=updates, replacements={})


def _open_peft(
    path: Path,
    weights: Path,
    entries: Mapping[str, LazyTensor],
    metadata: Mapping[str, str],
    fields: Mapping[str, Any],
) -> Adapter:
    factors, others = _factors(entries)
    for key in others:
        if ".lora_" in key:
            raise RequestError(f"{weights} has {shown(key)}: this kind of LoRA cannot be merged")
    config = PeftConfig.of(weights.parent / CONFIG_FILE, fields, factors)
    if not factors:
        raise CheckpointError(f"{weights} has no lora_A and lora_B", hint="is it an adapter?")
    if others and not config.trains_more:
        raise CheckpointError(f"{weights} has tensors that are not of LoRA: {first_few(list(others))}")
    updates = {}
    for module, pair in factors.items():
        a, b = _matrices(weights, module, pair)
        if a.shape[0] != config.ranks[module]:
            raise CheckpointError(
                f"{weights}: {shown(module)} has A {list(a.shape)} and B {list(b.shape)}, "
                f"which are not of rank {config.ranks[module]} as in {CONFIG_FILE}"
            )
        is_transposed = _IS_TABLE in pair or config.fan_in_fan_out
        updates[f"{module}.weight"] = (LowRank(a=a, b=b, scale=config.scales[module], transposed=is_transposed),)
    return Adapter(
        path=path,
        files=(config.path, weights),
        style="PEFT",
        metadata=metadata,
        updates=updates,
        replacements={name.replace(".base_layer.", "."): entry for name, entry in others.items()},
    )


def _factors(entries: Mapping[str, LazyTensor]) -> tuple[dict[str, dict[str, LazyTensor]], dict[str, LazyTensor]]:
    """Return the matrices of each module, under `A` and `B`, and the other tensors.

    The matrices of an embedding are also under `_IS_TABLE`.
    """
    factors: dict[str, dict[str, LazyTensor]] = {}
    others = {}
    for key, entry in entries.items():
        if match := _FACTOR.fullmatch(key):
            factors.setdefault(match["module"], {})[_letter(match)] = entry
        elif match := _TABLE_FACTOR.fullmatch(key):
            factors.setdefault(match["module"], {}).update({match["letter"]: entry, _IS_TABLE: entry})
        else:
            others[key] = entry
    return factors, others


def _read_fields(path: Path) -> dict[str, Any]:
    content = read_bytes(_regular_file(path), max_bytes=_MAX_CONFIG_BYTES, problem=CheckpointError)
    try:
        return parse_object(content)
    except ValueError as error:
        raise CheckpointError(f"{path} is broken: {error}") from error


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


def _refuse_other_kinds(path: Path, keys: Iterable[str]) -> None:
    for key in keys:
        for pattern, kind in _OTHER_KINDS.items():
            if re.search(rf"\.(?:{pattern})", key):
                raise RequestError(f"{path} has {shown(key)}: {kind} cannot be added")
        if ".processor." in key:
            raise RequestError(f"{path} has {shown(key)}: adapters in XLabs' style cannot be added")
        if found := _TEXT_ENCODERS.match(key):
            raise RequestError(
                f"{path} has {shown(key)}: adapters of text encoders cannot be added",
                hint=f"leave them out: osora ckpt convert {path} NEW.safetensors --drop '{found[0]}*'",
            )


def _matrices(path: Path, module: str, pair: Mapping[str, LazyTensor]) -> tuple[LazyTensor, LazyTensor]:
    """Return the matrices A and B of a module, which have a common rank."""
    if "A" not in pair or "B" not in pair:
        raise CheckpointError(f"{path}: {shown(module)} has one of its two matrices and not the other")
    a, b = pair["A"], pair["B"]
    if min(len(a.shape), len(b.shape)) < 2 or a.shape[0] < 1 or b.shape[1] != a.shape[0]:
        raise CheckpointError(f"{path}: {shown(module)} has A {list(a.shape)} and B {list(b.shape)}, of no common rank")
    return a, b


def _alpha(path: Path, module: str, entry: LazyTensor) -> float:
    if entry.numel != 1 or entry.dtype.is_complex:
        raise CheckpointError(f"{path}: {shown(module + _ALPHA)} {list(entry.shape)} must be a single number")
    alpha = float(entry.read().double().item())
    if not math.isfinite(alpha) or abs(alpha) > _MAX_ALPHA:
        raise CheckpointError(f"{path}: {shown(module + _ALPHA)} must be a number up to {_MAX_ALPHA:,}, and is {alpha}")
    return alpha


def _stated_scales(path: Path, metadata: Mapping[str, str], modules: Iterable[str]) -> dict[str, float]:
    """Return the scales in diffusers' metadata, if it has them: PEFT's configuration as JSON."""
    if (text := metadata.get(_DIFFUSERS_METADATA)) is None:
        return {}
    try:
        fields = parse_object(text.encode("utf-8", "surrogateescape"))
    except ValueError as error:
        raise CheckpointError(f"{path}: its metadata {_DIFFUSERS_METADATA} are broken: {error}") from None
    own = {key.removeprefix("transformer."): value for key, value in fields.items()}
    if "lora_alpha" not in own:
        return {}
    names = {module: module.removeprefix("transformer.") for module in modules}
    scales = PeftConfig.of(path, {"peft_type": "LORA", **own}, set(names.values())).scales
    return {module: scales[name] for module, name in names.items()}
