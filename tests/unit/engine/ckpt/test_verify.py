"""Verifying: sound checkpoints pass, and everything wrong is named at once."""

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny_weights import converted

from opensora_cli.community.checkpoint import CheckpointIO
from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.engine.ckpt import inspect
from opensora_cli.engine.ckpt import verify as verify_module
from opensora_cli.engine.ckpt.download import write_record
from opensora_cli.engine.ckpt.inspect import Released, read_released
from opensora_cli.engine.ckpt.verify import Verification, verify
from opensora_cli.settings.tools import VerifySettings


def check(path: Path, **options: object) -> Verification:
    return verify(VerifySettings.model_validate({"path": str(path), **options}))


def flip(path: Path, position: int = -1) -> None:
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
    alone.raise_for_problems()
    assert several.lines() == [
        "sound    safetensors-shards: 4 tensors, 240 bytes",
        "sound    all numbers are finite",
        "skipped  no hash is known",
    ]


def test_all_problems_are_listed_at_once(tmp_path: Path) -> None:
    state = {"a": torch.tensor([float("nan"), 1]), "b": torch.ones(2), "c": torch.tensor([float("inf")] * 3)}
    save_file(state, tmp_path / "a.safetensors")
    found = check(tmp_path / "a.safetensors", preset="hunyuan-vae")
    joined = "\n".join(found.problems)
    assert "is not hunyuan-vae: 248 missing" in joined
    assert "a has 1 numbers that are not finite" in found.problems
    assert "c has 3 numbers that are not finite" in found.problems
    assert not any(problem.startswith("b ") for problem in found.problems)
    with pytest.raises(CheckpointError, match=r"has 4 problems"):
        found.raise_for_problems()


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


@pytest.mark.parametrize("name", ["optimizer/optimizer.pt", "ema.safetensors"])
@pytest.mark.parametrize("named", ["epoch", "run"])
def test_a_changed_part_of_a_training_is_a_problem(name: str, named: str, tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    states = {"ema": model, "optimizer": torch.optim.AdamW(model.parameters())}
    training = Path(CheckpointIO().save(None, tmp_path, model, **states, async_io=False))
    assert check(training).sound
    flip(training / name)
    found = check(training if named == "epoch" else tmp_path)
    assert len(found.problems) == 1
    assert found.problems[0].startswith(f"{training / name} has the hash ")


def test_the_preset_of_8_bit_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The names of a published model, and small shapes.
    names = read_released("hunyuan-vae").shapes
    small = Released("hunyuan-vae", "", {name: tuple(min(size, 2) for size in names[name]) for name in names})
    monkeypatch.setattr(inspect, "released_names", lambda: ["hunyuan-vae"])
    monkeypatch.setattr(verify_module, "read_released", lambda name: small)
    state = {name: torch.zeros(shape).to(torch.float8_e4m3fn) for name, shape in small.shapes.items()}
    scales = {f"{name}_scale": torch.ones(()) for name in state}
    save_file(state | scales, tmp_path / "small.safetensors")
    assert check(tmp_path / "small.safetensors", preset="hunyuan-vae").sound
