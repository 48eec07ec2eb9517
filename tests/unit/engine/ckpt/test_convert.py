"""Converting: from every form to every other and back, with and without changes on the way."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_weights import bit_equal, converted
from tiny_world import RecordingReporter

import opensora_cli
from opensora_cli.core.exceptions import OutputError, RequestError
from opensora_cli.engine.ckpt.convert import convert
from opensora_cli.settings.tools import ConvertSettings


def settings(source: Path, target: Path, **options: object) -> ConvertSettings:
    return ConvertSettings.model_validate({"source": str(source), "target": str(target), **options})


def metadata_of(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        return file.metadata()


@pytest.fixture
def source(tmp_path):
    generator = torch.Generator().manual_seed(3)
    state = {f"model.blocks.{i}.{kind}": torch.randn(4, 3, generator=generator) for i in (0, 1) for kind in "wb"}
    save_file({**state, "count": torch.tensor(7)}, tmp_path / "source.safetensors", metadata={"note": "kept"})
    return tmp_path / "source.safetensors"


def test_metadata_is_kept_and_provenance_added(source, tmp_path):
    target = converted(source, tmp_path / "target.safetensors", rename=["model.="])
    noted = metadata_of(target)
    assert noted["note"] == "kept"
    assert noted["osora.source"] == str(source)
    assert json.loads(noted["osora.options"]) == {"rename": ["model.="]}
    assert noted["osora.version"] == opensora_cli.__version__

    again = converted(target, tmp_path / "again")
    index = json.loads((again / "model.safetensors.index.json").read_text())
    assert index["metadata"]["note"] == "kept"
    assert index["metadata"]["osora.source"] == str(target)


def test_what_is_read_is_never_written(source, tmp_path):
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


def test_what_cannot_be_written_is_refused_before_reading(source, tmp_path, monkeypatch):
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


@pytest.mark.parametrize("options", [{"drop": ["*_scale"]}, {"rename": ["x.weight_scale=y"]}, {"rename": ["x.="]}])
def test_8_bit_weights_change_only_with_a_dtype(options, tmp_path):
    """Without their scales they would be worth nothing."""
    values = torch.tensor([[1.0, -2.0]])
    small = {"x.weight": values.to(torch.float8_e4m3fn), "x.weight_scale": torch.tensor(0.5)}
    save_file(small, tmp_path / "small.safetensors")
    assert bit_equal(torch.load(converted(tmp_path / "small.safetensors", tmp_path / "same.pt")), small)
    with pytest.raises(RequestError, match=r"has 8-bit weights") as caught:
        converted(tmp_path / "small.safetensors", tmp_path / "x.safetensors", **options)
    assert caught.value.hint == "add --dtype bf16"
    wide = load_file(converted(tmp_path / "small.safetensors", tmp_path / "wide.safetensors", dtype="bf16"))
    assert bit_equal(wide, {"x.weight": (values / 2).bfloat16()})
