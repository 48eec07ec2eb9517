"""Python processes that the package starts import nothing from the working folder."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import opensora_cli
from opensora_cli.core import run_module
from opensora_cli.core.python_processes import module_command, python_command, safe_environment

PACKAGE = Path(opensora_cli.__file__).parent
# The second reports what Python this is, and starts nothing.
MAY_NAME_PYTHON = {"core/python_processes.py", "engine/env_check/facts.py"}
SHOW = "import sys, copied; print(copied.__file__, sys.argv, sys.path[0], sys.path[-1], sep='|')"


def sources():
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_text())


def names_used(tree):
    return {node.attr if isinstance(node, ast.Attribute) else node.id
            for node in ast.walk(tree) if isinstance(node, ast.Attribute | ast.Name)}  # fmt: skip


def names_python(tree):
    """Whether a module uses `sys.executable`, or takes it from `sys`."""
    return any(
        (isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.executable")
        or (isinstance(node, ast.ImportFrom) and node.module == "sys")
        for node in ast.walk(tree)
    )  # fmt: skip


def test_all_python_processes_are_started_by_one_helper():
    assert {name for name, tree in sources() if names_python(tree)} == MAY_NAME_PYTHON


def test_each_that_is_started_also_has_a_safe_environment():
    starting = {
        name: names for name, tree in sources() if (names := names_used(tree)) & {"python_command", "module_command"}
    }
    starting.pop("core/python_processes.py")
    assert len(starting) >= 4
    assert [name for name, names in starting.items() if "safe_environment" not in names] == []


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


def test_workers_of_multiprocessing_import_nothing_from_it(planted):
    """In the console script, as it is installed: `python -P` like it has no folder of its own in `sys.path`."""
    start = (
        "import multiprocessing, sys, opensora_cli.cli.app as app\n"
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
    assert run_unsafely(start) == "0\n0\n"
    assert not (planted / "ran").exists()


def run_unsafely(code):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    done = subprocess.run([sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def copy_of_package(folder):
    (folder / "copied" / "core").mkdir(parents=True)
    for name in ("__init__.py", "core/__init__.py"):
        (folder / "copied" / name).touch()
    shutil.copy(run_module.__file__, folder / "copied" / "core")
    (folder / "copied" / "tool.py").write_text(SHOW)
    return [sys.executable, "-P", str(folder / "copied" / "core" / "run_module.py"), "copied.tool"]


def test_a_copy_that_only_the_working_folder_has_can_be_run(tmp_path, monkeypatch):
    command = copy_of_package(tmp_path)
    monkeypatch.chdir(tmp_path)
    file, arguments, first, last = run([*command, "-a", "b"]).strip().split("|")
    assert file == str(tmp_path / "copied" / "__init__.py")
    assert arguments == str([str(tmp_path / "copied" / "tool.py"), "-a", "b"])
    assert first != str(tmp_path)
    assert last == str(tmp_path)


def test_the_copy_of_the_process_that_starts_it_is_run_where_another_is_installed(tmp_path):
    copy_of_package(tmp_path / "installed")
    (tmp_path / "installed" / "copied" / "tool.py").write_text("raise SystemExit('the installed copy')")
    command = copy_of_package(tmp_path / "checkout")
    file, *_ = run(command, PYTHONPATH=str(tmp_path / "installed")).split("|")
    assert file == str(tmp_path / "checkout" / "copied" / "__init__.py")
