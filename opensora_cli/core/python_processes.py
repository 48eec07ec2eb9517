"""Commands and environments of new Python processes, which import nothing from the working folder.

`python -m`, `python -c` and `python -` put the working folder first in `sys.path`, where a file `queue.py` replaces
Python's own module. All Python processes of the package are started through this module.
"""

import sys
from collections.abc import Mapping
from pathlib import Path

from opensora_cli.core import run_module

SAFE_PATH_VARIABLE = "PYTHONSAFEPATH"


def python_command(*arguments: str) -> list[str]:
    """Return a command that runs Python with `arguments`. Run it in a `safe_environment`."""
    return [sys.executable, "-P", *arguments]


def module_command(name: str) -> list[str]:
    """Return a command that runs a module of this package as a program. Run it in a `safe_environment`.

    The new process imports the same copy of the package, even if that lies in the working folder.
    """
    return python_command(str(Path(run_module.__file__)), name)


def safe_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` for a process whose child Python processes import nothing from the working folder either.

    Libraries start such processes: the compile workers of torch, and workers of `multiprocessing`.
    """
    return {**environment, SAFE_PATH_VARIABLE: "1"}
