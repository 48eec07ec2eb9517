"""What is otherwise in the process of a command, called before it begins."""

import json
import os
import sys
from collections.abc import Callable

import pytest
from fake_hub import FakeHub, connect
from hostile import failing_calls

from opensora_cli.core.exceptions import OutputError
from opensora_cli.engine.ckpt import hub
from opensora_cli.media import write

HUB = "OSORA_HOSTILE_HUB"
"""The variable with the address of the hub that `ask_hub` asks."""

CALLS = "OSORA_HOSTILE_CALLS"
"""The variable with the arguments of `failing_calls.arm`, as JSON."""


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
    patch.setattr(hub, "RETRY_AFTER_S", 0.0)


def fail_calls() -> None:
    """Let calls of this process that change files be counted, and one of them fail."""
    failing_calls.arm(*json.loads(os.environ.pop(CALLS)))


def _replace_everywhere(function: Callable[..., object], substitute: Callable[..., object]) -> None:
    """Replace a function in every module that has it."""
    for module in list(sys.modules.values()):
        for name, value in list(vars(module).items()):
            if value is function:
                setattr(module, name, substitute)
