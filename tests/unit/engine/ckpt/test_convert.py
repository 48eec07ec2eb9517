"""Converting: from every form to every other and back, with and without changes on the way."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_weights import awkward_state, bit_equal, converted
from tiny_world import RecordingReporter

import opensora_cli
from opensora_cli.core.choices import Format
from opensora_cli.core.exceptions import OutputError, RequestError
from opensora_cli.engine.ckpt.convert import convert
from opensora_cli.settings.ckpt import ConvertSettings

SUFFIXES = {Format.SAFETENSORS: ".safetensors", Format.TORCH: ".pt"}


def settings(source: Path, target: Path, **options: object) -> ConvertSettings:
    return ConvertSettings.model_validate({"source": str(source), "target": str(target), **options})


def metadata_of(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        return file.metadata()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Some weights by the safetensors library."""
    generator = torch.Generator().manual_seed(3)
    state = {f"model.blocks.{i}.{kind}": torch.randn(4, 3, generator=generator) for i in (0, 1) for kind in "wb"}
    save_file({**state, "count": torch.tensor(7)}, tmp_path / "source.safetensors", metadata={"note": "kept"})
    return tmp_path / "source.safetensors"


@pytest.mark.parametrize("form", [Format.TORCH_SHARDS, Format.DCP])
def test_another_format_and_back_is_bitwise_identical(form: Format, tmp_path: Path) -> None:
    save_file(awkward_state(), tmp_path / "source.safetensors")
    there = converted(tmp_path / "source.safetensors", tmp_path / "there", format=form)
    assert bit_equal(load_file(converted(there, tmp_path / "back.safetensors")), awkward_state())


def test_metadata_is_kept_and_provenance_added(source: Path, tmp_path: Path) -> None:
    target = converted(source, tmp_path / "target.safetensors", rename=["model.="])
    noted = metadata_of(target)
    assert noted["note"] == "kept"
    assert noted["osora.source"] == str(source)
    assert noted["osora.source_sha256"] == hashlib.sha256(source.read_bytes()).hexdigest()
    assert json.loads(noted["osora.options"]) == {"rename": ["model.="]}
    assert noted["osora.version"] == opensora_cli.__version__

    again = converted(target, tmp_path / "again", hashing=False)
    index = json.loads((again / "model.safetensors.index.json").read_text())
    assert index["metadata"]["note"] == "kept"
    assert index["metadata"]["osora.source"] == str(target)
    assert "osora.source_sha256" not in index["metadata"]
    assert "sha256" not in index["metadata"]


def test_what_is_read_is_never_written(source: Path, tmp_path: Path) -> None:
    shards = converted(source, tmp_path / "shards")
    (tmp_path / "link.safetensors").symlink_to(source)
    (tmp_path / "hard.safetensors").hardlink_to(source)
    content = source.read_bytes()
    for start, target in (
        (source, source),
        (source, tmp_path / "x" / ".." / source.name),
        (source, tmp_path / "link.safetensors"),
        (source, tmp_path / "hard.safetensors"),
        (tmp_path / "link.safetensors", source),
        (shards, shards),
        (shards, shards / "inside.safetensors"),
        (shards / "model.safetensors.index.json", shards),
        (source, tmp_path),
    ):
        with pytest.raises(RequestError, match="source"):
            convert(settings(start, target, overwrite=True))
    assert source.read_bytes() == content


def test_what_cannot_be_written_is_refused_before_reading(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "old.safetensors").write_bytes(b"old")
    reporter = RecordingReporter()
    with pytest.raises(OutputError, match="exists already"):
        convert(settings(source, tmp_path / "old.safetensors"), reporter=reporter)
    assert (tmp_path / "old.safetensors").read_bytes() == b"old"
    with pytest.raises(RequestError, match=r"nothing of .* is left"):
        convert(settings(source, tmp_path / "x", drop=["*"]), reporter=reporter)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"total": 10**9, "free": 50})())
    with pytest.raises(OutputError, match="free"):
        convert(settings(source, tmp_path / "x"), reporter=reporter)
    assert reporter.stages == []  # all is noticed before anything long


@pytest.fixture
def small(source: Path, tmp_path: Path) -> Path:
    """Weights of 8 bits, each with its scale."""
    weights = {name: tensor for name, tensor in load_file(source).items() if tensor.ndim == 2}
    save_file(
        {name.replace(".w", ".weight"): tensor for name, tensor in weights.items()}, tmp_path / "wide.safetensors"
    )
    return converted(tmp_path / "wide.safetensors", tmp_path / "small.safetensors", dtype="fp8_e4m3")


@pytest.mark.parametrize(
    "options",
    [
        {"only": ["*.weight"]},
        {"drop": ["*.0.weight_scale"]},
        {"rename": ["re:weight$=w"]},
        {"rename": [r"re:0(\.weight_scale)$=2\1", r"re:1(\.weight_scale)$=0\1", r"re:2(\.weight_scale)$=1\1"]},
    ],
)
def test_scales_are_not_lost(options: dict[str, list[str]], small: Path, tmp_path: Path) -> None:
    message = r"without their scales, 8-bit tensors of .* are worth nothing: model\.blocks\.0\.weight"
    with pytest.raises(RequestError, match=message) as caught:
        converted(small, tmp_path / "target.safetensors", **options)
    assert "--dtype" in str(caught.value.hint)
    weights = load_file(converted(small, tmp_path / "target.safetensors", dtype="fp32", only=["*.weight"]))
    expected = load_file(tmp_path / "wide.safetensors")
    assert all(torch.allclose(weights[name], expected[name], rtol=0.07, atol=0.01) for name in weights)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"rename": ["model.="]}, {"blocks.0.weight", "blocks.0.weight_scale"}),
        ({"drop": ["*.1.*"]}, {"model.blocks.0.weight", "model.blocks.0.weight_scale"}),
        (
            {"rename": [r"re:(\w+)\.weight_scale$=\1.scale_weight"]},
            {"model.blocks.0.weight", "model.blocks.0.scale_weight"},
        ),
        ({"only": ["*.0.weight_scale"]}, {"model.blocks.0.weight_scale"}),
    ],
)
def test_scales_that_stay_with_their_weights(
    options: dict[str, list[str]], names: set[str], small: Path, tmp_path: Path
) -> None:
    assert names <= load_file(converted(small, tmp_path / "target.safetensors", **options)).keys()
