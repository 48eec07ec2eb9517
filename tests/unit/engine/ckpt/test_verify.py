"""Verifying: sound checkpoints pass, and everything wrong is named at once."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny_weights import converted
from tiny_world import RecordingReporter

from opensora_cli.core.exceptions import CheckpointError, RequestError
from opensora_cli.engine.ckpt.hub_records import write_record
from opensora_cli.engine.ckpt.verify import Verification, verify
from opensora_cli.settings.ckpt import VerifySettings


def check(path: Path, **options: object) -> Verification:
    return verify(VerifySettings.model_validate({"path": str(path), **options}))


def flip(path: Path, position: int = -1) -> None:
    """Change one bit of a file."""
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    state = {f"layer.{i}": torch.randn(5, 3, generator=torch.Generator().manual_seed(i)) for i in range(4)}
    save_file(state, tmp_path / "source.safetensors")
    return tmp_path / "source.safetensors"


@pytest.fixture
def shards(source: Path, tmp_path: Path) -> Path:
    return converted(source, tmp_path / "shards", shard_size="60")


def test_sound_checkpoints(source: Path, shards: Path) -> None:
    alone, several = check(source), check(shards)
    assert (alone.problems, several.problems) == ((), ())
    assert alone.hashed == ()
    assert len(several.hashed) == 4
    alone.require_sound()
    assert several.lines() == [
        "sound    safetensors-shards: 4 tensors, 240 bytes",
        "sound    all numbers are finite",
        "sound    4 files have their hash",
    ]
    assert alone.lines()[-1] == "skipped  no hash is known"
    assert several.to_json() == {
        "schema": "osora.ckpt.verify/1",
        "path": str(shards),
        "sound": True,
        "problems": [],
        "format": "safetensors-shards",
        "tensors": 4,
        "hashed": [str(path) for path in sorted(shards.glob("*.safetensors"))],
        "data_read": True,
        "preset": None,
    }


def test_a_changed_bit_in_a_shard(shards: Path) -> None:
    broken = sorted(shards.glob("*.safetensors"))[2]
    flip(broken)
    found = check(shards)
    assert len(found.problems) == 1
    assert found.problems[0].startswith(f"{broken} has the hash ")
    with pytest.raises(CheckpointError, match=f"{shards} has 1 problem"):
        found.require_sound()
    assert check(shards, data=False).is_sound  # what it does not read it cannot know


def test_all_problems_at_once(tmp_path: Path) -> None:
    state = {"a": torch.tensor([float("nan"), 1]), "b": torch.ones(2), "c": torch.tensor([float("inf")] * 3)}
    save_file(state, tmp_path / "a.safetensors")
    found = check(tmp_path / "a.safetensors", preset="hunyuan-vae", sha256="0" * 64)
    joined = "\n".join(found.problems)
    assert "not " + "0" * 64 in joined
    assert "is not hunyuan-vae: 248 missing" in joined
    assert "a is not finite: 1 NaN, 0 infinite among 2" in found.problems
    assert "c is not finite: 0 NaN, 3 infinite among 3" in found.problems
    assert not any(problem.startswith("b ") for problem in found.problems)
    with pytest.raises(CheckpointError, match=r"has 5 problems"):
        found.require_sound()


def test_what_cannot_be_opened_is_a_problem_too(source: Path, tmp_path: Path) -> None:
    content = source.read_bytes()
    (tmp_path / "short.safetensors").write_bytes(content[:-1])
    (tmp_path / "empty.safetensors").touch()
    for name, message in (("short", "truncated"), ("empty", "is empty"), ("gone", "does not exist")):
        found = check(tmp_path / f"{name}.safetensors")
        assert len(found.problems) == 1
        assert message in found.problems[0]
        assert found.to_json()["format"] is None


def test_missing_shards(shards: Path) -> None:
    gone = sorted(shards.glob("*.safetensors"))[1:3]
    for path in gone:
        path.unlink()
    found = check(shards)
    assert all(path.name in "\n".join(found.problems) for path in gone)


def test_an_index_that_disagrees_with_its_shards(shards: Path) -> None:
    index = shards / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    document["weight_map"]["layer.9"] = document["weight_map"]["layer.0"]
    index.write_text(json.dumps(document))
    assert "layer.9" in "\n".join(check(shards).problems)


def test_the_given_hash(source: Path, shards: Path) -> None:
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    assert check(source, sha256=digest.upper()).hashed == (source,)
    assert check(source, sha256=digest).is_sound
    assert not check(source, sha256=digest[::-1]).is_sound
    with pytest.raises(RequestError, match="is the hash of one file"):
        check(shards, sha256=digest)


def test_what_a_download_noted(source: Path, tmp_path: Path) -> None:
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    write_record(tmp_path, source.name, commit="abc", digest=digest)
    assert check(source).hashed == (source,)
    flip(source)
    assert "has the hash" in check(source).problems[0]


def test_a_blob_of_the_hub_cache_is_named_after_its_hash(source: Path, tmp_path: Path) -> None:
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    blob = tmp_path / "models--a--b" / "blobs" / digest
    link = tmp_path / "models--a--b" / "snapshots" / "c0ffee" / "model.safetensors"
    for path in (blob, link):
        path.parent.mkdir(parents=True)
    source.rename(blob)
    link.symlink_to(Path("../../blobs") / digest)
    assert check(link).is_sound
    flip(blob)
    assert not check(link).is_sound


def test_all_weights_of_a_training_are_looked_at(tmp_path: Path) -> None:
    broken = {"weight": torch.full((2,), float("nan"))}
    state = {"step": 7, "model": {"weight": torch.ones(2)}, "ema": broken, "optimizers": []}
    torch.save(state, tmp_path / "checkpoint.pt")
    assert check(tmp_path).problems == ("weight of the ema weights is not finite: 2 NaN, 0 infinite among 2",)
    assert check(tmp_path, select="model").is_sound


def test_progress_is_in_bytes(shards: Path) -> None:
    reporter = RecordingReporter()
    verify(VerifySettings(path=str(shards)), reporter=reporter)
    assert reporter.totals == {"hash": sum(path.stat().st_size for path in shards.glob("*.safetensors")), "read": 240}
    assert reporter.advanced == reporter.totals


def test_unknown_presets(source: Path) -> None:
    with pytest.raises(RequestError, match="preset=flux-dev is not one of") as caught:
        check(source, preset="flux-dev")
    assert caught.value.hint == "did you mean flux1-dev?"
