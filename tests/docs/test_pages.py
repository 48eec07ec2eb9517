"""Every command in README.md, CONTRIBUTING.md, docs/ and help texts: planned here, run in order in the slow tier."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from docs.pages import NEEDS, PAGES, ROOT, Block, blocks_of
from small_stages import small_stages

from opensora_cli.cli.app import load_commands, main
from opensora_cli.cli.errors import reference_option
from opensora_cli.core.documents import Document
from opensora_cli.engine.generate import dry_run
from opensora_cli.engine.train import plan as train_plan
from opensora_cli.engine.train.plan import RankMemory

PAGES_BY_NAME = {str(page.relative_to(ROOT)): page for page in PAGES}
BLOCKS = [block for page in PAGES for block in blocks_of(page)]

OSORA = load_commands()

# Commands with a plan that loads no weights; the options of all others are parsed.
PLANNED = {"generate", "train"}
# These options print something and end.
NO_MEMORY = RankMemory(at_peak={}, peak_bytes=0, device_peak_bytes=0, mapped_bytes=0)
PRINTING = {"--list", "--version", "--help", "-h", "--check-data", "--new"}


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
    for block in [*BLOCKS, *_help_examples(OSORA)]:
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
    named = {name for text in texts for name in re.findall(r"\b(?:benchmarks|examples)/[\w/]+\.py", text)}
    assert named
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_every_file_that_a_page_outside_the_site_links_to_exists(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    targets = re.findall(r"\]\((?!https?://|#)([^)#]+)", text) + re.findall(r'src="([^"]+)"', text)
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []


@pytest.mark.parametrize("command", COMMANDS, ids=shlex.join)
def test_a_command_is_understood_and_planned(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Estimates and predictions take most of the time and have tests of their own.
    monkeypatch.setattr("opensora_cli.engine.generate.plan.estimate_generation", small_stages)
    monkeypatch.setattr(train_plan, "estimate_rank", lambda settings, *, reporter: NO_MEMORY)
    monkeypatch.setattr(train_plan, "plan_activations", lambda settings: None)
    monkeypatch.setattr(train_plan, "count_parameters", lambda settings: 1)
    monkeypatch.setattr(train_plan, "predict_step", lambda settings, gpu: None)
    monkeypatch.setattr(dry_run, "predict_known_time", lambda chain, on: None)
    monkeypatch.chdir(_sandbox(tmp_path))
    monkeypatch.delenv("OSORA_WEIGHTS", raising=False)
    prints = bool(PRINTING & set(command)) or command[:2] == ("train", "--plot")
    if prints or command[0] in PLANNED:
        planned = main([*command, *([] if prints else ["--dry-run"])])
        assert planned in COMMANDS[command].exit_codes, capsys.readouterr().err
    else:
        _parse(OSORA, command)


def _parse(command: Any, arguments: Sequence[str]) -> None:
    """Convert all options of a command without running it; raises what the command line reports as a bad request."""
    for number, name in enumerate(arguments):
        if not hasattr(command, "commands"):
            command.make_context(name, list(arguments[number:]))
            return
        command = command.commands[name]
    assert not hasattr(command, "commands"), f"{arguments} names no command"
    command.make_context("osora", [])


def test_the_table_for_those_who_come_from_the_reference_names_options_that_there_are() -> None:
    page = PAGES_BY_NAME["docs/how_to/migrate_from_open_sora.md"].read_text(encoding="utf-8")
    sections = dict(part.split("\n", 1) for part in page.split("\n## ")[1:])
    assert "| `torchrun --nproc_per_node 8 scripts/diffusion/inference.py FILE --prompt P` |" in sections["Generating"]
    commands = {
        "Generating": OSORA.commands["generate"],
        "Autoencoders": OSORA.commands["vae"].commands["reconstruct"],
        "Training": OSORA.commands["train"],
    }
    for section, command in commands.items():
        rows = [line.split("|")[2] for line in sections[section].splitlines() if line.startswith("| ")][1:]
        named = {name for row in rows for name in re.findall(r"(?<=[ `])--[a-z][a-z-]+", row)}
        assert len(named) >= 3, section
        there = {option for parameter in command.params for option in parameter.opts}
        assert named <= there, section
        if section == "Generating":
            # Who types what is on the left is led to what is on the right.
            for line in sections[section].splitlines():
                theirs, ours = line.split("|")[1:3] if line.startswith("| `--") else ("", "")
                for name in re.findall(r"--([a-z_.-]+)", theirs):
                    known = f"--{name}" in there or reference_option(f"--{name}") in ours
                    assert known, name


def test_every_fence_of_a_page_is_read_as_a_block() -> None:
    for name, page in PAGES_BY_NAME.items():
        fences = re.findall(r"^[ \t]*(?:```|~~~).*$", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert len(fences) % 2 == 0, name
        assert {fence for fence in fences[::2]} <= {"```bash", "```text", "```yaml", "```python"}, name
        assert set(fences[1::2]) <= {"```"}, name


def test_the_generated_reference_is_fresh_and_complete() -> None:
    spec = importlib.util.spec_from_file_location("generate_reference", ROOT / "docs" / "generate_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    pages = module.pages()
    folder = ROOT / "docs" / "reference"
    stale = [name for name, text in pages.items() if (folder / name).read_text(encoding="utf-8") != text]
    assert stale == [], "run: python docs/generate_reference.py"
    assert {f"json/{path.name}" for path in (folder / "json").glob("*.md")} <= pages.keys()
    text = "\n".join(pages.values())
    # Other tests make documents of their own.
    ours = [document for document in Document.__subclasses__() if document.__module__.startswith("opensora_cli.")]
    documents = [document.SCHEMA for document in ours if document.SCHEMA is not None]
    assert len(documents) >= 10
    assert [name for name in (*documents, "osora ckpt convert", "osora train") if name not in text] == []


@pytest.mark.slow
@pytest.mark.timeout(3600)  # lora.md trains for minutes, on two idle cores
@pytest.mark.parametrize(
    "name", [name for name in PAGES_BY_NAME if any(b.page == name and b.runs_here for b in BLOCKS)]
)
def test_the_commands_of_a_page_run_in_their_order(name: str, tmp_path: Path) -> None:
    folder = _sandbox(tmp_path)
    programs = folder / "bin"
    programs.mkdir()
    for program, start in (("osora", "-m opensora_cli"), ("torchrun", "-m torch.distributed.run"), ("python", "")):
        (programs / program).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {start} "$@"\n')
        (programs / program).chmod(0o755)
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    environment.pop("OSORA_WEIGHTS", None)
    # One shell, as a reader has one: what a block exports holds in the next.
    script = "\n".join(block.script for block in blocks_of(PAGES_BY_NAME[name]) if block.runs_here)
    done = subprocess.run(
        ["bash", "-euxo", "pipefail", "-c", script],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
