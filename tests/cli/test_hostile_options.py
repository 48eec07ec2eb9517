"""Whatever is given for an option or an argument: no traceback, an exit code that says whose fault it is, one line.

In this process, with what is refused before a model is loaded.
"""

import ctypes
import importlib
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import typer
from hostile.values import WORDS
from PIL import Image
from safetensors.torch import save_file

import opensora_cli.engine
from opensora_cli.cli.app import app, main

PATHS = (
    *(
        "\ud800",
        "a\0b",
        "9" * 400,
        "loop",
        "loop/x",
        "pipe",
        "file/x",
        "folder",
        "file",
        "empty",
        "latin.txt",
        "a.mp4/b",
    ),
    *("deep.json", "list.json", "deep.yaml", "laughs.yaml", "zero.yaml", "pipe.yaml", "pipe.csv", "loop.csv"),
    *("/dev/zero", "/dev/null", "/dev/stdin", "/proc/self/mem"),
)
"""Names of what is there, and is not what any option reads; see `folder`."""

COMMANDS: dict[str, list[str]] = {
    "ckpt convert": ["w.safetensors", "made/out.safetensors", "--dry-run"],
    "ckpt inspect": ["w.safetensors"],
    "ckpt verify": ["w.safetensors"],
    "ckpt diff": ["w.safetensors", "w.pt"],
    "ckpt merge-lora": ["w.safetensors", "folder", "made/out.pt"],
    "data shard": ["clips.csv", "--parts", "1", "--overwrite"],
    "data preview": ["clips.csv", "-o", "made/sheet.png", "--overwrite"],
    "env-check": ["file", "--no-all-reduce"],
}
"""A whole command line of each command that ends at once, whatever is changed in it."""

REFUSED: dict[str, list[str]] = {
    "generate": ["sea", "--model", "demo", "--set", "nope.key=1"],
    "train": ["--config", "demo", "--set", "nope.key=1"],
    "mem-profile": ["--config", "demo", "--set", "nope.key=1"],
    "bench-generate": ["sea", "--model", "demo", "--set", "nope.key=1"],
    "bench-comm": ["--gpus", "1"],
    "data cache": ["--config", "demo", "--set", "nope.key=1"],
    "vae reconstruct": ["gone.png", "--set", "nope.key=1"],
    "vae stats": ["gone.png", "--set", "nope.key=1"],
}
"""Likewise, of commands that take long where nothing is wrong: something always is, besides what is changed."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    laughs = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    laughs += [f"{above}: &{above} [{', '.join([f'*{below}'] * 9)}]" for below, above in pairwise("abcdefghi")]
    for name, content in {
        "file": b"x",
        "empty": b"",
        "latin.txt": b"\xff\xfe\xe9",
        "deep.json": b"[" * 100_000,
        "deep.yaml": b"a: " + b"[" * 5000,
        "list.json": b"[1]",
        "laughs.yaml": "\n".join(laughs).encode(),
    }.items():
        Path(name).write_bytes(content)
    for name in ("pipe", "pipe.yaml", "pipe.csv"):
        os.mkfifo(name)
    for name in ("loop", "loop.csv"):
        Path(name).symlink_to(name)
    Path("zero.yaml").symlink_to("/dev/zero")
    Image.new("RGB", (64, 64)).save("a.png")
    save_file({"a": torch.zeros(4)}, "w.safetensors")
    Path("w.safetensors").chmod(0o644)
    torch.save({"a": torch.zeros(4)}, "w.pt")
    Path("clips.csv").write_text(
        "path,text,num_frames,height,width,aspect_ratio,resolution,fps\na.png,hi,1,64,64,1.0,4096,\n"
    )
    return tmp_path


def changed(name: str, base: list[str], values: Sequence[str]) -> list[list[str]]:
    """Return the command line with each value for each option and argument in turn."""
    command = typer.main.get_command(app)
    for part in name.split():
        command = command.commands[part]  # type: ignore[attr-defined]
    num_arguments = sum(type(each).__name__ == "TyperArgument" for each in command.params)
    lines = []
    for value in values:
        options = [each for each in command.params if each.param_type_name == "option" and not each.is_flag]  # type: ignore[attr-defined]
        lines += [[*base, f"{each.opts[0]}={value}"] for each in options]
        for place in range(num_arguments):
            arguments = [value if at == place else given for at, given in enumerate(base[:num_arguments])]
            lines.append([*base[num_arguments:], "--", *arguments])
    return [[*name.split(), *line] for line in lines]


@pytest.mark.slow  # the fast tier has some of them, at random, in `tests/hostile`
@pytest.mark.skipif(sys.platform == "win32", reason="pipes and devices as files")
@pytest.mark.parametrize("name", [*COMMANDS, *REFUSED])
def test_every_option_refuses_what_it_cannot_take(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    codes = (0, 2, 3, 4, 5) if name in COMMANDS else (2, 3, 4)
    for line in changed(name, {**COMMANDS, **REFUSED}[name], (*WORDS, *PATHS)):
        code = main(line)
        err = capsys.readouterr().err
        shown = [each[:60] for each in line]
        assert code in codes, (shown, code, err[:500])
        assert code == 0 or any(each.startswith("error: ") for each in err.splitlines()), (shown, err[:500])
        assert all(len(each) < 2100 for each in err.splitlines()), shown


@pytest.mark.parametrize(
    "line",
    [
        ["generate", "caf\udce9"],
        ["generate", "sea", "--negative-prompt", "caf\udce9"],
        ["generate", "sea", "--device", "caf\udce9"],
        ["generate", "sea", "--set", "runtime.device=caf\udce9"],
        ["train", "--config", "demo", "--device", "caf\udce9"],
        ["ckpt", "verify", "w.safetensors", "--sha256", "caf\udce9"],
    ],
)
def test_words_that_are_not_unicode_are_refused_by_name(
    line: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line) == 2
    err = capsys.readouterr().err
    assert r"=caf\udce9 must be valid Unicode text (from " in err
    assert len(err.splitlines()) == 1


@pytest.fixture(scope="module")
def _everything_is_imported() -> None:
    """Once, and not in each of the forked processes."""
    for module in pkgutil.walk_packages(opensora_cli.engine.__path__, "opensora_cli.engine."):
        importlib.import_module(module.name)


def without_rights(run: Callable[[], int]) -> tuple[int, str]:
    """Return what `run` returns, and what it prints to stderr, in a process that may enter no closed folder.

    Root may, by its capabilities, and gives them up for this.
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 99
        try:
            os.dup2(write, 2)
            sys.stderr = os.fdopen(2, "w", closefd=False)
            # With several, OpenMP would wait for those of earlier tests, which a fork leaves behind.
            os.environ["OMP_NUM_THREADS"] = "1"
            torch.set_num_threads(1)
            version_3, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
            if ctypes.CDLL(None, use_errno=True).capset(version_3, none):
                raise OSError(ctypes.get_errno(), "capset")
            code = run()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    os.close(write)
    with os.fdopen(read) as stream:
        err = stream.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), err


