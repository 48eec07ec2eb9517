"""Values of environment variables that torch refuses. torch itself judges most of them, in a process of its own.

Callers use this module before they import torch, which fails with such a value.
"""

import os
import subprocess
from collections.abc import Mapping
from functools import cache

from opensora_cli.core.python_processes import python_command, safe_environment

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_DEBUG, _LOGS = "TORCH_DISTRIBUTED_DEBUG", "TORCH_LOGS"


def refused_by_torch(environment: Mapping[str, str]) -> list[str]:
    """Return the variables whose values make the import of torch fail."""
    refused = [_DEBUG] if environment.get(_DEBUG, "OFF").upper() not in ("OFF", "INFO", "DETAIL") else []
    # Only torch knows the names of its loggers.
    if (loggers := environment.get(_LOGS)) and _LOGS in _errors("import torch", loggers=loggers):
        refused.append(_LOGS)
    return refused


def allocator_fault(text: str) -> str | None:
    """Return the reason for which torch refuses options of its allocator, or None.

    `text` is a value of `PYTORCH_ALLOC_CONF`, as in `expandable_segments:True,max_split_size_mb:128`.
    """
    code = "import sys, torch; torch._C._accelerator_setAllocatorSettings(sys.argv[1])"
    lines = [line for line in _errors(code, text).splitlines() if "Error: " in line] if text else []
    # A torch without this function parses the options at the first use of a GPU alone.
    if not lines or lines[-1].startswith("AttributeError"):
        return None
    reason = lines[-1].partition("Error: ")[2].strip()
    return f"{text!r} is not of the form name:value,name:value" if "INTERNAL ASSERT" in reason else reason


@cache
def _errors(code: str, *arguments: str, loggers: str = "") -> str:
    """Return the stderr of Python code that fails. Empty if it succeeds, or if no process can be started."""
    without = {name: value for name, value in os.environ.items() if name not in (_DEBUG, _LOGS, *ALLOCATOR_VARIABLES)}
    environment = safe_environment({**without, **({_LOGS: loggers} if loggers else {})})
    command = python_command("-c", code, *arguments)
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace", check=False)
    except (OSError, ValueError):
        return ""
    return done.stderr if done.returncode else ""
