"""`osora generate --refine`: from the server's answer to the file, its sidecar, and the same file again."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chat_server import KEY, ChatStub, serving
from tiny_world import released_overrides

from opensora_cli.cli import app
from opensora_cli.engine.generate import refinement, run
from opensora_cli.settings.generate import GenerateSettings

Start = Callable[..., ChatStub]
Osora = Callable[..., tuple[int, str, str]]


@pytest.fixture
def start(monkeypatch, tmp_path):
    monkeypatch.setattr(refinement, "sleep", lambda _: None)
    with serving(monkeypatch, tmp_path / "cache") as start:
        yield start


@pytest.fixture
def osora(world, tmp_path, capsys):
    def call(*more: str) -> tuple[int, str, str]:
        settings = released_overrides(world, tmp_path / "out")
        weights, path = settings.pop("runtime.weights"), settings.pop("output.path")
        given = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        code = app.main(["generate", "--model", "open-sora-v2", "--weights", weights, "--out", path, *given, *more])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call


def sidecar(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(Path(f"{path}.json").read_text())
    return document


def test_both_prompts_are_kept_and_the_same_file_is_made_again_without_asking(start, osora, tmp_path, capsys):
    stub = start("raining, a grey sea under clouds", "9")
    request = "raining, sea", "--seed", "3", "--refine", "--motion-score", "auto"
    code, stdout, stderr = osora(*request)
    video = tmp_path / "out" / "raining-sea_seed3.mp4"
    assert (code, stdout) == (0, f"{video}\n")
    assert "refined prompt: raining, a grey sea under clouds" in stderr
    assert "motion score: 9" in stderr
    written = sidecar(video)
    assert (written["prompt"], written["original_prompt"]) == ("raining, a grey sea under clouds", "raining, sea")
    assert written["full_prompt"].endswith("9 motion score.")
    assert written["settings"]["refine"] == {"original": "raining, sea"}
    assert KEY not in Path(f"{video}.json").read_text() + stdout + stderr
    # The same request: the cache answers, and the result is there.
    assert "made before by the same request" in osora(*request)[2]
    again = tmp_path / "again" / video.name
    weights = written["settings"]["runtime"]["weights"]
    remade = ["generate", "--from", f"{video}.json", "--weights", weights, "--out", f"{again.parent}"]
    assert app.main(remade) == 0
    assert again.read_bytes() == video.read_bytes()
    assert sidecar(again)["original_prompt"] == "raining, sea"
    assert len(stub.asked) == 2
    # Another prompt has nothing to do with what was typed then.
    assert app.main([*remade, "a boat"]) == 0
    assert sidecar(again.parent / "a-boat_seed3.mp4")["original_prompt"] is None
    capsys.readouterr()


def test_the_launcher_asks_once_for_all_ranks(start, osora, monkeypatch):
    stub, started = start("raining, a grey sea"), []
    monkeypatch.setattr(run, "start_ranks", lambda settings, *_: started.append(settings))
    assert osora("raining, sea", "--refine", "--gpus", "2", "--device", "cpu")[0] == 0
    [settings] = started
    assert isinstance(settings, GenerateSettings)
    assert (settings.prompt, settings.refine.is_on) == ("raining, a grey sea", False)
    assert len(stub.asked) == 1
