"""What is run to be measured, and what is only predicted."""

from collections.abc import Callable
from typing import TypeVar

import psutil  # type: ignore[import-untyped]  # it ships none

from opensora_cli.engine.components.hardware import Hardware, is_out_of_memory
from opensora_cli.engine.mem_profile.report import mib

MOST_ON_A_CPU = 4 * 2**30
"""Bytes. With much more, a CPU would compute for hours."""

OUT_OF_MEMORY = "there was not enough memory after all"

T = TypeVar("T")


def why_not_measured(needed: int, hardware: Hardware, *, weights: int = 0) -> str | None:
    """Return why something is not run here; None: it is.

    Args:
        needed: bytes of the device.
        hardware: the device.
        weights: bytes of all weights, which the host holds if they are streamed; 0: they are not.
    """
    if needed > hardware.free_bytes:
        return f"it needs {mib(needed)}, and {mib(hardware.free_bytes)} are free"
    if hardware.device.type == "cpu":
        if max(needed, weights) > MOST_ON_A_CPU:
            return f"a CPU would take too long: only up to {mib(MOST_ON_A_CPU)} are run without a GPU"
        return None
    free = psutil.virtual_memory().available
    if weights > free:
        return f"random weights in the host's memory need {mib(weights)}, and {mib(free)} are free"
    return None


def unless_out_of_memory(run: Callable[[], T]) -> T | None:
    """Return what `run` does, or None if memory was not enough.

    What it had on the device can be released afterwards: with the exception its traceback is gone, which holds that.
    """
    try:
        return run()
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return None
