"""`osora show` and `--from`, for each kind of file."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.fake_engine import FakeEngine
from safetensors.torch import save_file

from opensora_cli.cli.app import main
from opensora_cli.engine.generate.sample import STEPS_KEY
from opensora_cli.media.write import write_media

SETTINGS = {"prompt": "sea", "sampling": {"seed": 7, "num_inference_steps": 3}, "video": {"fps": 12}}
SIDECAR = {
    "schema": "osora.generate/3",
    "prompt": "sea",
    "negative_prompt": "",
    "seed": 7,
    "model": "demo",
    "device_name": "CPU",
    "dtype": "float32",
    "height": 64,
    "width": 96,
    "num_frames": 5,
    "fps": 12,
    "timings_s": {"load": 0.5, "denoise": 61.2},
    "settings": SETTINGS,
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    frames_THWC = torch.zeros(2, 16, 16, 3, dtype=torch.uint8)
    tags = {"prompt": "sea", "seed": "7"}
    for name in ("a.png", "a.gif", "a.mp4"):
        pieces = [frames_THWC[:1]] if name == "a.png" else [frames_THWC]
        write_media(pieces, Path(name), fps=12, format=name.removeprefix("a."), metadata=tags)
    Path("with.mp4").write_bytes(Path("a.mp4").read_bytes())
    Path("with.mp4.json").write_text(json.dumps(SIDECAR))
    for name, more in (("state", {STEPS_KEY: "2"}), ("done", {})):
        metadata = {"schema": "osora.latents/1", "settings": json.dumps(SETTINGS), **more}
        save_file({"latents": torch.zeros(1)}, f"{name}.latents.safetensors", metadata=metadata)
    Path("frames").mkdir()
    Path("frames/frame_0000.png").write_bytes(Path("a.png").read_bytes())
    Path("frames.json").write_text(json.dumps(SIDECAR))
    Path("run").mkdir()
    save_file({"weight": torch.zeros(2, 3)}, "run/model.safetensors")
    Path("run/settings.json").write_text(json.dumps({"target": "vae", "loop": {"steps": 4}}))
    return tmp_path


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main(["show", *words]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", ["with.mp4", "with.mp4.json"])
def test_a_result_and_its_sidecar(name, capsys):
    kind = "sidecar" if name.endswith(".json") else "result"
    assert shown(capsys, name).splitlines() == [
        f"file      {name} ({kind})",
        "prompt    sea",
        "seed      7",
        "model     demo, CPU, float32",
        "video     96x64, 5 frames at 12 fps",
        "timings   load 0.5 s, denoise 1 min 01 s",
        "setting   prompt=sea",
        "setting   sampling.seed=7",
        "setting   sampling.num_inference_steps=3",
        "setting   video.fps=12",
    ]
    document = json.loads(shown(capsys, name, "--json"))
    assert (document["schema"], document["seed"], document["settings"]) == ("osora.show/1", 7, SETTINGS)


@pytest.mark.parametrize("name", ["a.png", "a.gif", "a.mp4"])
def test_a_result_without_a_sidecar_has_its_tags(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(shown(capsys, name, "--json"))
    assert (document["prompt"], document["seed"]) == ("sea", 7)


@pytest.mark.parametrize(("name", "kind"), [("state", "state"), ("done", "latents")])
def test_latents(name, kind, capsys):
    document = json.loads(shown(capsys, f"{name}.latents.safetensors", "--json"))
    assert (document["kind"], document["prompt"], document["seed"]) == (kind, "sea", 7)


@pytest.mark.parametrize("name", ["run", "run/model.safetensors"])
def test_weights_and_the_run_that_wrote_them(name, capsys):
    out = shown(capsys, name)
    assert "parameters  6" in out
    assert "None" not in out
    assert "setting   loop.steps=4" in out


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("b.png", b"\x89PNG\r\n\x1a\nbroken", "b.png records nothing"),
        ("b.json", b"[1]", "b.json is broken"),
        ("b.json", b'{"settings": {}, "seed": "x"}', "b.json is damaged"),
        ("b.safetensors", b"short", "b.safetensors"),
    ],
)
def test_broken_files(name, content, message, osora):
    Path(name).write_bytes(content)
    assert message in osora("show", name, code=3).err


def test_from_recognizes_a_result_by_its_sidecar(engine):
    for name in ("with.mp4", "with.mp4.json", "frames", "frames/"):
        assert main(["generate", "--from", name]) == 0
        assert engine.settings is not None
        assert (engine.settings.prompt, engine.settings.sampling.seed) == ("sea", 7)


@pytest.mark.parametrize("name", ["a.png", "a.gif", "a.mp4"])
def test_from_takes_prompt_and_seed_of_a_result_without_a_sidecar(
    name: str, engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--from", name]) == 0
    assert engine.settings is not None
    assert (engine.settings.prompt, engine.settings.sampling.seed) == ("sea", 7)
    assert f"{name} has no sidecar: it gives its prompt and seed alone" in capsys.readouterr().err
    assert main(["generate", "boat", "--from", name, "--seed", "3"]) == 0
    assert (engine.settings.prompt, engine.settings.sampling.seed) == ("boat", 3)


@pytest.mark.parametrize(("name", "key"), [("state", "resume"), ("done", "from_latents")])
def test_from_recognizes_latents(name, key, engine):
    file = f"{name}.latents.safetensors"
    prompt = ["sea"] if key == "resume" else []
    assert main(["generate", *prompt, "--from", file]) == 0
    assert engine.settings is not None
    assert getattr(engine.settings, key) == file
