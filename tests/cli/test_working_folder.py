"""Commands that start processes run no code that lies in the working folder."""

import os
import subprocess
import sys

import pytest

# As in the script that is installed. Not with `-P`, which processes would inherit.
SCRIPT = "import sys\nfrom opensora_cli.__main__ import main\nsys.exit(main())\n"
CPU = ["--device", "cpu"]
SMALL = ["--steps", "1", "--num-frames", "1", "--height", "64", "--width", "64"]
RANKS = ["--gpus", "2", *CPU]


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """Return a file that modules of the working folder write to when they are imported."""
    ran = tmp_path / "ran"
    folder = tmp_path / "working"
    folder.mkdir()
    for name in ("queue", "psutil", "torch", "signal", "pickle", "json", "sitecustomize", "numpy"):
        (folder / f"{name}.py").write_text(f"open({str(ran)!r}, 'a').write('{name} ')\nraise ImportError('planted')\n")
    monkeypatch.chdir(folder)
    return ran


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        (["generate", "sea", *RANKS, *SMALL, "--out", "sea.png"], {}),
        (["env-check"], {}),
    ],
    ids=["generate", "env-check"],
)
def test_no_code_of_the_working_folder_runs(arguments, environment, planted, tmp_path_factory):
    script = tmp_path_factory.mktemp("bin") / "osora"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), *arguments]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=300)
    assert not planted.exists(), planted.read_text()
    # env-check judges the machine, too.
    assert done.returncode in ((0, 4) if "env-check" in arguments else (0,)), done.stderr


@pytest.mark.parametrize("arguments", [["generate", "sea", "--dry-run"], ["env-check"]])
def test_a_deleted_working_folder_is_named(tmp_path, arguments):
    gone = tmp_path / "gone"
    gone.mkdir()
    code = f"import os; os.chdir({str(gone)!r}); os.rmdir({str(gone)!r})\n{SCRIPT}"
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 3
    assert done.stderr.splitlines()[0] == "error: the working folder no longer exists"
