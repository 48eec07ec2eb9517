"""What is otherwise in the process of a command, called before it begins."""

import sys

from opensora_cli.core.exceptions import OutputError
from opensora_cli.media import write


def refuse_media() -> None:
    """Let no picture and no video be encoded."""

    def refuse(*_: object, **__: object) -> None:
        raise OutputError("cannot write it: the disk is full")

    real = write.write_media
    # In every module that has it.
    for module in list(sys.modules.values()):
        for name, value in list(vars(module).items()):
            if value is real:
                setattr(module, name, refuse)
