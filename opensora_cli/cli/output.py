"""What commands print: data on stdout, everything else on stderr."""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from opensora_cli.core.formatting import escaped
from opensora_cli.core.progress import Reporter, SilentReporter
from opensora_cli.core.strict_json import as_unicode

if TYPE_CHECKING:
    from opensora_cli.core.documents import Document

_LONGEST_LINE = 2000
"""Characters of a message; every list of choices is shorter."""


def make_reporter(*, quiet: bool) -> Reporter:
    """Return a reporter: bars on a terminal, a few plain lines elsewhere, and nothing when `quiet`."""
    # Python has no stderr if the shell closed it (2>&-).
    if quiet or sys.stderr is None:
        return SilentReporter()
    from opensora_cli.cli.progress import BarReporter, LineReporter

    return BarReporter() if sys.stderr.isatty() else LineReporter()


def note_start(reporter: Reporter) -> None:
    """Report on a terminal that torch is being loaded, which takes seconds on a busy machine."""
    if sys.stderr is not None and sys.stderr.isatty() and "torch" not in sys.modules:
        reporter.note("loading torch ...")


def print_result(result: "Document", *, as_json: bool) -> None:
    """Print a result to stdout, as JSON or as lines."""
    if as_json:
        print_json(result.to_json())
    else:
        print_lines(result.lines())


def print_json(document: Mapping[str, object]) -> None:
    """Print one JSON document to stdout, in ASCII, which every terminal and pipe can carry."""
    _print(json.dumps(document, indent=2, allow_nan=False))


def print_lines(lines: Sequence[str]) -> None:
    """Print lines of data to stdout, with control characters escaped, so that each stays one line."""
    for line in lines:
        _print(escaped(line))


def print_failure(lines: Sequence[str], *, hint: str | None = None) -> None:
    """Print errors to stderr, and the hint below them, which may have several lines."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, soft_wrap=True, highlight=False)
    for line in lines:
        console.print(Text.assemble(("error: ", "bold red"), readable(line)))
    for line in hint.split("\n") if hint else ():
        console.print(Text(f"       {readable(line)}"))


def readable(line: str) -> str:
    """Return a printable line; the middle of a very long one, such as a quoted value, is dropped."""
    kept = _LONGEST_LINE // 2
    return escaped(as_unicode(line if len(line) <= _LONGEST_LINE else f"{line[:kept]} ... {line[-kept:]}"))


def _print(line: str) -> None:
    if sys.stdout is None:  # closed by the shell (>&-)
        return
    encoding = sys.stdout.encoding or "utf-8"
    # A file name that the console cannot show must not crash a finished run.
    print(line.encode(encoding, "backslashreplace").decode(encoding), flush=True)
