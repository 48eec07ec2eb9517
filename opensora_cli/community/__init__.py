"""Adapters with the names that the Open-Sora community knows, in modules by topic. Nothing else imports them.

Arguments have the community's order and names; additional arguments are keyword-only.
"""

from collections.abc import Callable
from typing import NoReturn

from opensora_cli.core.exceptions import RequestError


def refused(name: str, *, hint: str) -> Callable[..., NoReturn]:
    """Return a function for a name that makes no sense here. A call raises RequestError with a replacement as hint."""

    def refuse(*_args: object, **_kwargs: object) -> NoReturn:
        raise RequestError(f"{name} does not exist in osora", hint=hint)

    return refuse
