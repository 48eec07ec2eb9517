"""Standard streams: data on stdout, everything else on stderr.

A lost log line ends no run; a lost result is an error.
"""

import io
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from opensora_cli.core.exceptions import OsoraError, OsoraWarning, OutputError
from opensora_cli.core.formatting import as_unicode, escaped, without_credentials
from opensora_cli.core.progress import Reporter, SilentReporter

if TYPE_CHECKING:
    from opensora_cli.core.documents import Document

_LONGEST_LINE = 2000
"""Characters of a message; every list of choices is shorter."""


def make_reporter(*, quiet: bool, is_brief: bool = False) -> Reporter:
    """Return a reporter with bars on a terminal, and with a few plain lines elsewhere; a silent one if `quiet`."""
    # Python has no stderr if the shell closed it (2>&-).
    if quiet or sys.stderr is None:
        return SilentReporter()
    from opensora_cli.core.progress import ConsoleReporter

    return ConsoleReporter(has_bars=sys.stderr.isatty(), is_brief=is_brief)


def print_result(result: "Document", *, as_json: bool, is_quiet: bool) -> None:
    """Print a result to stdout: as one JSON document in ASCII, which every terminal and pipe can carry, or as lines.

    A terminal that has shown the notes of the run, which are not `is_quiet`, gets no line twice.
    """
    if as_json:
        return _print(json.dumps(result.to_json(), indent=2, allow_nan=False))
    has_notes = not is_quiet and all(stream is not None and stream.isatty() for stream in (sys.stdout, sys.stderr))
    print_lines(result.lines_after_notes() if has_notes else result.lines())


def print_lines(lines: Sequence[str]) -> None:
    """Print lines of data to stdout, with control characters escaped."""
    for line in lines:
        _print(escaped(line))


def print_failure(error: OsoraError) -> None:
    """Print an error to stderr, a line for each problem, and the hint below it, which may have several lines."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, soft_wrap=True, highlight=False)
    for line in error.message.split("\n"):
        console.print(Text.assemble(("error: ", "bold red"), _readable(line)))
    for line in error.hint.split("\n") if error.hint else ():
        console.print(Text(f"       {_readable(line)}"))


def _readable(line: str) -> str:
    """Return a printable line; the middle of a very long one, such as a quoted value, is dropped."""
    kept = _LONGEST_LINE // 2
    return escaped(as_unicode(line if len(line) <= _LONGEST_LINE else f"{line[:kept]} ... {line[-kept:]}"))


def _print(line: str) -> None:
    if sys.stdout is None:  # closed by the shell (>&-)
        return
    encoding = sys.stdout.encoding or "utf-8"
    # A file name that the console cannot show must not crash a finished run.
    print(line.encode(encoding, "backslashreplace").decode(encoding), flush=True)


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
    sys.stderr = _guarded(sys.stderr, sys.__stderr__, _Log)
    sys.stdout = _guarded(sys.stdout, sys.__stdout__, _Results)


@cache
def escape_foreign_texts() -> None:
    """Escape control characters in warnings and tracebacks, which quote files and servers; see `foreign_text`."""

    def print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        print(foreign_text("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr)

    def format_warning(message: Warning | str, category: type[Warning], *place: Any, **options: Any) -> str:
        if issubclass(category, OsoraWarning):  # one line, without its place in the code
            return f"warning: {foreign_text(str(message))}\n"
        return foreign_text(python_format(message, category, *place, **options))

    python_format, warnings.formatwarning, sys.excepthook = warnings.formatwarning, format_warning, print_traceback


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


def _guarded(stream: TextIO, original: TextIO | None, raw: Callable[..., io.FileIO]) -> TextIO:
    if original is None or stream is not original:
        return stream
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(raw(stream.fileno(), "wb", closefd=False)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=getattr(stream, "line_buffering", True),
        write_through=getattr(stream, "write_through", False),
    )
