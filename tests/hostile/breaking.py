"""What breaks in the process of a command, called before it begins: for disks that no test can fill."""

import sys
from collections.abc import Callable

from opensora_cli.core.exceptions import OutputError
from opensora_cli.media import write


def refuse_media() -> None:
    """Let no picture and no video be encoded."""

    def refuse(*_: object, **__: object) -> None:
        raise OutputError("cannot write it: the disk is full")

    _replace_everywhere(write.write_media, refuse)


def _replace_everywhere(function: Callable[..., object], substitute: Callable[..., object]) -> None:
    """Replace a function in every module that has it."""
    for module in list(sys.modules.values()):
        for name, value in list(vars(module).items()):
            if value is function:
                setattr(module, name, substitute)
