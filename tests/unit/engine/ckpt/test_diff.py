"""Comparing checkpoints, exactly and with a tolerance."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_weights import awkward_state, converted
from torch import Tensor

from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.engine.ckpt import diff as diff_module
from opensora_cli.engine.ckpt.diff import Difference, diff
from opensora_cli.settings.ckpt import DiffSettings


def compare(folder: Path, first: dict[str, Tensor], second: dict[str, Tensor], **options: object) -> Difference:
    save_file(first, folder / "first.safetensors")
    torch.save(second, folder / "second.pt")
    paths = {"first": str(folder / "first.safetensors"), "second": str(folder / "second.pt")}
    return diff(DiffSettings.model_validate({**paths, **options}))


def test_equal_in_any_form(tmp_path: Path) -> None:
    found = compare(tmp_path, awkward_state(), dict(reversed(awkward_state().items())))
    assert found.equal
    assert found.compared == len(awkward_state())
    found.raise_for_problems()
    assert found.lines() == [f"equal: {len(awkward_state())} tensors compared, largest difference 0"]
    folder = converted(tmp_path / "second.pt", tmp_path / "dcp", format="dcp")
    assert diff(DiffSettings(first=str(folder), second=str(tmp_path / "first.safetensors"))).equal


@pytest.mark.parametrize("step", [2, 1000])
def test_every_kind_of_difference(step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diff_module, "_STEP_NUMEL", step)
    base = {"same": torch.ones(3), "shape": torch.ones(2), "dtype": torch.ones(2), "value": torch.arange(5.0)}
    second = {
        **base,
        "shape": torch.ones(2, 1),
        "dtype": torch.ones(2).bfloat16(),
        "value": torch.tensor([0, 1.5, 2, 3, 4.25]),
    }
    found = compare(tmp_path, {**base, "left": torch.ones(1)}, {**second, "right": torch.ones(1)})
    document = found.to_json()
    assert document["schema"] == "osora.ckpt.diff/1"
    assert not document["equal"]
    assert document["only_in_first"] == ["left"]
    assert document["only_in_second"] == ["right"]
    assert document["shapes"] == {"shape": [[2], [2, 1]]}
    assert document["dtypes"] == {"dtype": ["float32", "bfloat16"]}
    assert document["values"] == {"value": {"differing": 2, "largest_difference": 0.5}}
    assert (document["compared"], document["largest_difference"]) == (3, 0.5)
    assert found.lines() == [
        "only in the first   left",
        "only in the second  right",
        "shape   shape: [2] and [2, 1]",
        "dtype   1 tensors are float32 and bfloat16",
        "values  value: 2 differ, by at most 0.5",
        "different: 3 tensors compared, largest difference 0.5",
    ]
    with pytest.raises(CheckpointError, match=r"first\.safetensors and .*second\.pt differ"):
        found.raise_for_problems()


@pytest.mark.parametrize(
    ("options", "equal"),
    [
        ({"atol": 0.25}, True),
        ({"rtol": 0.06}, False),
        ({"rtol": 0.05, "atol": 0.05}, True),
    ],
)
def test_tolerances_are_relative_to_the_second(options: dict[str, float], equal: bool, tmp_path: Path) -> None:
    found = compare(tmp_path, {"x": torch.tensor([4.25, 0.0])}, {"x": torch.tensor([4.0, 0.0])}, **options)
    assert found.equal == equal
    assert found.largest_difference == 0.25


def test_bits_that_compare_equal(tmp_path: Path) -> None:
    nan, other = torch.tensor([math.nan]), torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert compare(tmp_path, {"x": nan}, {"x": nan.clone()}).equal
    assert not compare(tmp_path, {"x": nan}, {"x": other}).equal
    assert compare(tmp_path, {"x": nan}, {"x": other}, atol=1e-9).equal
    zeros = compare(tmp_path, {"x": torch.tensor([0.0])}, {"x": torch.tensor([-0.0])})
    assert zeros.to_json()["values"] == {"x": {"differing": 1, "largest_difference": 0.0}}


def test_integers_and_flags(tmp_path: Path) -> None:
    found = compare(tmp_path, {"x": torch.tensor([110, 111])}, {"x": torch.tensor([100, 100])}, rtol=0.1)
    assert (found.values["x"].differing, found.largest_difference) == (1, 11.0)
    # fp64 does not tell these apart, and their bits do.
    close = compare(tmp_path, {"x": torch.tensor([2**60 + 1, 7])}, {"x": torch.tensor([2**60, 7])})
    assert close.values["x"].differing == 1
    flags = torch.tensor([True, False])
    assert compare(tmp_path, {"x": flags}, {"x": ~flags}, atol=0.9).values["x"].differing == 2
    assert compare(tmp_path, {"x": flags}, {"x": flags.to(torch.int16)}, atol=0.9).equal


@pytest.fixture
def wide() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {f"{name}.weight": torch.randn(300, 200, generator=generator) for name in "ab"} | {"a.bias": torch.ones(3)}


def small(folder: Path, state: dict[str, Tensor], dtype: str = "fp8_e4m3") -> dict[str, Tensor]:
    save_file(state, folder / "wide.safetensors")
    return load_file(converted(folder / "wide.safetensors", folder / "small.safetensors", dtype=dtype, overwrite=True))


@pytest.mark.parametrize("step", [1000, 2**20])
def test_eight_bits_are_compared_with_their_scales(
    step: int, wide: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diff_module, "_STEP_NUMEL", step)
    narrow = small(tmp_path, wide)
    for pair in ((narrow, wide), (wide, narrow)):
        close = compare(tmp_path, *pair, rtol=0.07, atol=0.001)
        assert close.equal
        assert 0.01 < close.largest_difference < 0.3
        assert (close.compared, close.only_in_first, close.only_in_second) == (3, (), ())
        assert len(close.dtypes) == 2
        assert "float8_e4m3fn" in close.dtypes["a.weight"]
    assert not compare(tmp_path, narrow, wide, rtol=0.001).equal
    assert compare(tmp_path, narrow, small(tmp_path, wide, "fp8_e5m2"), rtol=0.2, atol=0.001).equal
    assert compare(tmp_path, narrow, wide, rtol=0.07, atol=0.001, only=["a.weight"]).compared == 1
