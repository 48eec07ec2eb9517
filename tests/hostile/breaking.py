"""What is otherwise in the process of a command, called before it begins."""

import os
import sys
from collections.abc import Callable

import pytest
from fake_hub import FakeHub, connect

from opensora_cli.core.exceptions import OutputError
from opensora_cli.media import write

HUB = "OSORA_HOSTILE_HUB"
"""The variable with the address of the hub that `ask_hub` asks."""


def refuse_media() -> None:
    """Let no picture and no video be encoded."""

    def refuse(*_: object, **__: object) -> None:
        raise OutputError("cannot write it: the disk is full")

    _replace_everywhere(write.write_media, refuse)


def ask_hub() -> None:
    """Ask another hub, without waiting before a retry."""
    patch = pytest.MonkeyPatch()
    connect(FakeHub(endpoint=os.environ.pop(HUB)), patch)
    patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)


def _replace_everywhere(function: Callable[..., object], substitute: Callable[..., object]) -> None:
    """Replace a function in every module that has it."""
    for module in list(sys.modules.values()):
        for name, value in list(vars(module).items()):
            if value is function:
                setattr(module, name, substitute)
