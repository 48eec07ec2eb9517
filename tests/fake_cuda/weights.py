"""Weights of full size in files that take no disk, and what else a generation is given."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from tiny_adapters import CONFIG
from tiny_weights import write_holes
from tiny_world import save_tokenizer
from torch import Tensor, nn

from opensora_cli.core.choices import MediaFormat
from opensora_cli.core.conditions import CONDITION_MODES, Source
from opensora_cli.engine.components.architectures import autoencoder_on_meta, on_meta, transformer_on_meta
from opensora_cli.media.write import png_bytes, write_media
from opensora_cli.models.text.clip import ClipTextModel
from opensora_cli.models.text.sizes import ClipSizes, T5Sizes
from opensora_cli.models.text.t5 import T5Model
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.load import load_preset

_ADAPTER_RANK = 16
_LONGEST_REFERENCE = 65
_PROMPT = "raining, sea"
_T5 = {"model_type": "t5", "vocab_size": 32_128, "d_model": 4096, "d_kv": 64, "d_ff": 10_240, "num_layers": 24}
_T5 |= {"num_heads": 64, "feed_forward_proj": "gated-gelu"}
_CLIP = {"model_type": "clip_text_model", "hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}
_CLIP |= {"vocab_size": 49_408, "eos_token_id": 49_407}


def full_size_settings(
    folder: Path, preset: str, *, adapter: bool = False, text: bool = False, **changes: object
) -> GenerateSettings:
    """Return a preset with weights of its size in sparse files; `section__key=value` changes it.

    References are there if its mode takes any. `adapter`: with one of rank 16; `text`: with text encoders.
    """
    settings = load_preset(preset, prompt=_PROMPT).replace(
        {
            "sampling.num_inference_steps": 2,
            "output.path": str(folder / "out.mp4"),
            "runtime.threads": 1,
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
        write_holes(path, weights, dtype="BF16")
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
    factors = {}
    for name, module in transformer.named_modules():
        if isinstance(module, nn.Linear) and "_blocks." in name:
            prefix = f"base_model.model.{name}"
            factors[f"{prefix}.lora_A.weight"] = torch.empty(_ADAPTER_RANK, module.in_features, device="meta")
            factors[f"{prefix}.lora_B.weight"] = torch.empty(module.out_features, _ADAPTER_RANK, device="meta")
    adapter = folder / f"adapter-{len(factors)}"
    write_holes(adapter / "adapter_model.safetensors", factors, dtype="BF16")
    (adapter / "adapter_config.json").write_text(json.dumps(CONFIG | {"r": _ADAPTER_RANK, "lora_alpha": _ADAPTER_RANK}))
    return adapter


def _text_folders(folder: Path) -> Iterator[tuple[str, str]]:
    words = {word: number for number, word in enumerate(_PROMPT.replace(",", " ,").split(), start=3)}
    t5, clip = {"<pad>": 0, "</s>": 1, "<unk>": 2}, {"<pad>": 0, "<unk>": 1, "<s>": 49_406, "</s>": 49_407}
    save_tokenizer(folder / "t5", "$A </s>", words=t5 | words, **_T5)
    save_tokenizer(folder / "clip", "<s> $A </s>", words=clip | words, **_CLIP)
    with on_meta():
        encoders = {"t5": T5Model(T5Sizes.of(folder / "t5")), "clip": ClipTextModel(ClipSizes.of(folder / "clip"))}
    for name, model in encoders.items():
        write_holes(folder / name / "model.safetensors", model.state_dict(), dtype="BF16")
        yield f"files.{name}", str(folder / name)
