"""From an exception to a message and an exit code: the one place that knows both."""

import _thread
import gc
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
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

_OF_LIBRARIES = ("TORCH", "PYTORCH", "HF_", "HUGGINGFACE_", "TRANSFORMERS_")
"""How the variables begin that libraries read while they are imported."""

# Typer brings its own Click and exposes only this subclass of the error that a command line does not parse.
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
    """How a command ends when it did not succeed: what is wrong, one problem a line, and how to fix it.

    Exit codes: 2 a bad request, 3 a bad or missing file, 4 this machine cannot do it, 130 interrupted.
    """

    lines: tuple[str, ...]
    exit_code: int
    hint: str | None = None


class InterruptError(OsoraError):
    """Ctrl-C, with what is left to do."""

    exit_code = INTERRUPTED


@contextmanager
def _uncollected() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def uninterrupted() -> Iterator[None]:
    """For the import of torch and what needs it: interrupted, that can abort the program.

    What torch brings stays: the collector of garbage is off meanwhile, and never looks at it, which takes a tenth of a
    second each time. What libraries log from then on is escaped.

    Raises RequestError if a library refuses an environment variable meanwhile.
    """
    is_first = "torch" not in sys.modules
    escape_foreign_logs()
    with held_back(), _uncollected() if is_first else nullcontext():
        try:
            yield
        except (ValueError, RuntimeError) as error:
            text = str(error)
            named = {
                name: value
                for name, value in sorted(os.environ.items())
                if name.startswith(_OF_LIBRARIES) and (name in text or repr(value) in text)
            }
            if not named:
                raise
            from opensora_cli.core.redaction import shown_value

            shown = {name: shown_value(name, value) for name, value in named.items()}
            for name, value in named.items():
                if value and shown[name] != value:
                    text = text.replace(value, shown[name])
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            variables = ", ".join(f"{name}={value!r}" for name, value in shown.items())
            raise RequestError(
                f"a library cannot be loaded with {variables}: {plain(lines[0])}",
                hint=f"unset {' '.join(named)}, or set what it takes",
            ) from error


@contextmanager
def interruptible() -> Iterator[None]:
    """Turn Ctrl-C into an error with a message, before Typer makes a bare exit of it.

    A request to end (SIGTERM: `kill`, a container that stops, a job whose time is up; see `core.signals`) counts as
    Ctrl-C, and leaves as little behind. The engine may hand in lines on how to go on, as the argument of
    `KeyboardInterrupt`.
    Raises InterruptError if Ctrl-C was pressed.
    """
    with _watching() as was_pressed, requests_as_interrupts():
        try:
            yield
        except KeyboardInterrupt as stop:
            raise InterruptError("interrupted", hint=str(stop.args[0]) if stop.args else None) from stop
        except Exception as error:
            # Compiled modules that are interrupted while they are imported blame something else.
            if was_pressed():
                left = getattr(error, "__notes__", None)
                raise InterruptError("interrupted", hint="\n".join(left) if left else None) from error
            raise


@contextmanager
def _watching() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether Ctrl-C was pressed inside the block, and let no finaliser swallow it."""
    pressed = was_swallowed = False
    last = -REPEAT_S
    again: list[threading.Timer] = []

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal pressed, was_swallowed, last
        before, last = last, time.monotonic()
        if last - before < REPEAT_S and not was_swallowed:
            return  # sent twice, and the first one is on its way up
        pressed, was_swallowed = True, False
        signal.default_int_handler(number, frame)

    def press_again(ignored: "sys.UnraisableHookArgs") -> None:
        # Python drops what is raised in a finaliser, and in this hook too: so a moment later.
        nonlocal was_swallowed
        if ignored.exc_type is KeyboardInterrupt:
            was_swallowed = True
            again.append(threading.Timer(_MOMENT_S, _press))
            again[-1].start()
        else:
            hook(ignored)

    hook = sys.unraisablehook
    with _handler(note) as is_set:
        if is_set:
            sys.unraisablehook = press_again
        try:
            yield lambda: pressed
        finally:
            for timer in again:
                timer.cancel()
            sys.unraisablehook = hook


@contextmanager
def _handler(handle: Callable[[int, FrameType | None], None]) -> Iterator[bool]:
    """Let `handle` take Ctrl-C inside the block; yields whether it does.

    It does not outside of the main thread, which alone may set handlers, nor where Ctrl-C is ignored (nohup).
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield False
        return
    signal.signal(signal.SIGINT, handle)
    try:
        yield True
    finally:
        signal.signal(signal.SIGINT, before)


