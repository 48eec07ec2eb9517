"""Cache of memory needs: a table ships with the presets, and a process adds the needs that it counts.

An entry is valid for the code that counted it. If the table lacks a request, counting takes seconds.
"""

import hashlib
import importlib.resources
import json
from collections.abc import Callable
from functools import cache, wraps
from typing import TypeVarTuple

from opensora_cli.engine.estimate.fake_tensors import Need

Given = TypeVarTuple("Given")


@cache
def known_needs() -> dict[str, Need]:
    """Return the known needs by their keys; at first, the content of the table."""
    table = importlib.resources.files("opensora_cli") / "assets" / "estimates.json"
    return {key: Need(*sizes) for key, sizes in json.loads(table.read_text(encoding="utf-8")).items()}


def remembered(count: Callable[[*Given], Need]) -> Callable[[*Given], Need]:
    """Return `count` with a cache. The key is the `repr` of the arguments."""

    @wraps(count)
    def find(*given: *Given) -> Need:
        known = known_needs()
        key = hashlib.sha256(repr((count.__name__, given)).encode()).hexdigest()[:16]
        if key not in known:
            known[key] = count(*given)
        return known[key]

    return find
