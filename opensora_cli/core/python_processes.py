"""Commands and environments of new Python processes, which import nothing from the working folder.

`python -m`, `python -c` and `python -` put the working folder first in `sys.path`, where a file `queue.py` replaces
Python's own module. All Python processes of the package are started through this module.

Run as a program, this file runs a module of its copy of the package: `python -P python_processes.py MODULE ARGUMENTS`.
"""

import importlib.util
import os
import runpy
import sys
from collections.abc import Mapping

SAFE_PATH_VARIABLE = "PYTHONSAFEPATH"


def python_command(*arguments: str) -> list[str]:
    """Return a command that runs Python with `arguments`. Run it in a `safe_environment`."""
    return [sys.executable, "-P", *arguments]


def module_command(name: str) -> list[str]:
    """Return a command that runs a module of this package as a program. Run it in a `safe_environment`.

    The new process imports the same copy of the package, even if that lies in the working folder.
    """
    return python_command(os.path.abspath(__file__), name)


def safe_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` for a process whose child Python processes import nothing from the working folder either.

    Libraries start such processes: the compile workers of torch, and workers of `multiprocessing`.
    """
    return {**environment, SAFE_PATH_VARIABLE: "1"}


def _run_module() -> None:
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    folder, name = os.path.split(package)
    # The folder comes last: it may be the working folder, which must not hide Python's own modules.
    sys.path.append(folder)
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None or not os.path.samefile(os.path.dirname(found.origin), package):
        # Another copy is installed. The parent process had this copy's folder before it, too.
        sys.path.insert(0, folder)
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _run_module()
