"""Attention backends: `NAME.py` defines the backend `NAME` and is imported on first use.

A new file is a new backend.
"""

import difflib
import importlib
import pkgutil

from opensora_cli.core.attention import AttentionBackend
from opensora_cli.core.exceptions import RequestError


def backend_names() -> tuple[str, ...]:
    """Return the names of all backends without importing them."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def attention_backend(name: str) -> AttentionBackend:
    """Return the backend `name`. Raises RequestError with the nearest name for an unknown one."""
    names = backend_names()
    if name not in names:
        nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        meant = f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise RequestError(f"attention={name!r} is not a backend: use {' or '.join(names)}{meant}")
    backend: AttentionBackend = getattr(importlib.import_module(f"{__name__}.{name}"), name)
    return backend
