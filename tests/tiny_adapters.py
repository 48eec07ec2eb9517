"""Adapters in PEFT's format, written by hand as it saves them."""

import json
import re
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

CONFIG = {
    "peft_type": "LORA",
    "base_model_name_or_path": None,
    "r": 2,
    "lora_alpha": 8,
    "lora_dropout": 0.0,
    "target_modules": ["proj", "conv"],
    "bias": "none",
    "fan_in_fan_out": False,
    "init_lora_weights": True,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "use_rslora": False,
    "use_dora": False,
}


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def factors(module: str, rows: int, columns: int, *, rank: int = 2, seed: int = 0) -> dict[str, Tensor]:
    prefix = f"base_model.model.{module}"
    return {
        f"{prefix}.lora_A.weight": draw(rank, columns, seed=seed),
        f"{prefix}.lora_B.weight": draw(rows, rank, seed=seed + 1),
    }


def write_adapter(folder: Path, tensors: dict[str, Tensor], **config: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def write_lora(
    folder: Path,
    model: nn.Module,
    *,
    like: str = ".*",
    rank: int = 2,
    seed: int = 0,
    size: float = 0.3,
    **config: object,
) -> Path:
    """Write an adapter for the linear layers of a model whose names fit a pattern, and return its folder."""
    tensors: dict[str, Tensor] = {}
    for path, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and re.fullmatch(like, path):
            seed += 2
            made = factors(path, layer.out_features, layer.in_features, rank=rank, seed=seed)
            tensors |= {name: tensor * size / tensor.shape[1] ** 0.5 for name, tensor in made.items()}
    assert tensors
    return write_adapter(folder, tensors, r=rank, lora_alpha=2 * rank, **config)