def _press() -> None:
    """Do what the keyboard does, from another thread."""
    main = threading.main_thread().ident
    if sys.platform == "win32" or main is None:
        _thread.interrupt_main()
    else:
        # A real signal also ends what the main thread waits for.
        signal.pthread_kill(main, signal.SIGINT)


def run(command: Callable[[], object]) -> int:
    """Run `command` and return the exit code of the program.

    Errors that a user can act on are printed in a few lines on stderr. Any other is a bug: it is raised, so that Python
    prints the traceback and exits with 1.

    Where this process is one of several ranks, the launcher that started it gets the message and prints it once.
    `command` returns an exit code, or anything else for success.
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
        except KeyboardInterrupt:  # where no block is `interruptible`, such as while an error is reported
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
                output.print_failure((_lost(context.rank),), hint="the rank that ended first printed the reason")
                return HardwareError.exit_code
            raise
        message = "\n".join(failure.lines)
        if not rank_link.report_failure(message, hint=failure.hint, exit_code=failure.exit_code):
            output.print_failure(failure.lines, hint=failure.hint)
        return failure.exit_code
    if code == INTERRUPTED:  # Typer's own, of a command line that was being read, or help that was being printed
        raise KeyboardInterrupt
    if code == OsoraError.exit_code:  # Typer's own, of a shell that it cannot complete for
        hint = "run it from bash, zsh, fish or PowerShell"
        output.print_failure(("no shell was found above this process that can complete commands",), hint=hint)
        return HardwareError.exit_code
    return code if isinstance(code, int) else 0


def _lost(rank: int) -> str:
    """Return the message of a rank without a launcher whose collective failed since another rank ended."""
    where = f"rank {rank} on {socket.gethostname()}, in the stage {rank_link.current_stage()}"
    return f"{where}: lost the others"


def _context() -> RankContext | None:
    try:
        return find_context(os.environ)
    except RequestError:
        # The commands that need these variables report half-set ones.
        return None


def explain_failure(error: Exception) -> Failure | None:
    """Return the message and exit code for `error`, or None where it is a bug."""
    # pydantic takes long to import, and without it there is nothing of its to catch.
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
        # Best first here; Typer's own message sorts them by name.
        likely = [*_named_by_reference(error, option), *(error.possibilities or ())]
        if likely:
            return f"no such option: {option}. Did you mean {likely[0]}?"
    describe: Callable[[], str] = getattr(error, "format_message", error.__str__)
    return describe().replace("Value error, ", "")


def _named_by_reference(error: Exception, option: str) -> list[str]:
    """Return what the command has for an option of the reference implementation's scripts, if it is one."""
    ours = OF_REFERENCE.get(option.lstrip("-").replace("-", "_"))
    parameters = getattr(getattr(getattr(error, "ctx", None), "command", None), "params", ())
    return [ours] if ours is not None and any(ours in parameter.opts for parameter in parameters) else []


def _usage_hint(error: Exception) -> str:
    path = getattr(getattr(error, "ctx", None), "command_path", "osora")
    option = getattr(error, "option_name", "")
    advice = ""
    if "unexpected extra argument" in str(error):
        advice = "quote a text that has blanks in it, or "
    elif option.startswith("-") and not option.startswith("--"):
        advice = "put a text that begins with - last, after --, or "
    return f"{advice}see {path} --help"
