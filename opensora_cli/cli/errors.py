"""Exit codes and messages of exceptions."""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import typer

from opensora_cli.cli.output import print_failure
from opensora_cli.core import ranks
from opensora_cli.core.exceptions import HardwareError, OsoraError, RequestError
from opensora_cli.core.formatting import plain
from opensora_cli.core.ranks import INTERRUPTED, RankContext, find_context
from opensora_cli.core.reading import is_lack_of_memory, refused_by_system
from opensora_cli.core.signals import interrupts
from opensora_cli.settings.flags import FLAGS, option_of

# Typer vendors Click and exposes only this subclass of the error for a command line that does not parse.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]

_RENAMED = {
    "offload_model": "--offload",
    "is_causal_vae": "--set",
    "ckpt_path": "--weights",
    "length": "--num-frames",
    "batch_size": "--prompts",
    "distributed": "--gpus",
}
"""Options of the reference implementation's scripts that the tables of `settings.reference` do not name."""


class InterruptError(OsoraError):
    """Ctrl-C, with a hint on how to continue."""

    exit_code = INTERRUPTED


def run(command: Callable[[], object]) -> int:
    """Run `command`, which returns an exit code or anything else for success, and return the program's exit code.

    Errors that a user can act on are printed in a few lines on stderr. Any other error is a bug: it is raised, so that
    Python prints the traceback and exits with 1. A rank sends its message to the launcher, which prints it once.
    """
    try:
        context = find_context(os.environ)
    except RequestError:  # Commands that run on several ranks report incomplete variables.
        context = None
    try:
        with nullcontext() if context is None else ranks.linked(context):
            try:
                code = command()
            except KeyboardInterrupt:
                code = INTERRUPTED
            except Exception as error:
                return _report_failure(error, context)
            if code == INTERRUPTED:  # by Typer, while a command line is parsed or help is printed
                return _report(InterruptError("interrupted"))
            if code == OsoraError.exit_code:  # by Typer, for a shell without completion
                hint = "run it from bash, zsh, fish or PowerShell"
                return _report(HardwareError("no shell was found that can complete commands", hint=hint))
            return code if isinstance(code, int) else 0
    except OsoraError as error:  # of the link to the launcher
        return _report(error)


def _report_failure(error: Exception, context: RankContext | None) -> int:
    """Report an exception, and return the exit code. Raises it if it is a bug that no launcher reports."""
    failure = translate(error)
    if failure is None and ranks.report_bug(error):
        return OsoraError.exit_code
    if failure is None and context is not None and ranks.is_loss(error):
        place = f"rank {context.rank} on {socket.gethostname()}, in the stage {ranks.current_stage()}"
        failure = HardwareError(f"{place}: lost the others", hint="the rank that ended first printed the reason")
    if failure is None:
        raise error
    return _report(failure)


def _report(error: OsoraError) -> int:
    if not ranks.report_failure(error.message, hint=error.hint, exit_code=error.exit_code):
        print_failure(error)
    return error.exit_code


def translate(error: Exception) -> OsoraError | None:
    """Return the error that is reported for an exception, with one problem a line; None for a bug."""
    from pydantic import ValidationError

    from opensora_cli.settings.layers import explain

    match error:
        case OsoraError():
            return error
        case ValidationError():
            return RequestError("\n".join(explain(error)))
        case _UsageError():
            return _usage_error(error)
        case _ if is_lack_of_memory(error):
            reason = plain(" ".join(str(error).split()))
            return HardwareError(f"there is not enough memory: {reason}".removesuffix(": "))
        case OSError():
            return refused_by_system(error)
        case typer.Abort():
            return InterruptError("interrupted")
        case _:
            return None


def _usage_error(error: Exception) -> RequestError:
    context, option = getattr(error, "ctx", None), getattr(error, "option_name", "")
    hint = f"see {getattr(context, 'command_path', 'osora')} --help"
    if "unexpected extra argument" in str(error):
        hint = f"quote a text with blanks in it, or {hint}"
    elif option.startswith("-") and not option.startswith("--"):
        hint = f"put a text that begins with - after --, at the end, or {hint}"
    if not hasattr(error, "possibilities"):
        describe: Callable[[], str] = getattr(error, "format_message", error.__str__)
        return RequestError(describe().replace(": Value error, ", ": ", 1), hint=hint)
    if option == "--prompt":  # of the reference
        return RequestError(f'no such option: {option}. Use the text alone: osora generate "raining, sea"', hint=hint)
    known = {name for each in getattr(getattr(context, "command", None), "params", ()) for name in each.opts}
    # The option for the name in the reference comes first, then the nearest; Typer's own message sorts them by name.
    likely = [*({reference_option(option)} & known), *(error.possibilities or ())]
    return RequestError(f"no such option: {option}" + (f". Did you mean {likely[0]}?" if likely else ""), hint=hint)


def reference_option(option: str) -> str:
    """Return osora's name for an option of the reference's scripts."""
    name = option.lstrip("-").replace("-", "_").rpartition(".")[2]
    if name in _RENAMED:
        return _RENAMED[name]
    from opensora_cli.settings.reference import SAMPLING_NAMES

    options = {row.key: option_of(flag) for flag, row in FLAGS.items()}
    return options.get(SAMPLING_NAMES[name], "--set") if name in SAMPLING_NAMES else option_of(name)


@contextmanager
def interruptible() -> Iterator[None]:
    """Turn Ctrl-C, or a request to end (see `core.signals`), into an error, before Typer exits without a message.

    The argument of `KeyboardInterrupt`, if there is one, says how to continue.
    Raises InterruptError if either came.
    """
    with interrupts() as was_asked:
        try:
            yield
        except KeyboardInterrupt as stop:
            raise InterruptError("interrupted", hint=str(stop.args[0]) if stop.args else None) from stop
        except Exception as error:
            # A compiled module whose import is interrupted raises another error.
            if was_asked():
                notes = getattr(error, "__notes__", None)
                raise InterruptError("interrupted", hint="\n".join(notes) if notes else None) from error
            raise
