"""From an exception to a message and an exit code: the one place that knows both."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import typer

from opensora_cli.cli import output
from opensora_cli.core.exceptions import HardwareError, OsoraError, RequestError

INTERRUPTED = 130

# Typer brings its own Click and exposes only this subclass of the error that a command line does not parse.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


@dataclass(frozen=True)
class Failure:
    """How a command ends when it did not succeed.

    Args:
        lines: what is wrong, one problem a line.
        hint: how to mend it.
        exit_code: 2 a bad request, 3 a bad or missing file, 4 this machine cannot do it, 130 interrupted.
    """

    lines: tuple[str, ...]
    exit_code: int
    hint: str | None = None


class InterruptError(OsoraError):
    """Ctrl-C, with what is left to do."""

    exit_code = INTERRUPTED


@contextmanager
def interruptible() -> Iterator[None]:
    """Turn Ctrl-C into an error with a message, before Typer makes a bare exit of it.

    The engine may hand in one line on how to go on, as the argument of `KeyboardInterrupt`.

    Raises:
        InterruptError: Ctrl-C was pressed.
    """
    try:
        yield
    except KeyboardInterrupt as stop:
        raise InterruptError("interrupted", hint=str(stop.args[0]) if stop.args else None) from stop


def run(command: Callable[[], object]) -> int:
    """Run `command` and return the exit code of the program.

    Errors that a user can act on are told in a few lines on stderr. Any other is a bug: it is raised, so that Python
    prints the traceback and exits with 1.

    Args:
        command: returns an exit code, or anything else for success.
    """
    try:
        code = command()
    except Exception as error:
        failure = explain_failure(error)
        if failure is None:
            raise
        output.print_failure(failure.lines, hint=failure.hint)
        return failure.exit_code
    return code if isinstance(code, int) else 0


def explain_failure(error: Exception) -> Failure | None:
    """Return how to tell `error`, or None where it is a bug."""
    # pydantic takes long to import, and without it there is nothing of its to catch.
    from pydantic import ValidationError

    from opensora_cli.settings.explain import explain

    match error:
        case OsoraError():
            return Failure(tuple(error.message.splitlines()), error.exit_code, error.hint)
        case ValidationError():
            return Failure(tuple(explain(error)), RequestError.exit_code)
        case _UsageError():
            return Failure((_usage_line(error),), RequestError.exit_code, _usage_hint(error))
        case MemoryError():
            return Failure(("there is not enough memory",), HardwareError.exit_code)
        case typer.Abort():
            return Failure(("interrupted",), INTERRUPTED)
        case _:
            return None


def _usage_line(error: Exception) -> str:
    # Best first here; Typer's own message sorts them by name.
    possibilities = getattr(error, "possibilities", None)
    if possibilities:
        return f"no such option: {getattr(error, 'option_name', '')}. Did you mean {possibilities[0]}?"
    describe: Callable[[], str] = getattr(error, "format_message", error.__str__)
    return describe().replace("Value error, ", "")


def _usage_hint(error: Exception) -> str:
    path = getattr(getattr(error, "ctx", None), "command_path", "osora")
    quote = "quote a text that has blanks in it, or " if "unexpected extra argument" in str(error) else ""
    return f"{quote}see {path} --help"
