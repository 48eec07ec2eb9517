"""The names that the Open-Sora community knows, in modules by its groups: adapters, which nothing else imports.

Arguments have the community's order and names; those that it does not know are keyword-only.
"""

from collections.abc import Callable
from typing import NoReturn

from opensora_cli.core.exceptions import RequestError


def refused(name: str, *, hint: str) -> Callable[..., NoReturn]:
    """Return what stands for a name that makes no sense here: a call is a RequestError with what to use instead."""

    def refuse(*_args: object, **_kwargs: object) -> NoReturn:
        raise RequestError(f"{name} does not exist in osora", hint=hint)

    return refuse
