"""The key q: asks a run in a terminal to end, as the first Ctrl-C does.

The terminal hands over keys as they are typed, unseen, while a run listens. A thread does it all, so that q and Ctrl-Z
count at once where the main thread is in the middle of a long computation.
"""

import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from opensora_cli.core.progress import Reporter
from opensora_cli.core.signals import held_back

if sys.platform != "win32":
    import termios
    import tty

_KEYS = b"qQ"


@contextmanager
def ended_by_q(reporter: Reporter, *, wanted: bool = True) -> Iterator[None]:
    """Do what Ctrl-C does when q is typed inside the block, and say so at its start, if that is `wanted`.

    Without effect where stdin or stderr is no terminal, Ctrl-C is ignored, or outside of the main thread. The terminal
    is put back as it was at the end of the block, and while the process is stopped; in the background, it is left
    alone.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not (wanted and is_main and _are_terminals() and callable(signal.getsignal(signal.SIGINT))):
        yield
        return
    keys = _Keys(sys.stdin.fileno())
    try:
        keys.start()
        reporter.note("q ends the run, as Ctrl-C does: what is begun is saved, to go on with later")
        yield
    finally:
        with held_back():
            keys.stop()


def _are_terminals() -> bool:
    if sys.platform == "win32" or sys.stdin is None or sys.stderr is None:
        return False
    try:
        return os.isatty(sys.stdin.fileno()) and sys.stderr.isatty()
    except (OSError, ValueError):  # closed, or what a program has put in their place
        return False


class _Keys:
    """Listens to a terminal, given by its file descriptor, in a thread."""

    def __init__(self, terminal: int) -> None:
        self._terminal = terminal
        self._before = termios.tcgetattr(terminal)
        self._is_changed = self._has_ended = False
        self._handlers: dict[int, Any] = {}
        # Python writes the number of each signal to it, also where the main thread has no time for a handler.
        self._signals, self._wakeup = os.pipe()
        os.set_blocking(self._wakeup, False)
        self._thread = threading.Thread(target=self._listen, daemon=True)

    def start(self) -> None:
        for number in (signal.SIGTSTP, signal.SIGCONT):
            self._handlers[number] = signal.signal(number, lambda number, frame: None)
        self._old_wakeup = signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        self._thread.start()

    def stop(self) -> None:
        """Put everything back."""
        self._has_ended = True
        if self._thread.ident is not None:
            os.write(self._wakeup, bytes(1))
            self._thread.join()
            signal.set_wakeup_fd(self._old_wakeup)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._put_back()
        os.close(self._signals)
        os.close(self._wakeup)

    def _listen(self) -> None:
        # Without these two, a process in the background that reads or changes its terminal is stopped.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTIN, signal.SIGTTOU})
        self._change()
        while not self._has_ended:
            ready, _, _ = select.select([self._signals, *([self._terminal] if self._is_changed else [])], [], [])
            if self._signals in ready:
                self._handle(os.read(self._signals, 256))
            elif not self._read():
                return

    def _read(self) -> bool:
        """Take what was typed; return whether to go on listening."""
        try:
            typed = os.read(self._terminal, 256)
        except OSError:
            return False
        main = threading.main_thread().ident
        if typed and not set(typed) <= set(_KEYS):
            return True
        if typed and main is not None:
            signal.pthread_kill(main, signal.SIGINT)
        return False

    def _handle(self, numbers: bytes) -> None:
        if signal.SIGTSTP in numbers:
            self._put_back()
            # By this thread: were it another that stops the process, this one would go on for a moment.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        if signal.SIGCONT in numbers or signal.SIGTSTP in numbers:
            self._change()

    def _change(self) -> None:
        with suppress(OSError, termios.error):
            self._is_changed = self._is_in_foreground()
            if self._is_changed:
                tty.setcbreak(self._terminal, termios.TCSANOW)

    def _put_back(self) -> None:
        with suppress(OSError, termios.error):
            if self._is_changed and self._is_in_foreground():
                termios.tcsetattr(self._terminal, termios.TCSANOW, self._before)
        self._is_changed = False

    def _is_in_foreground(self) -> bool:
        return os.tcgetpgrp(self._terminal) == os.getpgrp()
