"""What rank 0 prints, on its way to the terminal and to its log file."""

import contextlib
import os
import threading
from types import TracebackType
from typing import BinaryIO, Self

_CHUNK = 2**16
_SHOW_CURSOR = b"\x1b[?25h"
_DRAIN_S = 2.0


class CopiedStream:
    """Gives a rank a stream of its own, and copies what is written there to one of ours and to a log file.

    Where ours is a terminal, the rank's is one too: a pseudo terminal, so that bars stay bars.

    Args:
        target: file descriptor of our stream; -1: there is none.
        log: of the rank, opened unbuffered for appending.
    """

    def __init__(self, target: int, log: BinaryIO) -> None:
        self._target = target
        self._log = log
        self._is_terminal = target >= 0 and os.isatty(target)
        self._is_muted = target < 0
        self._source, self.end = _terminal_like(target) if self._is_terminal else os.pipe()
        """`end` is the file descriptor for the rank."""
        self._thread = threading.Thread(target=self._copy, name="rank-output", daemon=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Begin to copy, once the rank runs and has `end`."""
        os.close(self.end)
        self.end = -1
        self._thread.start()

    def mute(self) -> None:
        """Send the rest to the log alone."""
        self._is_muted = True

    def close(self) -> None:
        """Copy what is left, after the rank's end."""
        if self.end >= 0:  # never started
            os.close(self.end)
            os.close(self._source)
            return
        # Whatever the rank left running may keep the other end open: it is not waited for.
        self._thread.join(_DRAIN_S)
        if self._is_terminal:
            # A rank that was killed while it drew a bar leaves the cursor hidden.
            with contextlib.suppress(OSError):
                os.write(self._target, _SHOW_CURSOR)

    def _copy(self) -> None:
        try:
            while chunk := self._read():
                self._log.write(chunk)
                if not self._is_muted:
                    _write_all(self._target, chunk)
        except OSError:
            pass  # our reader is gone (`| head`): the rank learns it when it writes next
        finally:
            os.close(self._source)

    def _read(self) -> bytes:
        try:
            return os.read(self._source, _CHUNK)
        except OSError:  # so a pseudo terminal says that its other end was closed
            return b""


def _terminal_like(terminal: int) -> tuple[int, int]:
    """Return the two ends of a pseudo terminal as wide as `terminal`; the second is for the program."""
    import pty
    import termios

    source, end = pty.openpty()
    termios.tcsetwinsize(end, termios.tcgetwinsize(terminal))
    modes = termios.tcgetattr(end)
    modes[1] &= ~termios.OPOST  # the real terminal makes its own line ends
    termios.tcsetattr(end, termios.TCSANOW, modes)
    return source, end


def _write_all(target: int, chunk: bytes) -> None:
    while chunk:
        chunk = chunk[os.write(target, chunk) :]
