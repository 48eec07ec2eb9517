"""Help, version and completion: complete, and without anything heavy."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import opensora_cli
from opensora_cli.cli.app import main
from opensora_cli.cli.train import complete_recipe
from opensora_cli.settings.files import list_presets
from opensora_cli.settings.generate import GenerateSettings

HEAVY = {"torch", "transformers", "av", "numpy", "PIL", "imageio", "safetensors", "huggingface_hub"}
OPTIONS = {
    "--model",
    "--res",
    "--aspect-ratio",
    "--num-frames",
    "--steps",
    "--guidance-scale",
    "--image-guidance-scale",
    "--cond",
    "--ref",
    "--fit",
    "--lora",
    "--seed",
    "--num-samples",
    "--negative-prompt",
    "--motion-score",
    "--fps",
    "--out",
    "--format",
    "--weights",
    "--device",
    "--dtype",
    "--config",
    "--set",
    "--dry-run",
    "--json",
    "--quiet",
    "--from",
    "--from-latents",
    "--overwrite",
    "--no-metadata",
    "--list-presets",
}


def modules_after(*args: str) -> set[str]:
    code = (
        "import sys, json; from opensora_cli.cli.app import main; code = main(sys.argv[1:]);"
        "print('\\n' + json.dumps(sorted(sys.modules))); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("args", [["--help"], ["generate", "--help"], ["--version"]], ids=" ".join)
def test_help_and_version_import_nothing_heavy(args: list[str]) -> None:
    modules = modules_after(*args)
    assert "opensora_cli.cli.generate" in modules
    assert HEAVY & modules == set()


def test_presets_are_listed_without_torch() -> None:
    assert HEAVY & modules_after("generate", "--list-presets") == set()


def test_generate_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--help"]) == 0
    named = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    assert OPTIONS - named == set()


@pytest.mark.parametrize("args", [["-h"], []], ids=" ".join)
def test_help_lists_the_commands(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(args) == 0
    out = capsys.readouterr().out
    assert "generate" in out
    assert "--install-completion" in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"osora {opensora_cli.__version__}\n"


def test_python_dash_m() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "opensora_cli", "generate", "--nonsense"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "--nonsense" in done.stderr


def test_completion_offers_options_and_modes() -> None:
    def complete(words: str, position: int) -> list[str]:
        environment = {
            **os.environ,
            "_OSORA_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(position),
        }
        command = [sys.executable, "-m", "opensora_cli"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        return done.stdout.split()

    assert complete("osora generate --mo", 2) == ["--motion-score", "--model"]
    assert complete("osora generate --cond i2v", 3) == ["i2v_head", "i2v_tail", "i2v_loop"]


def test_completion_offers_recipes_and_files_of_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("demo_mine.yaml", "demo.mp4", ".demo.yaml", "more/demo.yaml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert complete_recipe("demo") == ["demo", "demo_lora", "demo_text", "demo_vae", "demo_mine.yaml"]
    assert complete_recipe("more/") == ["more/demo.yaml"]
    assert complete_recipe("m") == ["more/"]
    assert complete_recipe("no") == []


def test_list_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list_presets("train")
    assert main(["train", "--list", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "osora.recipes/1"
    for recipe, line in zip(document["recipes"], lines, strict=True):
        assert recipe["description"].endswith(".")
        assert "#" not in recipe["description"]
        assert line.endswith(recipe["description"])
        assert Path(recipe["file"]).stem == recipe["name"]


def test_list_presets(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--list-presets"]) == 0
    captured = capsys.readouterr()
    assert [line.split()[0] for line in captured.out.splitlines()] == ["256px", "768px", "demo"]
    assert captured.err == ""


def test_list_presets_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--list-presets", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "osora.presets/1"
    assert [preset["name"] for preset in document["presets"]] == ["256px", "768px", "demo"]
    for preset in document["presets"]:
        assert GenerateSettings(prompt="x", **preset["settings"]).video.resolution in ("64px", "256px", "768px")
