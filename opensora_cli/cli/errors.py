"""Messages and exit codes of exceptions, and Ctrl-C."""

import _thread
import gc
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType

import typer

from opensora_cli.cli import output
from opensora_cli.cli.streams import escape_foreign_logs
from opensora_cli.core import rank_link
from opensora_cli.core.exceptions import HardwareError, OsoraError, RequestError
from opensora_cli.core.formatting import plain
from opensora_cli.core.ranks import RankContext, find_context
from opensora_cli.core.reading import is_lack_of_memory, refused_by_system
from opensora_cli.core.signals import REPEAT_S, held_back, requests_as_interrupts

INTERRUPTED = 130

_MOMENT_S = 0.02

_LIBRARY_PREFIXES = ("TORCH", "PYTORCH", "HF_", "HUGGINGFACE_", "TRANSFORMERS_")
"""Prefixes of the variables that libraries read while they are imported."""

# Typer vendors Click and exposes only this subclass of the error for a command line that does not parse.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


OF_REFERENCE = {
    "save_dir": "--out",
    "prompt": "--prompt-text",
    "cond_type": "--cond",
    "offload_model": "--offload",
    "sampling_option.resolution": "--res",
    "resolution": "--res",
    "sampling_option.aspect_ratio": "--aspect-ratio",
    "sampling_option.num_frames": "--num-frames",
    "sampling_option.height": "--height",
    "sampling_option.width": "--width",
    "sampling_option.num_steps": "--steps",
    "num_steps": "--steps",
    "sampling_option.guidance": "--guidance-scale",
    "guidance": "--guidance-scale",
    "sampling_option.guidance_img": "--image-guidance-scale",
    "guidance_img": "--image-guidance-scale",
    "sampling_option.seed": "--seed",
    "sampling_option.flow_shift": "--set",
    "sampling_option.is_causal_vae": "--set",
    "num_sample": "--num-samples",
    "fps_save": "--fps",
    "prompt_refine": "--refine",
    "ckpt_path": "--weights",
}
"""Options of the reference implementation's scripts, without dashes, and the option of osora."""

REMOVED = {"--profile": "osora bench-generate", "--profile-runs": "osora bench-generate --repeats N"}
"""Options of earlier versions, and the command that took their place."""


@dataclass(frozen=True)
class Failure:
    """Message of a failed command, one problem a line, with its exit code and a hint."""

    lines: tuple[str, ...]
    exit_code: int
    hint: str | None = None


class InterruptError(OsoraError):
    """Ctrl-C, with a hint on how to continue."""

    exit_code = INTERRUPTED


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold back Ctrl-C while torch and the modules that need it are imported: interrupted, an import can abort.

    The objects of torch stay, so garbage collection is off meanwhile and ignores them afterwards: scanning them takes a
    tenth of a second each time. From then on, log messages of libraries are escaped.

    Raises RequestError if a library refuses an environment variable.
    """
    is_first = "torch" not in sys.modules
    escape_foreign_logs()
    if is_first:
        gc.disable()
    try:
        with held_back():
            yield
    except (ValueError, RuntimeError) as error:
        refused = _refused_variable(error)
        if refused is None:
            raise
        raise refused from error
    finally:
        if is_first:
            gc.freeze()
            gc.enable()


def _refused_variable(error: Exception) -> RequestError | None:
    """Return the error for an environment variable that a library refuses; None if it names none."""
    from opensora_cli.core.redaction import shown_value

    text = str(error)
    named = {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_LIBRARY_PREFIXES) and (name in text or repr(value) in text)
    }
    if not named:
        return None
    shown = {name: shown_value(name, value) for name, value in named.items()}
    for name, value in named.items():
        if value and shown[name] != value:
            text = text.replace(value, shown[name])
    first_line = next(line.strip() for line in text.splitlines() if line.strip())
    variables = ", ".join(f"{name}={value!r}" for name, value in shown.items())
    return RequestError(
        f"a library cannot be loaded with {variables}: {plain(first_line)}",
        hint=f"unset {' '.join(named)}, or set a value that it accepts",
    )


@contextmanager
def interruptible() -> Iterator[None]:
    """Turn Ctrl-C into an error with a message, before Typer exits without one.

    A request to end (SIGTERM: `kill`, a container that stops, a job that is out of time; see `core.signals`) counts as
    Ctrl-C. The argument of `KeyboardInterrupt`, if there is one, says how to continue.
    Raises InterruptError if Ctrl-C was pressed.
    """
    with _watching() as was_pressed, requests_as_interrupts():
        try:
            yield
        except KeyboardInterrupt as stop:
            raise InterruptError("interrupted", hint=str(stop.args[0]) if stop.args else None) from stop
        except Exception as error:
            # A compiled module whose import is interrupted raises another error.
            if was_pressed():
                notes = getattr(error, "__notes__", None)
                raise InterruptError("interrupted", hint="\n".join(notes) if notes else None) from error
            raise


@contextmanager
def _watching() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether Ctrl-C was pressed inside the block; a finalizer cannot swallow it.

    Nothing is watched outside of the main thread, which alone may set handlers, and if Ctrl-C is ignored (nohup).
    """
    handler, hook = signal.getsignal(signal.SIGINT), sys.unraisablehook
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield lambda: False
        return
    pressed = was_swallowed = False
    last = -REPEAT_S
    timers: list[threading.Timer] = []

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal pressed, was_swallowed, last
        before, last = last, time.monotonic()
        if last - before < REPEAT_S and not was_swallowed:
            return  # sent twice: the first one is being handled
        pressed, was_swallowed = True, False
        signal.default_int_handler(number, frame)

    def press_again(ignored: "sys.UnraisableHookArgs") -> None:
        # Python drops exceptions of finalizers and of this hook, so Ctrl-C is sent again a moment later.
        nonlocal was_swallowed
        if ignored.exc_type is KeyboardInterrupt:
            was_swallowed = True
            timers.append(threading.Timer(_MOMENT_S, _press))
            timers[-1].start()
        else:
            hook(ignored)

    signal.signal(signal.SIGINT, note)
    sys.unraisablehook = press_again
    try:
        yield lambda: pressed
    finally:
        for timer in timers:
            timer.cancel()
        sys.unraisablehook = hook
        signal.signal(signal.SIGINT, handler)


