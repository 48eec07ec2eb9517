"""Values of environment variables that torch refuses. torch itself judges most of them, in a process of its own.

Callers use this module before they import torch, which fails with such a value.
"""

import os
import re
import subprocess
from collections.abc import Mapping
from functools import cache

from opensora_cli.core.python_processes import python_command, safe_environment
from opensora_cli.settings.explain import nearest

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_DEBUG, _LOGS = "TORCH_DISTRIBUTED_DEBUG", "TORCH_LOGS"
_OPTION = re.compile(r"(\w+):(\[[^\[\]]*\]|[^:,;=\[\]]+)")
# c10/core/AllocatorConfig.h and c10/cuda/CUDAAllocatorConfig.h of torch 2.13.
_OPTIONS = (
    *("backend", "expandable_segments", "garbage_collection_threshold", "graph_capture_record_stream_reuse"),
    *("large_segment_size_mb", "max_non_split_rounding_mb", "max_split_size_mb", "per_process_memory_fraction"),
    *("pinned_free_catch_all", "pinned_max_cached_size_mb", "pinned_max_round_threshold_mb"),
    *("pinned_num_register_threads", "pinned_reserve_segment_size_mb", "pinned_use_background_threads"),
    *("pinned_use_cuda_host_register", "release_lock_on_cudamalloc", "roundup_power2_divisions"),
    "throw_on_cudamalloc_oom",
)


def refused_by_torch(environment: Mapping[str, str]) -> list[str]:
    """Return the variables whose values make the import of torch fail."""
    refused = [_DEBUG] if environment.get(_DEBUG, "OFF").upper() not in ("OFF", "INFO", "DETAIL") else []
    # Only torch knows the names of its loggers.
    return [*refused, _LOGS] if _LOGS in _errors("import torch", loggers=environment.get(_LOGS, "")) else refused


def allocator_fault(text: str) -> tuple[str, str] | None:
    """Return what is wrong with options of torch's allocator and its fix, or None.

    `text` is a value of `PYTORCH_ALLOC_CONF`, as in `expandable_segments:True,max_split_size_mb:128`.
    """
    plain = re.sub(r"\s", "", text)  # torch skips it everywhere
    found = _OPTION.findall(plain)
    if ",".join(map(":".join, found)) != plain.removesuffix(","):
        return f"{text!r} is not of the form name:value,name:value", "write it as in expandable_segments:True"
    for name, _ in found:
        if name not in _OPTIONS:
            close = nearest(name, _OPTIONS)
            return f"{name} is not an option", f"did you mean {close}?" if close else f"use {', '.join(_OPTIONS)}"
    code = "import sys, torch; torch._C._accelerator_setAllocatorSettings(sys.argv[1])"
    lines = [line for line in _errors(code, plain).splitlines() if "Error: " in line] if plain else []
    # A torch without this function parses the options at the first use of a GPU alone.
    if not lines or lines[-1].startswith("AttributeError"):
        return None
    return lines[-1].partition("Error: ")[2].strip(), "see PYTORCH_ALLOC_CONF in torch's notes on CUDA"


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
