"""Merging an adapter into a model in a file, and taking it out again."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_weights import bit_equal
from tiny_world import RecordingReporter

from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.engine.ckpt.convert import Merge, merge_lora
from opensora_cli.settings.tools import MergeLoraSettings

RANK, ALPHA = 2, 6


@pytest.fixture
def base(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(4)
    state = {name: torch.randn(6, 5, generator=generator).bfloat16() for name in ("to_q.weight", "to_k.weight")}
    save_file({**state, "norm.scale": torch.ones(5)}, tmp_path / "base.safetensors", metadata={"note": "kept"})
    return tmp_path / "base.safetensors"


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    folder = tmp_path / "adapter"
    folder.mkdir()
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": ["to_q"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(5)
    factors = {"A": torch.randn(RANK, 5, generator=generator), "B": torch.randn(6, RANK, generator=generator)}
    named = {f"base_model.model.to_q.lora_{name}.weight": factor for name, factor in factors.items()}
    save_file(named, folder / "adapter_model.safetensors")
    return folder


def merge(
    base: Path, adapter: Path, target: Path, *, reporter: RecordingReporter | None = None, **options: object
) -> Merge:
    values = {"base": str(base), "adapter": str(adapter), "target": str(target), **options}
    return merge_lora(MergeLoraSettings.model_validate(values), reporter=reporter)


def update(adapter: Path) -> torch.Tensor:
    factors = load_file(adapter / "adapter_model.safetensors")
    a, b = (factors[f"base_model.model.to_q.lora_{name}.weight"] for name in "AB")
    return ALPHA / RANK * b @ a


@pytest.mark.parametrize("scale", [1.0, 0.25, -2.0])
def test_the_adapter_is_added_and_recorded(scale: float, base: Path, adapter: Path, tmp_path: Path) -> None:
    result = merge(base, adapter, tmp_path / "merged.safetensors", scale=scale)
    before, after = load_file(base), load_file(tmp_path / "merged.safetensors")
    expected = before["to_q.weight"].float() + scale * update(adapter)
    torch.testing.assert_close(after["to_q.weight"], expected.bfloat16(), rtol=2**-7, atol=1e-6)
    others = ("to_k.weight", "norm.scale")
    assert bit_equal({name: after[name] for name in others}, {name: before[name] for name in others})
    document = result.to_json()
    assert document["schema"] == "osora.ckpt.merge-lora/3"
    assert result.lines() == [str(tmp_path / "merged.safetensors")]
    with safe_open(tmp_path / "merged.safetensors", framework="pt") as file:
        noted = file.metadata()
    assert noted["note"] == "kept"
    assert json.loads(noted["osora.options"]) == {"adapter": str(adapter), "scale": scale}


def test_numbers_that_are_not_finite_are_not_merged(base: Path, tmp_path: Path) -> None:
    factors = {"to_q.lora_A.weight": torch.full((2, 5), torch.nan), "to_q.lora_B.weight": torch.ones(6, 2)}
    save_file(factors, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match=r"not finite: to_q\.lora_A\.weight"):
        merge(base, tmp_path / "a.safetensors", tmp_path / "x.safetensors")
