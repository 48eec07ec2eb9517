"""Verifying: sound checkpoints pass, and everything wrong is named at once."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_weights import converted

from opensora_cli.community.checkpoint import CheckpointIO
from opensora_cli.core.exceptions import CheckpointError, RequestError
from opensora_cli.engine.ckpt import convert, inspect
from opensora_cli.engine.ckpt import verify as verify_module
from opensora_cli.engine.ckpt.download import write_record
from opensora_cli.engine.ckpt.inspect import Released, read_released
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


def test_sound_checkpoints_have_no_problems(source: Path, shards: Path) -> None:
    alone, several = check(source), check(shards)
    assert (alone.problems, several.problems) == ((), ())
    assert alone.hashed == ()
    assert len(several.hashed) == 4
    alone.raise_for_problems()
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


def test_a_changed_bit_in_a_shard_is_found(shards: Path) -> None:
    broken = sorted(shards.glob("*.safetensors"))[2]
    flip(broken)
    found = check(shards)
    assert len(found.problems) == 1
    assert found.problems[0].startswith(f"{broken} has the hash ")
    with pytest.raises(CheckpointError, match=f"{shards} has 1 problem"):
        found.raise_for_problems()
    assert check(shards, data=False).sound  # what it does not read it cannot know


def test_all_problems_are_listed_at_once(tmp_path: Path) -> None:
    state = {"a": torch.tensor([float("nan"), 1]), "b": torch.ones(2), "c": torch.tensor([float("inf")] * 3)}
    save_file(state, tmp_path / "a.safetensors")
    found = check(tmp_path / "a.safetensors", preset="hunyuan-vae", sha256="0" * 64)
    joined = "\n".join(found.problems)
    assert "not " + "0" * 64 in joined
    assert "is not hunyuan-vae: 248 missing" in joined
    assert "a has 1 numbers that are not finite" in found.problems
    assert "c has 3 numbers that are not finite" in found.problems
    assert not any(problem.startswith("b ") for problem in found.problems)
    with pytest.raises(CheckpointError, match=r"has 5 problems"):
        found.raise_for_problems()


def test_what_cannot_be_opened_is_a_problem_too(source: Path, tmp_path: Path) -> None:
    content = source.read_bytes()
    (tmp_path / "short.safetensors").write_bytes(content[:-1])
    (tmp_path / "empty.safetensors").touch()
    for name, message in (("short", "truncated"), ("empty", "is empty"), ("gone", "does not exist")):
        found = check(tmp_path / f"{name}.safetensors")
        assert len(found.problems) == 1
        assert message in found.problems[0]
        assert (found.to_json()["format"], found.to_json()["data_read"]) == (None, False)


def test_a_single_shard_is_a_problem(shards: Path) -> None:
    shard = shards / "model-00002-of-00004.safetensors"
    problem = f"{shard} is shard 2 of 4: a part of a checkpoint"
    assert check(shard).problems == (problem,)
    # Who gives a hash asks whether this file is what it should be.
    found = check(shard, sha256=hashlib.sha256(shard.read_bytes()).hexdigest())
    assert found.sound
    assert found.lines()[0] == "sound    safetensors, shard 2 of 4: 1 tensors, 60 bytes"
    (shards / "model.safetensors.index.json").unlink()
    assert "without their index" in check(shards).problems[0]


def test_the_given_hash_is_checked(source: Path, shards: Path) -> None:
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    assert check(source, sha256=digest.upper()).hashed == (source,)
    assert check(source, sha256=digest).sound
    assert not check(source, sha256=digest[::-1]).sound
    with pytest.raises(RequestError, match="is the hash of one file"):
        check(shards, sha256=digest)


def test_the_recorded_hash_of_a_download_is_checked(source: Path, tmp_path: Path) -> None:
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
    assert check(link).sound
    flip(blob)
    assert not check(link).sound


SHARD, INDEX = "model-00001-of-00004.safetensors", "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("part", "changes", "problem"),
    [
        ("weight_map", {"layer.9": SHARD}, f"{SHARD} lacks tensors that {INDEX} has in it: layer.9"),
        ("sha256", {SHARD: "\x1b[2J"}, f"{INDEX} is broken: it has no hash for {SHARD}, but other text"),
        ("sha256", {"../secret": "0" * 64}, f"{INDEX} is broken: its sha256 is no mapping of each shard to its hash"),
    ],
)
def test_an_index_that_disagrees_with_its_shards_is_a_problem(
    part: str, changes: dict[str, object], problem: str, shards: Path, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("password")
    (shards / "notes.txt").write_text("mine")
    document = json.loads((shards / INDEX).read_text())
    (document["metadata"] if part == "sha256" else document)[part] |= changes
    (shards / INDEX).write_text(json.dumps(document))
    found = check(shards)
    assert found.problems == (f"{shards}/{problem}",)
    assert {path.name for path in found.hashed} <= {path.name for path in shards.glob("*.safetensors")}


@pytest.fixture
def training(tmp_path: Path) -> Path:
    """The folder of a training with all states, and without hashes, as the reference writes it."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    states = {"ema": model, "optimizer": optimizer, "lr_scheduler": scheduler}
    folder = Path(CheckpointIO().save(None, tmp_path, model, **states, async_io=False))
    (folder / "running_states.json").write_text('{"epoch": 0, "step": 0, "global_step": 0, "batch_size": null}')
    return folder


@pytest.mark.parametrize(
    "name", ["optimizer/optimizer.pt", "lr_scheduler.pt", "ema.safetensors", "running_states.json"]
)
@pytest.mark.parametrize("length", [50, -2])
@pytest.mark.parametrize("named", ["epoch", "run"])
def test_a_truncated_part_of_a_training_is_a_problem(name: str, length: int, named: str, training: Path) -> None:
    path = training / name
    content = path.read_bytes()
    path.write_bytes(content[:length])
    whole = training if named == "epoch" else training.parent
    found = check(whole)
    assert len(found.problems) == 1
    assert found.problems[0].startswith(str(path))
    assert found.to_json()["tensors"] == 2
    assert check(whole, select="model").sound


def test_the_preset_of_8_bit_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The names of a published model, and small shapes.
    names = read_released("hunyuan-vae").shapes
    small_one = Released("hunyuan-vae", "", {name: tuple(min(size, 2) for size in names[name]) for name in names})
    monkeypatch.setattr(inspect, "released_names", lambda: ["hunyuan-vae"])
    for module in (inspect, convert, verify_module):
        monkeypatch.setattr(module, "read_released", lambda name: small_one)
    save_file({name: torch.zeros(shape).bfloat16() for name, shape in small_one.shapes.items()}, tmp_path / "wide")
    small = converted(tmp_path / "wide", tmp_path / "small.safetensors", dtype="fp8_e4m3", preset="hunyuan-vae")
    assert any(name.endswith("_scale") for name in load_file(small))
    assert check(small, preset="hunyuan-vae").sound
