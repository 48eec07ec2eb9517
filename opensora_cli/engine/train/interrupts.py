"""Ctrl-C and requests to end, which wait for a moment at which nothing is half done."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def noticed(tell: Callable[[], None]) -> Iterator[Callable[[], bool]]:
    """Note Ctrl-C and requests to end (SIGTERM) while the block runs, and let it go on; a second one strikes.

    Python handles signals in the main thread alone, so that a block elsewhere is never interrupted anyway; and where
    Ctrl-C is ignored, as in the background of a script, it stays so.

    Args:
        tell: called at the first one, in another thread: the main one may hold any lock.

    Yields:
        What says whether there was one.

    Raises:
        KeyboardInterrupt: at the second one.
    """
    pressed = False
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True
        threading.Thread(target=tell, daemon=True).start()

    before = {number: signal.getsignal(number) for number in _SIGNALS}
    taken = [
        number
        for number, handler in before.items()
        if callable(handler) or (number == signal.SIGTERM and handler is signal.SIG_DFL)
    ]
    for number in taken:
        signal.signal(number, note)
    try:
        yield lambda: pressed
    finally:
        for number in taken:
            signal.signal(number, before[number])
