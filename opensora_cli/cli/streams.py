"""Standard streams that cannot be written: a lost log line ends no run, and a lost result is an error."""

import io
import os
import select
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from types import TracebackType
from typing import Any, TextIO

from opensora_cli.core.exceptions import OsoraWarning, OutputError
from opensora_cli.core.formatting import escaped, without_credentials
from opensora_cli.core.signals import held_back


def guard_streams() -> None:
    """Make standard error drop text that it cannot write, and standard output raise an OutputError.

    Standard output drops text, too, if its reader has left (`| head`). A stream that the shell closed is opened on the
    null device: otherwise the next file would take its number, and libraries would log to that file. Streams that a
    program or a test replaced are not changed.
    """
    if sys.platform == "win32":
        return  # consoles are no files there
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    if sys.stderr is None:  # print() would write to standard output
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # open until the process ends
    sys.stderr = _guarded(sys.stderr, sys.__stderr__, _Log, _LogText)
    sys.stdout = _guarded(sys.stdout, sys.__stdout__, _Results, io.TextIOWrapper)


@cache
def escape_foreign_texts() -> None:
    """Escape control characters in warnings and tracebacks, which quote files and servers; see `foreign_text`."""

    def print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        import traceback

        print(foreign_text("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr)

    sys.excepthook = print_traceback
    python_format = warnings.formatwarning

    def format_warning(message: Warning | str, category: type[Warning], *place: Any, **options: Any) -> str:
        if issubclass(category, OsoraWarning):  # one line, without its place in the code
            return f"warning: {foreign_text(str(message))}\n"
        return foreign_text(python_format(message, category, *place, **options))

    warnings.formatwarning = format_warning


@cache
def escape_foreign_logs() -> None:
    """Escape control characters in log records of libraries: huggingface_hub prints the warnings of a server."""
    import logging

    class Record(logging.LogRecord):
        def getMessage(self) -> str:  # noqa: N802  # logging's name
            return foreign_text(super().getMessage())

    logging.setLogRecordFactory(Record)


def foreign_text(text: str) -> str:
    """Return text of a library for a terminal: no passwords in addresses, and control characters escaped."""
    return "\n".join(escaped(line) for line in without_credentials(text).split("\n"))


class _Log(io.FileIO):
    def write(self, content: "bytes | memoryview", /) -> int:  # type: ignore[override]  # narrower than any buffer
        try:
            return super().write(content) or len(content)
        except OSError:
            return len(content)


class _LogText(io.TextIOWrapper):
    """Text layer that writes each text once: interrupted by Ctrl-C, the buffer would write it again."""

    def write(self, text: str, /) -> int:
        with suppress(OSError, ValueError):  # Ctrl-C may end this wait for a reader
            select.select([], [self.fileno()], [])
        with held_back():
            return super().write(text)

    def flush(self) -> None:
        with held_back():
            super().flush()


class _Results(io.FileIO):
    def write(self, content: "bytes | memoryview", /) -> int:  # type: ignore[override]  # narrower than any buffer
        try:
            return super().write(content)
        except OSError as error:
            # Python flushes its buffer again at exit, which must not fail.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            if isinstance(error, BrokenPipeError):  # the reader has left
                return len(content)
            raise OutputError(f"cannot write to standard output: {error.strerror or error}") from error


def _guarded(
    stream: TextIO, original: TextIO | None, raw: Callable[..., io.FileIO], text: type[io.TextIOWrapper]
) -> TextIO:
    """Return a stream to the same file with the layers `raw` and `text`."""
    if original is None or stream is not original:
        return stream
    stream.flush()
    return text(
        io.BufferedWriter(raw(stream.fileno(), "wb", closefd=False)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=getattr(stream, "line_buffering", True),
        write_through=getattr(stream, "write_through", False),
    )
