"""Weights of full size in files that take no disk, and what else a generation is given."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import full_size
import torch
from sparse_weights import save_sparse
from tiny_adapters import CONFIG
from torch import Tensor, nn

from opensora_cli.core.choices import MediaFormat
from opensora_cli.core.conditions import CONDITION_MODES, Source
from opensora_cli.engine.components.architectures import autoencoder_on_meta, transformer_on_meta
from opensora_cli.media.write import png_bytes, write_media
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.load import load_preset

_ADAPTER_RANK = 16
_LONGEST_REFERENCE = 65


def full_size_settings(
    folder: Path, preset: str, *, adapter: bool = False, text: bool = False, **changes: object
) -> GenerateSettings:
    """Return a preset with weights of its size in sparse files; `section__key=value` changes it.

    References are there if its mode takes any. `adapter`: with one of rank 16; `text`: with text encoders.
    """
    settings = load_preset(preset, prompt="raining, sea").replace(
        {
            "sampling.num_inference_steps": 2,
            "output.path": str(folder / "out.mp4"),
            "runtime.threads": 1,
            "runtime.prompt_cache": False,
            **{key.replace("__", "."): value for key, value in changes.items() if key != "condition__mode"},
        }
    )
    given: dict[str, object] = {}
    models = {"files.transformer": transformer_on_meta(settings.model), "files.vae": autoencoder_on_meta(settings.vae)}
    if settings.picture.first and not settings.picture.own_model:
        models["picture.files.transformer"] = transformer_on_meta(settings.picture.model)
        models["picture.files.vae"] = autoencoder_on_meta(settings.picture.vae)
    for key, model in models.items():
        given[key] = str(_written(folder, key, model.state_dict()))
    if mode := changes.get("condition__mode"):
        given |= {"condition.mode": mode, "condition.references": _references(folder, str(mode))}
    if adapter:
        given["loras"] = [{"path": str(_adapter(folder, models["files.transformer"]))}]
    if text:
        given |= dict(_text_folders(folder))
    return settings.replace(given)


def _written(folder: Path, name: str, weights: Mapping[str, Tensor]) -> Path:
    size = sum(weight.nbytes for weight in weights.values())
    path = folder / f"{name}-{len(weights)}-{size}.safetensors"
    if not path.exists():
        save_sparse(path, weights, dtype=torch.bfloat16)
    return path


def _references(folder: Path, mode: str) -> tuple[str, ...]:
    if CONDITION_MODES[mode].source is Source.NONE:
        return ()
    frames_THWC = torch.zeros(_LONGEST_REFERENCE, 64, 64, 3, dtype=torch.uint8)
    if CONDITION_MODES[mode].source is Source.VIDEO:
        path = folder / "reference.mp4"
        if not path.exists():
            write_media([frames_THWC], path, format=MediaFormat.MP4, fps=24)
    else:
        path = folder / "reference.png"
        path.write_bytes(png_bytes(frames_THWC[0]))
    return (str(path),)


def _adapter(folder: Path, transformer: nn.Module) -> Path:
    """Write an adapter of the linear layers of the blocks."""
    factors = {}
    for name, module in transformer.named_modules():
        if isinstance(module, nn.Linear) and "_blocks." in name:
            prefix = f"base_model.model.{name}"
            factors[f"{prefix}.lora_A.weight"] = torch.empty(_ADAPTER_RANK, module.in_features, device="meta")
            factors[f"{prefix}.lora_B.weight"] = torch.empty(module.out_features, _ADAPTER_RANK, device="meta")
    adapter = folder / f"adapter-{len(factors)}"
    save_sparse(adapter / "adapter_model.safetensors", factors, dtype=torch.bfloat16)
    (adapter / "adapter_config.json").write_text(json.dumps(CONFIG | {"r": _ADAPTER_RANK, "lora_alpha": _ADAPTER_RANK}))
    return adapter


def _text_folders(folder: Path) -> Iterator[tuple[str, str]]:
    encoders = {
        "t5": full_size.save_t5(folder / "t5", full_size.T5),
        "clip": full_size.save_clip(folder / "clip", full_size.CLIP),
    }
    for name, model in encoders.items():
        save_sparse(folder / name / "model.safetensors", model.state_dict(), dtype=torch.bfloat16)
        yield f"files.{name}", str(folder / name)
