"""Folders that may not be entered and text that is not Unicode: one line and an exit code, in this process.

Random values of every option are in `tests/hostile`.
"""

import ctypes
import importlib
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import opensora_cli.engine
from opensora_cli.cli.app import main


@pytest.mark.parametrize(
    "line",
    [
        ["generate", "caf\udce9"],
        ["generate", "sea", "--device", "caf\udce9"],
        ["generate", "sea", "--set", "runtime.device=caf\udce9"],
        ["train", "--config", "demo_lora", "--device", "caf\udce9"],
        ["ckpt", "verify", "w.safetensors", "--sha256", "caf\udce9"],
    ],
)
def test_words_that_are_not_unicode_are_refused_by_name(line: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line) == 2
    err = capsys.readouterr().err
    assert r"=caf\udce9 must be valid Unicode text (from " in err
    assert len(err.splitlines()) == 1


@pytest.fixture(scope="module")
def _everything_is_imported() -> None:
    """Import the engine once, and not in each of the forked processes."""
    for module in pkgutil.walk_packages(opensora_cli.engine.__path__, "opensora_cli.engine."):
        importlib.import_module(module.name)


def without_rights(run: Callable[[], int]) -> tuple[int, str]:
    """Return the result of `run` and its stderr, in a process that may enter no closed folder.

    Root may, by its capabilities, and gives them up for this.
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 99
        try:
            os.dup2(write, 2)
            sys.stderr = os.fdopen(2, "w", closefd=False)
            # With several, OpenMP would wait for threads that a fork leaves behind.
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
    ["generate", "--from", "closed/a.json"],
    ["generate", "sea", "--model", "demo", "--lora", "closed/a"],
    ["show", "closed"],
    ["train", "--config", "demo_lora", "--set", "data.table=closed/a.csv"],
    ["train", "--config", "demo_lora", "--set", "output=closed/a"],
    ["env-check", "closed/a.sh"],
    ["ckpt", "convert", "w.safetensors", "closed/a.pt"],
    ["ckpt", "verify", "closed/a.pt"],
    ["data", "scan", "open", "-o", "closed/a.csv"],
    ["vae", "reconstruct", "a.png", "-o", "closed/a"],
)


@pytest.fixture
def _closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make a closed folder, an open one beside it that holds such a folder, and files."""
    monkeypatch.chdir(tmp_path)
    for name in ("open/closed", "closed/clips"):
        Path(name).mkdir(parents=True)
    for name in ("a.png", "open/a.png"):
        Image.new("RGB", (64, 64)).save(name)
    save_file({"a": torch.zeros(4)}, "w.safetensors")
    Path("w.safetensors").chmod(0o644)
    Path("clips.csv").write_text(
        "path,text,num_frames,height,width,aspect_ratio,resolution,fps\na.png,hi,1,64,64,1.0,4096,\n"
    )
    for name in ("closed", "open/closed"):
        Path(name).chmod(0)
    yield
    for name in ("closed", "open/closed"):
        Path(name).chmod(0o700)


@pytest.mark.skipif(sys.platform != "linux", reason="capabilities are Linux's")
@pytest.mark.usefixtures("_everything_is_imported", "_closed")
@pytest.mark.parametrize("line", CLOSED, ids=" ".join)
def test_a_folder_that_may_not_be_entered_is_named(line: list[str]) -> None:
    code, err = without_rights(lambda: main(line))
    assert code == 3, err
    assert "Traceback" not in err
    errors = [each for each in err.splitlines() if each.startswith("error: ")]
    assert len(errors) == 1, err
    assert "closed" in errors[0]


@pytest.mark.skipif(sys.platform != "linux", reason="capabilities are Linux's")
@pytest.mark.usefixtures("_everything_is_imported", "_closed")
def test_a_scan_reports_the_folders_that_it_may_not_enter() -> None:
    code, err = without_rights(lambda: main(["data", "scan", "open", "-o", "open/table.csv", "--json"]))
    assert code == 5
    assert "error: 1 folder cannot be read: open/table.csv has the others" in err
    assert Path("open/table.csv").read_text().count("\n") == 2
