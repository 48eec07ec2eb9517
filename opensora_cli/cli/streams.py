"""Standard streams that cannot be written: a log that is lost ends no run, and a result that is lost is reported."""

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
    """Make standard error drop what it cannot write, and standard output raise an OutputError for it.

    Standard output drops it, too, where a reader has left (`| head`). Streams that the shell closed lead nowhere: else
    the next file that is opened would take their number, and what libraries log would be written to it. Streams that
    are not those of the process, as in tests, stay as they are.
    """
    if sys.platform == "win32":
        return  # consoles there are no files
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
    if sys.stderr is None:  # what is printed there would go to standard output
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # as long as the process
    sys.stderr = _guarded(sys.stderr, sys.__stderr__, _Log, _LogText)
    sys.stdout = _guarded(sys.stdout, sys.__stdout__, _Results, io.TextIOWrapper)


@cache
def escape_foreign_texts() -> None:
    """Escape what steers terminals in warnings and tracebacks, which quote files and servers; see `foreign_text`."""

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
    """Do so in the log records of libraries: huggingface_hub prints the warnings of a server. Imports logging."""
    import logging

    class Record(logging.LogRecord):
        def getMessage(self) -> str:  # noqa: N802  # logging's name
            return foreign_text(super().getMessage())

    logging.setLogRecordFactory(Record)


def foreign_text(text: str) -> str:
    """Return lines of a library for a terminal: without passwords in addresses, and with control characters escaped."""
    return "\n".join(escaped(line) for line in without_credentials(text).split("\n"))


class _Log(io.FileIO):
    def write(self, content: "bytes | memoryview", /) -> int:  # type: ignore[override]  # narrower than any buffer
        try:
            return super().write(content) or len(content)
        except OSError:
            return len(content)


class _LogText(io.TextIOWrapper):
    """Writes each text once, also where Ctrl-C comes just after: the buffer would not know, and write it again."""

    def write(self, text: str, /) -> int:
        with suppress(OSError, ValueError):  # Ctrl-C may end waiting for a reader
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
            # Python flushes its buffer again while it exits, which must not fail.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            if isinstance(error, BrokenPipeError):  # the reader has seen enough
                return len(content)
            raise OutputError(f"cannot write to standard output: {error.strerror or error}") from error


def _guarded(
    stream: TextIO, original: TextIO | None, raw: Callable[..., io.FileIO], text: type[io.TextIOWrapper]
) -> TextIO:
    """Return a stream of the same form, to the same file, with another lowest and another highest layer."""
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
