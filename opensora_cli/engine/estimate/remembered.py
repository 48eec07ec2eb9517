"""What was counted once is not counted again: a table ships with the presets, and a process adds what it counts.

An entry holds for the code that counted it. Of a request that the table lacks, all is counted, in seconds.
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
    """Return what is known, by `key`; at first, what the table has."""
    table = importlib.resources.files("opensora_cli") / "assets" / "estimates.json"
    return {key: Need(*sizes) for key, sizes in json.loads(table.read_text(encoding="utf-8")).items()}


def remembered(count: Callable[[*Given], Need]) -> Callable[[*Given], Need]:
    """Return `count` with a memory; the `repr` of what it is given says all that matters."""

    @wraps(count)
    def find(*given: *Given) -> Need:
        known = known_needs()
        key = hashlib.sha256(repr((count.__name__, given)).encode()).hexdigest()[:16]
        if key not in known:
            known[key] = count(*given)
        return known[key]

    return find
