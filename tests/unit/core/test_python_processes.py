"""Python processes that the package starts import nothing from the working folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import opensora_cli
from opensora_cli.core.python_processes import module_command, python_command, safe_environment

PACKAGE = Path(opensora_cli.__file__).parent
# The second reports what Python this is, and starts nothing.
MAY_NAME_PYTHON = {"core/python_processes.py", "engine/env_check/machine.py"}


def files_with(*texts):
    """Return the files of the package that have one of these texts."""
    files = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in PACKAGE.rglob("*.py")}
    return {name for name, content in files.items() if any(text in content for text in texts)}


def test_all_python_processes_are_started_by_one_helper():
    assert files_with("sys.executable") == MAY_NAME_PYTHON


def test_each_that_is_started_also_has_a_safe_environment():
    starting = files_with("python_command(", "module_command(")
    assert len(starting) >= 4
    assert starting <= files_with("safe_environment(")


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """The working folder, with modules in it that take the place of Python's own and leave a file when they run."""
    for name in ("queue", "pickle", "signal", "psutil", "sitecustomize"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r})")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(command, **variables):
    done = subprocess.run(command, env=safe_environment({**os.environ, **variables}), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "command",
    [
        python_command("-c", "import queue, pickle, signal, psutil"),
        module_command("opensora_cli.core.signals"),
        # A process of a process, as a library starts it.
        python_command("-c", "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import queue, pickle'])"),
    ],
    ids=["code", "module", "grandchild"],
)
def test_nothing_in_the_working_folder_runs(command, planted):
    run(command)
    assert not (planted / "ran").exists()


@pytest.mark.slow
def test_workers_of_multiprocessing_import_nothing_from_it(planted, tmp_path_factory):
    """They inherit no `-P` from the installed script, which needs none: its own folder is first in `sys.path`."""
    script = tmp_path_factory.mktemp("bin") / "osora.py"
    script.write_text(
        "import multiprocessing, sys\n"
        "import opensora_cli.cli.app as app\n"
        "from opensora_cli.__main__ import main\n"
        "def work():\n"
        "    for way in ('spawn', 'forkserver'):\n"
        "        with multiprocessing.get_context(way).Pool(1) as pool:\n"
        '            print(pool.apply(eval, (\'__import__("sys").path.count("")\',)))\n'
        "    return 0\n"
        "app.main = work\n"
        "if __name__ == '__main__':\n"
        "    sys.exit(main())\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "0\n0\n"), done.stderr
    assert not (planted / "ran").exists()
