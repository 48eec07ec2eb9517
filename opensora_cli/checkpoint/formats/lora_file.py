"""Adapters in one file with tensor names of diffusers, ComfyUI or kohya, and detection of the style.

`X.lora_A.weight` and `X.lora_down.weight` are A, `X.lora_B.weight` and `X.lora_up.weight` are B; an optional `X.alpha`
is divided by the rank. X is the layer's path after the prefix of the style; kohya writes `_` for its dots.
"""

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from opensora_cli.checkpoint.formats import peft
from opensora_cli.checkpoint.formats.safetensors import open_safetensors
from opensora_cli.checkpoint.lazy import LazyTensor
from opensora_cli.checkpoint.lora import Adapter, LowRank
from opensora_cli.checkpoint.readable import reading
from opensora_cli.core.exceptions import CheckpointError, RequestError
from opensora_cli.core.formatting import first_few
from opensora_cli.core.strict_json import parse_object, shown

KOHYA_PREFIXES = ("lora_unet_", "lora_transformer_", "lycoris_")
"""Prefixes of layer paths with underscores."""

_PEFT_PREFIX, _COMFYUI_PREFIX = "base_model.model.", "diffusion_model."
DOTTED_PREFIXES = (_PEFT_PREFIX, _COMFYUI_PREFIX, "transformer.", "model.")
"""Possible prefixes of layer paths with dots."""

_DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"
_DIFFUSERS_METADATA = "lora_adapter_metadata"
_MAX_ALPHA = 1_000_000

_FACTOR = re.compile(
    r"(?P<module>.+)\.(?:lora_(?P<letter>[AB])|lora[._](?P<word>down|up))(?:\.default)?\.weight", re.DOTALL
)
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
    if is_folder:
        file = path / _DIFFUSERS_FILE
        return _open_file(file) if file.is_file() and not (path / peft.CONFIG_FILE).exists() else peft.open_peft(path)
    return peft.open_peft(path) if path.name == peft.WEIGHTS_FILE else _open_file(path)


def _open_file(path: Path) -> Adapter:
    entries, metadata = open_safetensors(path)
    style = style_of(entries)
    if style == "PEFT":
        return peft.open_peft(path)
    _refuse_other_kinds(path, entries)
    if style is None:
        raise CheckpointError(
            f"{path} has no lora_A and lora_B, and no lora_down and lora_up: it is no adapter",
            hint="weights of a whole transformer are named with --weights FOLDER --set files.transformer=FILE",
        )
    factors: dict[str, dict[str, LazyTensor]] = {}
    alphas: dict[str, LazyTensor] = {}
    unknown = []
    for key, entry in entries.items():
        if match := _FACTOR.fullmatch(key):
            factors.setdefault(match["module"], {})[_letter(match)] = entry
        elif key.endswith(_ALPHA):
            alphas[key.removesuffix(_ALPHA)] = entry
        else:
            unknown.append(key)
    unknown += [f"{module}{_ALPHA}" for module in alphas if module not in factors]
    if unknown:
        raise CheckpointError(f"{path} has {len(unknown)} tensors that are not of LoRA: {first_few(unknown)}")
    stated = _stated_scales(path, metadata, factors)
    updates = {}
    for module, pair in factors.items():
        alpha = _alpha(path, module, alphas[module]) if module in alphas else None
        updates[f"{module}.weight"] = (_update(path, module, pair, alpha, stated.get(module, 1.0)),)
    return Adapter(path=path, files=(path,), style=style, metadata=metadata, updates=updates, replacements={})


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


def _update(path: Path, module: str, pair: Mapping[str, LazyTensor], alpha: float | None, stated: float) -> LowRank:
    if len(pair) != 2:
        raise CheckpointError(f"{path}: {shown(module)} has one of its two matrices and not the other")
    a, b = pair["A"], pair["B"]
    if min(len(a.shape), len(b.shape)) < 2 or a.shape[0] < 1 or b.shape[1] != a.shape[0]:
        raise CheckpointError(f"{path}: {shown(module)} has A {list(a.shape)} and B {list(b.shape)}, of no common rank")
    return LowRank(a=a, b=b, scale=stated if alpha is None else alpha / a.shape[0], transposed=False)


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
    config = peft.PeftConfig.of(path, {"peft_type": "LORA", **own})
    names = {module: module.removeprefix("transformer.") for module in modules}
    config.check(set(names.values()))
    return {module: config.scale(name) for module, name in names.items()}