def _press() -> None:
    """Send Ctrl-C to the main thread."""
    main = threading.main_thread().ident
    if sys.platform == "win32" or main is None:
        _thread.interrupt_main()
    else:
        # A real signal also ends a wait of the main thread.
        signal.pthread_kill(main, signal.SIGINT)


def run(command: Callable[[], object]) -> int:
    """Run `command`, which returns an exit code or anything else for success, and return the program's exit code.

    Errors that a user can act on are printed in a few lines on stderr. Any other error is a bug: it is raised, so that
    Python prints the traceback and exits with 1. A rank sends its message to the launcher, which prints it once.
    """
    context = _context()
    with ExitStack() as stack:
        try:
            if context is not None:
                stack.enter_context(rank_link.linked(context))
        except OsoraError as error:
            output.print_failure((error.message,), hint=error.hint)
            return error.exit_code
        try:
            return _run(command, context)
        except KeyboardInterrupt:  # outside of `interruptible`, such as while an error is reported
            if not rank_link.report_failure("interrupted", hint=None, exit_code=INTERRUPTED):
                output.print_failure(("interrupted",))
            return INTERRUPTED


def _run(command: Callable[[], object], context: RankContext | None) -> int:
    try:
        code = command()
    except Exception as error:
        failure = explain_failure(error)
        if failure is None:
            if rank_link.report_bug(error):
                return OsoraError.exit_code
            if context is not None and rank_link.is_loss(error):
                where = f"rank {context.rank} on {socket.gethostname()}, in the stage {rank_link.current_stage()}"
                output.print_failure(
                    (f"{where}: lost the others",), hint="the rank that ended first printed the reason"
                )
                return HardwareError.exit_code
            raise
        message = "\n".join(failure.lines)
        if not rank_link.report_failure(message, hint=failure.hint, exit_code=failure.exit_code):
            output.print_failure(failure.lines, hint=failure.hint)
        return failure.exit_code
    if code == INTERRUPTED:  # by Typer, while a command line is parsed or help is printed
        raise KeyboardInterrupt
    if code == OsoraError.exit_code:  # by Typer, for a shell without completion
        hint = "run it from bash, zsh, fish or PowerShell"
        output.print_failure(("no shell was found that can complete commands",), hint=hint)
        return HardwareError.exit_code
    return code if isinstance(code, int) else 0


def _context() -> RankContext | None:
    try:
        return find_context(os.environ)
    except RequestError:
        # The commands that need these variables report half-set ones.
        return None


def explain_failure(error: Exception) -> Failure | None:
    """Return the message and exit code for `error`; None for a bug."""
    from pydantic import ValidationError

    from opensora_cli.settings.explain import explain

    match error:
        case OsoraError():
            return Failure(tuple(error.message.split("\n")), error.exit_code, error.hint)
        case ValidationError():
            return Failure(tuple(explain(error)), RequestError.exit_code)
        case _UsageError():
            return Failure((_usage_line(error),), RequestError.exit_code, _usage_hint(error))
        case _ if is_lack_of_memory(error):
            reason = plain(" ".join(str(error).split()))
            return Failure((f"there is not enough memory: {reason}".removesuffix(": "),), HardwareError.exit_code)
        case OSError() if (refused := refused_by_system(error)) is not None:
            return Failure((refused.message,), refused.exit_code)
        case typer.Abort():
            return Failure(("interrupted",), INTERRUPTED)
        case _:
            return None


def _usage_line(error: Exception) -> str:
    if hasattr(error, "possibilities"):
        option = getattr(error, "option_name", "")
        if option in REMOVED:
            return f"no such option: {option}. Use {REMOVED[option]}"
        # The nearest option comes first; Typer's own message sorts them by name.
        likely = [*_named_by_reference(error, option), *(error.possibilities or ())]
        if likely:
            return f"no such option: {option}. Did you mean {likely[0]}?"
    describe: Callable[[], str] = getattr(error, "format_message", error.__str__)
    return describe().replace("Value error, ", "")


def _named_by_reference(error: Exception, option: str) -> list[str]:
    """Return the option of the command for an option of the reference's scripts, if there is one."""
    ours = OF_REFERENCE.get(option.lstrip("-").replace("-", "_"))
    parameters = getattr(getattr(getattr(error, "ctx", None), "command", None), "params", ())
    return [ours] if ours is not None and any(ours in parameter.opts for parameter in parameters) else []


def _usage_hint(error: Exception) -> str:
    path = getattr(getattr(error, "ctx", None), "command_path", "osora")
    option = getattr(error, "option_name", "")
    advice = ""
    if "unexpected extra argument" in str(error):
        advice = "quote a text with blanks in it, or "
    elif option.startswith("-") and not option.startswith("--"):
        advice = "put a text that begins with - after --, at the end, or "
    return f"{advice}see {path} --help"
