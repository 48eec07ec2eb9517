"""The program itself: `osora`, and `python -m opensora_cli`."""

# Nothing else: until Ctrl-C has its handler, it prints the traceback of an import.
import os
import signal
import sys


def main() -> int:
    """Run the command line and return its exit code; Ctrl-C prints one line from the first import on.

    Compiled modules that are interrupted while they are imported fail in ways of their own. Until all are there,
    nothing has been begun that would have to be left in order.
    """
    # For the Python processes that libraries start: the working folder is no place to import from.
    os.environ["PYTHONSAFEPATH"] = "1"
    before = signal.getsignal(signal.SIGINT)
    try:
        if callable(before):
            signal.signal(signal.SIGINT, lambda number, frame: _leave())
    except ValueError:  # not the main thread, which alone gets signals
        before = None
    from opensora_cli.cli.app import main as run

    try:
        if callable(before):
            signal.signal(signal.SIGINT, before)
        code = run()
        if callable(before):
            # What Python does at its end would print tracebacks.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        return code
    except KeyboardInterrupt:  # before a command has begun, or after it has ended
        return _leave()


def _leave() -> int:
    try:
        os.write(2, b"error: interrupted\n")
    finally:  # closed, or full: that changes no exit code
        os._exit(130)


if __name__ == "__main__":
    sys.exit(main())
