"""Every command in README.md, CONTRIBUTING.md, docs/ and help texts: planned here, run in order in the slow tier."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from docs.pages import NEEDS, PAGES, ROOT, Block, blocks_of

from opensora_cli.cli.app import app, main

PAGES_BY_NAME = {str(page.relative_to(ROOT)): page for page in PAGES}
BLOCKS = [block for page in PAGES for block in blocks_of(page)]

# Commands with a plan that loads no weights; the options of all others are parsed.
PLANNED = {"generate", "train"}
# These options print something and end.
PRINTING = {"--version", "--help", "-h", "--list-presets", "--check-data"}


def _help_examples(command: Any) -> Iterator[Block]:
    """Yield the examples in the help texts of a command and the commands below it."""
    lines = [line.strip() for line in (command.help or "").splitlines()]
    yield Block(
        "--help", ("your files", "GPUs"), "\n".join(line for line in lines if line.startswith(("osora", "eval")))
    )
    for below in getattr(command, "commands", {}).values():
        yield from _help_examples(below)


def _commands() -> dict[tuple[str, ...], Block]:
    """Return each command once, with the first block that shows it."""
    found: dict[tuple[str, ...], Block] = {}
    for block in [*BLOCKS, *_help_examples(typer.main.get_command(app))]:
        for command in block.osora_commands():
            found.setdefault(command, block)
    return found


COMMANDS = _commands()


def _sandbox(folder: Path) -> Path:
    """Give `folder` the parts of a checkout that commands name."""
    for name in ("configs", "opensora_cli", "benchmarks", "examples"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def test_ci_runs_the_two_commands_of_the_readme() -> None:
    listed = subprocess.run([ROOT / ".ci" / "run", "--list"], check=True, capture_output=True, text=True).stdout
    assert listed.splitlines() == [
        'pip install -c constraints.txt . && osora generate "raining, sea"',
        "pip install -c constraints.txt -e '.[dev]' && pytest -n 2",
    ]


def test_every_installation_pins_the_tested_versions() -> None:
    lines = [line for block in BLOCKS for line in block.text.splitlines() if "pip install" in line]
    assert len(lines) >= 2
    assert [line for line in lines if "-c constraints.txt" not in line] == []


def test_every_need_is_a_known_one() -> None:
    assert {need for block in BLOCKS for need in block.needs} <= NEEDS.keys()


def test_every_benchmark_and_example_that_a_page_names_exists() -> None:
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    named = {name for text in texts for name in re.findall(r"\b(?:benchmarks|examples)/\w+\.py", text)}
    assert named
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_every_file_that_a_page_outside_the_site_links_to_exists(name: str) -> None:
    text = PAGES_BY_NAME[name].read_text(encoding="utf-8")
    targets = re.findall(r"\]\((?!https?://|#)([^)#]+)", text) + re.findall(r'src="([^"]+)"', text)
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []


@pytest.mark.parametrize("command", COMMANDS, ids=shlex.join)
def test_a_command_is_understood_and_planned(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(_sandbox(tmp_path))
    monkeypatch.delenv("OSORA_WEIGHTS", raising=False)
    block = COMMANDS[command]
    arguments = list(command)
    if not PRINTING & set(command):
        arguments.append("--dry-run" if command[0] in PLANNED else "--help")
    code = main(arguments)
    assert code in block.exit_codes, capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name in PAGES_BY_NAME if any(b.page == name and b.runs_here for b in BLOCKS)]
)
def test_the_commands_of_a_page_run_in_their_order(name: str, tmp_path: Path) -> None:
    folder = _sandbox(tmp_path)
    programs = folder / "bin"
    programs.mkdir()
    for program, module in (("osora", "opensora_cli"), ("torchrun", "torch.distributed.run")):
        (programs / program).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m {module} "$@"\n')
        (programs / program).chmod(0o755)
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    environment.pop("OSORA_WEIGHTS", None)
    # One shell, as a reader has one: what a block exports holds in the next.
    script = "\n".join(block.text for block in blocks_of(PAGES_BY_NAME[name]) if block.runs_here)
    done = subprocess.run(
        ["bash", "-euxo", "pipefail", "-c", script],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