CLOSED = (
    ["generate", "sea", "--ref", "closed/a.png"],
    ["generate", "sea", "--config", "closed/a.yaml"],
    ["generate", "sea", "--config", "closed/a"],
    ["generate", "--from", "closed/a.json"],
    ["generate", "--from-latents", "closed/a.safetensors"],
    ["generate", "--resume", "closed/a.safetensors"],
    ["generate", "sea", "--model", "demo", "--lora", "closed/a"],
    ["generate", "sea", "--model", "demo", "--out", "closed/a.mp4"],
    ["generate", "sea", "--model", "demo", "--out", "closed/a", "--dry-run"],
    ["generate", "sea", "--model", "open-sora-v2", "--weights", "closed/a"],
    ["show", "closed/a.mp4"],
    ["show", "closed"],
    ["generate", "--from", "closed/a.mp4"],
    ["train", "--config", "closed/a.yaml"],
    ["train", "--config", "demo_lora", "--set", "data.table=closed/a.csv"],
    ["train", "--config", "demo", "--set", "output=closed/a", "--dry-run"],
    ["train", "--config", "demo_vae", "--set", "init=closed/a.pt", "--set", "output=open/a", "--dry-run"],
    ["train", "--config", "demo", "--set", "output=open/a", "--resume-from", "closed/a", "--dry-run"],
    ["train", "--config", "demo", "--set", "output=closed/a"],
    ["train", "--from", "closed/settings.json"],
    ["train", "--new", "closed/clips"],
    ["env-check", "closed/a.sh"],
    ["mem-profile", "--config", "closed/a.yaml"],
    ["mem-profile", "--config", "demo", "--snapshot", "closed/a.pickle"],
    ["ckpt", "convert", "closed/a.pt", "open/a.safetensors"],
    ["ckpt", "convert", "w.safetensors", "closed/a.pt"],
    ["ckpt", "inspect", "closed/a.pt"],
    ["ckpt", "inspect", "closed"],
    ["ckpt", "verify", "closed/a.pt"],
    ["ckpt", "diff", "w.safetensors", "closed/a.pt"],
    ["ckpt", "merge-lora", "w.safetensors", "closed/a", "open/a.pt"],
    ["data", "scan", "closed"],
    ["data", "scan", "closed/a"],
    ["data", "scan", "open", "-o", "closed/a.csv"],
    ["data", "shard", "closed/a.csv", "--parts", "2"],
    ["data", "preview", "closed/a.csv", "-o", "open/a.png"],
    ["data", "preview", "clips.csv", "-o", "closed/a.png"],
    ["data", "cache", "--config", "demo_lora", "--table", "closed/a.csv"],
    ["vae", "reconstruct", "a.png", "-o", "closed/a"],
    ["vae", "reconstruct", "a.png", "--weights", "closed/a"],
    ["vae", "stats", "closed"],
)


@pytest.fixture
def closed(folder: Path) -> Iterator[Path]:
    """A closed folder, and an open one beside it that has such a folder, too."""
    Path("open/closed").mkdir(parents=True)
    Path("open/a.png").write_bytes(Path("a.png").read_bytes())
    Path("closed/clips").mkdir(parents=True)
    for name in ("closed", "open/closed"):
        Path(name).chmod(0)
    yield folder / "closed"
    for name in ("closed", "open/closed"):
        Path(name).chmod(0o700)


@pytest.mark.skipif(sys.platform != "linux", reason="capabilities are Linux's")
@pytest.mark.usefixtures("_everything_is_imported", "closed")
@pytest.mark.parametrize("line", CLOSED, ids=" ".join)
def test_a_folder_that_may_not_be_entered_is_named(line: list[str]) -> None:
    code, err = without_rights(lambda: main(line))
    assert code == 3, err
    assert "Traceback" not in err
    errors = [each for each in err.splitlines() if each.startswith("error: ")]
    assert len(errors) == 1, err
    assert "closed" in errors[0]


@pytest.mark.skipif(sys.platform != "linux", reason="capabilities are Linux's")
@pytest.mark.usefixtures("_everything_is_imported", "closed")
def test_a_scan_reports_the_folders_that_it_may_not_enter() -> None:
    code, err = without_rights(lambda: main(["data", "scan", "open", "-o", "open/table.csv", "--json"]))
    assert code == 5
    assert "error: 1 folder cannot be read: open/table.csv has the others" in err
    assert Path("open/table.csv").read_text().count("\n") == 2
