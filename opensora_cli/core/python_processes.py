"""Commands and environments of the Python processes that this one starts: they import nothing from the working folder.

`python -m`, `python -c` and `python -` put the working folder first in `sys.path`, where a `queue.py` takes the place
of Python's own. All Python processes of the package are started by what is here.
"""

import sys
from collections.abc import Mapping
from pathlib import Path

from opensora_cli.core import run_module

SAFE_PATH_VARIABLE = "PYTHONSAFEPATH"


def python_command(*arguments: str) -> list[str]:
    """Return a command that runs Python with `arguments`. Its environment is to be a `safe_environment`."""
    return [sys.executable, "-P", *arguments]


def module_command(name: str) -> list[str]:
    """Return a command that runs a module of this package as a program. Its environment is to be a `safe_environment`.

    The new process has this process's copy of the package, also where that was found in the working folder alone.
    """
    return python_command(str(Path(run_module.__file__)), name)


def safe_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` for a process whose own Python processes import nothing from the working folder either.

    Libraries start some: the compile workers of torch, and those of `multiprocessing`.
    """
    return {**environment, SAFE_PATH_VARIABLE: "1"}
