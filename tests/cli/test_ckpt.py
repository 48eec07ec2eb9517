"""`osora ckpt`: results on stdout, messages on stderr, exit codes, and no files after a failure."""

import json
import os
import re
import signal
from pathlib import Path

import pytest
import tiny_training
import torch
import yaml
from fake_hub import FakeRepo, connect, serving
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_weights import bit_equal

from opensora_cli.checkpoint import lazy
from opensora_cli.cli.app import main
from opensora_cli.settings.load import load_preset

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    """Every test has these files in its working directory."""
    monkeypatch.chdir(tmp_path)
    save_file({"a.weight": torch.arange(6.0).view(2, 3), "a.bias": torch.ones(2)}, "good.safetensors")
    Path("file").touch()


@pytest.mark.usefixtures("every_stage_takes_time")
@pytest.mark.parametrize("command", [["ckpt", "convert"], ["convert-ckpt"]], ids=" ".join)
def test_both_names_of_convert(command, capsys):
    assert main([*command, "good.safetensors", "new.pt", "--dtype", "bf16"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "new.pt\n"
    assert torch.load("new.pt", weights_only=True)["a.bias"].dtype == torch.bfloat16
    lines = captured.err.splitlines()
    assert lines[:4] == [
        "source  good.safetensors (safetensors)",
        "target  new.pt (torch)",
        "size    2 tensors, 16 bytes",
        "changes dtype bf16",
    ]
    assert re.fullmatch(r"write: 16 bytes, [\d.]+ s", lines[4])


def test_dry_run(run):
    code, out, _ = run("ckpt", "convert", "good.safetensors", "new", "--dry-run")
    assert (code, out.splitlines()[1]) == (0, "target  new (safetensors-shards)")
    assert not Path("new").exists()
    assert run("ckpt", "convert", "good.safetensors", "file", "--format", "torch", "--dry-run")[0] == 3


def test_inspect(run):
    code, out, err = run("ckpt", "inspect", "good.safetensors")
    assert (code, err) == (0, "")
    summary = out.splitlines()
    assert summary[0] == "format      safetensors, 1 file, 32 bytes"
    assert "tensors     2: a.bias, a.weight" in summary
    assert run("ckpt", "inspect", "good.safetensors", "--all")[1].splitlines() == [
        *summary,
        "",
        "a.bias    float32  [2]     8 bytes",
        "a.weight  float32  [2, 3]  24 bytes",
    ]


def test_verify(run):
    assert run("ckpt", "verify", "good.safetensors", "--quiet")[0] == 0
    code, out, err = run("ckpt", "verify", "good.safetensors", "--preset", "flux1-dev", "-q")
    assert (code, err) == (3, "error: good.safetensors has 2 problems\n")
    assert [line.split()[0] for line in out.splitlines()] == ["problem"] * 2
    Path("truncated.safetensors").write_bytes(Path("good.safetensors").read_bytes()[:-3])
    code, out, _ = run("ckpt", "verify", "truncated.safetensors", "--json", "-q")
    assert (code, json.loads(out)["sound"]) == (3, False)


def test_merge_lora_and_back(run):
    Path("adapter").mkdir()
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 2}
    Path("adapter", "adapter_config.json").write_text(json.dumps(config))
    factors = {"A": torch.tensor([[1.0, 0.0, -1.0]]), "B": torch.tensor([[3.0], [0.5]])}
    tensors = {f"base_model.model.a.lora_{name}.weight": factor for name, factor in factors.items()}
    save_file(tensors, "adapter/adapter_model.safetensors")

    code, out, err = run("ckpt", "merge-lora", "good.safetensors", "adapter", "new.safetensors", "-q")
    assert (code, out, err) == (0, "new.safetensors\n", "")
    assert load_file("new.safetensors")["a.weight"].tolist() == [[6, 1, -4], [4, 4, 4]]
    with safe_open("new.safetensors", framework="pt") as file:
        assert json.loads(file.metadata()["osora.options"]) == {"adapter": "adapter", "scale": 1.0}
    undo = ("merge-lora", "new.safetensors", "adapter", "back.pt", "--scale", "-1", "--json", "-q")
    code, out, _ = run("ckpt", *undo)
    assert (code, json.loads(out)["schema"]) == (0, "osora.ckpt.merge-lora/3")
    assert bit_equal(torch.load("back.pt", weights_only=True), load_file("good.safetensors"))


@pytest.mark.parametrize("target", ["new.safetensors", "new"])
def test_ctrl_c_leaves_nothing(target, monkeypatch, run):
    Path("old").mkdir()
    before = sorted(os.listdir())
    write_all = lazy.write_all

    def interrupted(*args: object) -> None:
        write_all(*args)  # type: ignore[arg-type]
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(lazy, "write_all", interrupted)
    code, out, err = run("ckpt", "convert", "good.safetensors", target, "-q")
    assert (code, out, err) == (130, "", "error: interrupted\n")
    assert sorted(os.listdir()) == before


@pytest.fixture
def hub():
    files = {"Open_Sora_v2.safetensors": b"weights", "hunyuan_vae.safetensors": b"vae"}
    files |= {f"{folder}/config.json": b"{}" for folder in ("google/t5-v1_1-xxl", "openai/clip-vit-large-patch14")}
    with serving() as server:
        server.repos["hpcai-tech/Open-Sora-v2"] = FakeRepo(files)
        yield server


def test_download(hub, monkeypatch, run):
    connect(hub, monkeypatch)
    code, out, _ = run("ckpt", "download", "open-sora-v2", "--dry-run", "--json")
    assert (code, json.loads(out)["schema"], hub.transfers) == (0, "osora.ckpt.download/3", [])
    code, out, err = run("ckpt", "download", "open-sora-v2")
    assert code == 0
    assert "hpcai-tech/Open-Sora-v2: licence apache-2.0" in err
    assert Path("ckpts/Open_Sora_v2.safetensors").read_bytes() == b"weights"
    assert out.endswith("14 bytes  in ckpts, all there\n")


@pytest.mark.slow
def test_train_convert_generate(capsys, run):
    """With the demo's own sizes: what a training leaves becomes what generating reads, and no option tells it how."""
    demo = ROOT / "opensora_cli" / "assets" / "demo"
    sizes = load_preset("demo", prompt="any").model_dump(mode="json", include={"model", "vae"})
    recipe = {
        "target": "mmdit",
        "output": "run",
        "weights": [str(demo)],
        "data": {"table": tiny_training.TABLE, "buckets": {"32px": {"13": [1.0, 1]}}, "workers": 0},
        "loop": {"steps": 1},
        "precision": {"compute": "fp32"},
        "train_mmdit": {"video_latent_frames": 1, "easy_latent_frames": 2, "frozen_dtype": "float32"},
        **sizes,
    }
    Path("recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["train", "--config", "recipe.yaml", "--quiet"]) == 0
    target = Path("weights", "transformer.safetensors")
    assert run("ckpt", "convert", "run", str(target), "--select", "ema")[0] == 0

    shortest = ["--steps", "1", "--num-frames", "1", "--out", "a.png"]
    assert main(["generate", "raining, sea", "--model", "demo", "--weights", "weights", *shortest, "-v"]) == 0
    assert "weights: vae, t5, clip are the demo's own" in capsys.readouterr().err
    assert Path("a.png").is_file()
    exported, converted = load_file("run/transformer.safetensors"), load_file(target)
    assert converted.keys() == exported.keys()
    assert all(tensor.half().equal(exported[name]) for name, tensor in converted.items())
