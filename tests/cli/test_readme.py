"""The README tells the truth: CI runs its two commands, and every other one that it shows can be carried out."""

import itertools
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from opensora_cli.cli.app import main
from opensora_cli.core.files import write_json_atomic
from opensora_cli.media.write import KNOWN_ENDINGS, write_media
from opensora_cli.settings.load import SIDECAR_SCHEMA, load_preset

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")

FENCED_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHELL_BLOCKS = [(language, text) for language, text in FENCED_BLOCK.findall(README) if language in ("bash", "console")]

ONLY_TELLS = {"--version", "--help", "-h", "--list-presets", "--check-data"}


def osora_commands() -> list[list[str]]:
    """Return the arguments of every `osora` command in a shell block; in a console block, of lines after `$`."""
    commands = []
    for language, text in SHELL_BLOCKS:
        for line in re.sub(r"\\\n\s*", " ", text).splitlines():
            if language == "console" and not line.startswith("$ "):
                continue  # what the command prints
            for part in line.removeprefix("$ ").split("&&"):
                words = shlex.split(part, comments=True)
                if "osora" in words:
                    commands.append(words[words.index("osora") + 1 :])
    return commands


def make_files(arguments: list[str], folder: Path) -> None:
    """Make the files that a command reads."""
    for option, value in itertools.pairwise(arguments):
        if option == "--ref":
            for name in value.split(";"):
                kind = KNOWN_ENDINGS[Path(name).suffix]
                frames = torch.zeros(1 if kind == "png" else 129, 64, 64, 3, dtype=torch.uint8)
                write_media([frames], folder / name, fps=12, format=kind)
        elif option == "--from":
            settings = load_preset("demo", prompt="raining, sea").model_dump(mode="json")
            write_json_atomic(folder / value, {"schema": SIDECAR_SCHEMA, "settings": settings})
        elif option == "--config" and (ROOT / value).is_file():  # else it is the name of a preset
            # With its neighbours, which it may extend.
            shutil.copytree((ROOT / value).parent, (folder / value).parent, dirs_exist_ok=True)


def test_ci_runs_the_two_commands() -> None:
    listed = subprocess.run([ROOT / ".ci" / "run", "--list"], check=True, capture_output=True, text=True).stdout
    assert listed.splitlines() == [
        'pip install -c constraints.txt . && osora generate "raining, sea"',
        "pip install -c constraints.txt -e '.[dev]' && pytest -n 2",
    ]


def test_whatever_it_installs_is_the_tested_set() -> None:
    lines = [
        line for _, text in SHELL_BLOCKS for line in text.splitlines() if re.search(r"pip install .*(\.|osora)", line)
    ]
    assert len(lines) >= 2
    assert [line for line in lines if "-c constraints.txt" not in line] == []


def test_the_commands_are_found() -> None:
    assert ["generate", "raining, sea"] in osora_commands()


@pytest.mark.parametrize("arguments", osora_commands(), ids=shlex.join)
def test_every_command_can_be_carried_out(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    make_files(arguments, tmp_path)
    if not ONLY_TELLS & set(arguments):
        # What can be planned is planned, with all its checks; of other commands the options must exist.
        arguments = [*arguments, "--dry-run" if arguments[0] in ("generate", "train") else "--help"]
    code = main(arguments)
    printed = capsys.readouterr()
    # 3 and 4: the files named, or the cards, or a machine for the released model, are not here. The command was
    # understood, though.
    needs_more = {"--weights", "--from-latents", "open-sora-v2", "--gpus", "--devices", "--lora"} & set(arguments)
    assert code in ({0, 3, 4} if needs_more or arguments[0] == "train" else {0}), printed.err


@pytest.mark.parametrize("target", re.findall(r"\]\((?!https?://|#)([^)#]+)", README))
def test_every_file_that_it_links_to_exists(target: str) -> None:
    assert (ROOT / target).exists()
