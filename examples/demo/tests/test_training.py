"""The recipes, shrunk: from the command line to exported weights."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import clips
from demo_world.command import run
from demo_world.scene_clips import SceneClip
from demo_world.settings import Recipe, load_recipe
from demo_world.training import train_on_scenes
from opensora_cli.core.progress import SilentReporter
from opensora_cli.engine.components.weights import packaged_demo
from opensora_cli.media.names import file_stem
from opensora_cli.media.read import probe

FACTOR = 0.4
"""Largest share of the validation loss that is left. It was 0.16 when this was measured."""

SHRUNK = {
    "demo.scenes.count": 64,
    "demo.scenes.batch_size": 8,
    "demo.scenes.picture_batch_size": 16,
    "data.workers": 0,
    "optimizer.warmup_steps": 5,
    "optimizer.decay_steps": 40,
    "loop.steps": 120,
    "loop.ema_decay": 0.95,
    "train_mmdit.frozen_dtype": "float32",
    "validation.every": 60,
    "validation.batches": 4,
    "samples.every": 120,
    "samples.num_inference_steps": 10,
    "device": "cpu",
}


@pytest.mark.slow
@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    reason="bf16 products, of Muon and of attention, take minutes a step on a CPU without instructions for them",
)
def test_validation_loss_falls(tmp_path: Path) -> None:
    paths = {"weights": packaged_demo(), "output": tmp_path / "run", "train_mmdit.cache": tmp_path / "cache"}
    recipe = load_recipe("demo_short", [f"{key}={value}" for key, value in {**SHRUNK, **paths}.items()])
    assert isinstance(recipe, Recipe)
    train_on_scenes(recipe, reporter=SilentReporter())
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line.get("event") == "validation"]
    assert len(losses) == 3
    assert losses[2] < losses[1] < losses[0]
    assert losses[2] < FACTOR * losses[0]
    videos = sorted((tmp_path / "run" / "samples").rglob("*.mp4"))
    assert [path.stem for path in videos] == sorted(
        file_stem(prompt, seed=recipe.settings.samples.seed + index)
        for index, prompt in enumerate(recipe.settings.samples.prompts)
    )
    assert all((facts.num_frames, facts.height, facts.width) == (9, 128, 128) for facts in map(probe, videos))


TINY = {
    "demo.scenes.count": 8,
    "demo.scenes.size": 32,
    "demo.scenes.num_frames": 5,
    "demo.scenes.batch_size": 2,
    "demo.scenes.picture_batch_size": 2,
    "data.workers": 0,
    "vae.latent_channels": 4,
    "vae.block_out_channels": "4,8,8",
    "vae.layers_per_block": 1,
    "vae.norm_num_groups": 2,
    "vae.spatial_compression_ratio": 4,
    "train_vae.crop_size": 16,
    "optimizer.warmup_steps": 1,
    "optimizer.decay_steps": 0,
    "precision.compute": "fp32",
    "loop.steps": 2,
    "loop.log_every": 1,
    "device": "cpu",
}


def tiny(recipe: str, output: Path, *flags: str, **changes: object) -> int:
    values = {**TINY, "output": output, **{key.replace("__", "."): value for key, value in changes.items()}}
    return run(
        ["--recipe", recipe, *(word for each in values.items() for word in ("--set", "{}={}".format(*each))), *flags]
    )


def test_an_autoencoder_of_pictures_then_of_clips(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pictures, moving = tmp_path / "pictures", tmp_path / "clips"
    assert tiny("demo_vae_pictures", pictures) == 0
    first = load_file(pictures / "vae.safetensors")
    assert {weight.dtype for weight in first.values()} == {torch.float32}
    kernel = first["encoder.conv_in.conv.weight"]
    assert torch.equal(kernel[:, :, 0], -kernel[:, :, 1])  # gathered
    more = {"init": pictures / "vae.safetensors", "demo__whitening_clips": 3, "validation__every": 1}
    assert tiny("demo_vae", moving, **more) == 0
    assert capsys.readouterr().out.splitlines() == [str(folder / "vae.safetensors") for folder in (pictures, moving)]
    assert {weight.dtype for weight in load_file(moving / "vae.safetensors").values()} == {torch.float16}
    lines = [json.loads(line) for line in (moving / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line.get("event") == "validation"] == [0, 1, 2]
    # The folder holds a run, and it can be continued.
    assert tiny("demo_vae", moving, **more) == 3
    assert "holds an earlier run" in capsys.readouterr().err
    assert tiny("demo_vae", moving, "--resume", **more, loop__steps=3) == 0


def test_wrong_requests_are_refused_before_torch_is_imported() -> None:
    script = Path(__file__).parents[1] / "train.py"
    call = [sys.executable, "-X", "importtime", str(script), "--recipe", "demo_shrt"]
    result = subprocess.run(call, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert "error: recipe 'demo_shrt' is not one of demo, " in result.stderr
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "pydantic" in imported
    assert "torch" not in imported


def test_clips_are_written_with_captions(tmp_path: Path) -> None:
    assert clips.main(["--out", str(tmp_path / "clips"), "--count", "2", "--size", "32", "--num-frames", "5"]) == 0
    assert sorted(path.name for path in (tmp_path / "clips").iterdir()) == [
        f"000{number}.{ending}" for number in range(2) for ending in ("mp4", "txt")
    ]
    facts = probe(tmp_path / "clips" / "0001.mp4")
    assert (facts.num_frames, facts.height, facts.width, facts.fps) == (5, 32, 32, 12.0)
    assert (tmp_path / "clips" / "0000.txt").read_text() == SceneClip(seed=0, number=0).caption + "\n"
