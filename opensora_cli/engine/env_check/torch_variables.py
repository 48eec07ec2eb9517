"""Variables whose values torch refuses while it is imported. Apart: what imports torch cannot ask first."""

import os
import subprocess
from collections.abc import Mapping
from functools import cache

from opensora_cli.core.python_processes import python_command, safe_environment

_DEBUG, _LOGS = "TORCH_DISTRIBUTED_DEBUG", "TORCH_LOGS"


def refused_by_torch(environment: Mapping[str, str]) -> list[str]:
    """Return the variables whose values torch refuses while it is imported."""
    refused = [_DEBUG] if environment.get(_DEBUG, "OFF").upper() not in ("OFF", "INFO", "DETAIL") else []
    return [*refused, _LOGS] if environment.get(_LOGS) and not _is_imported_with(environment[_LOGS]) else refused


@cache
def _is_imported_with(loggers: str) -> bool:
    """Whether another process can import torch with this `TORCH_LOGS`: torch alone knows the names of its loggers.

    Also where no process can be started: the import will show it.
    """
    environment = safe_environment({**os.environ, _LOGS: loggers, _DEBUG: "OFF"})
    command = python_command("-c", "import torch")
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace", check=False)
    except (OSError, ValueError):
        return True
    return done.returncode == 0 or _LOGS not in done.stderr
