"""A process that has imported all of osora, and forks once for each command line that it is asked to run.

It stays without threads, so that what it forks is whole. Started by `hostile.sandbox`, to which it answers one line of
JSON for each line that it reads. See `hostile.confined` for what a forked child may do.
"""

import atexit
import gc
import importlib
import json
import os
import pkgutil
import select
import signal
import sys
import threading
import time
import traceback
import weakref
from contextlib import suppress
from pathlib import Path
from socket import socket, socketpair
from typing import IO, Any

import psutil
from hostile import confined, failing_calls
from PIL import Image

_IMPORTED_LATE = ("matplotlib.figure", "matplotlib.backends.backend_agg", "matplotlib.backends.backend_svg")
"""Modules that commands import when they need them."""
_ABORTED_S = 2.0
"""Until a child that hangs has printed where."""

_waiting: dict[str, tuple[int, IO[str]]] = {}
"""Commands that wait before their first call that changes a file, by folder: their processes, and lines to and from."""


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    confined.adopt_orphans()
    confined.die_with_parent()
    try:
        if os.geteuid() == 0:
            confined.own_mounts()
            confined.open_to_others([Path(each) for each in sys.argv[1:]])
    except OSError as error:
        print(error, file=sys.stderr)
        sys.exit(confined.NOT_POSSIBLE)
    _import_everything()
    # Until a command begins in it, a forked process ends by SIGINT without a word.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    for line in sys.stdin:
        answers.write(json.dumps(_run(json.loads(line))) + "\n")
        answers.flush()


def _import_everything() -> None:
    import opensora_cli

    for module in pkgutil.walk_packages(opensora_cli.__path__, "opensora_cli."):
        if not module.name.endswith(("__main__", "_worker")):
            importlib.import_module(module.name)
    for name in _IMPORTED_LATE:
        with suppress(ImportError):
            importlib.import_module(name)
    Image.init()
    # With its first model, transformers compiles a thousand patterns: a fifth of the time of a small generation.
    with suppress(ImportError, AttributeError):
        importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("t5")


def _forget_finalizers() -> None:
    """Leave what libraries undo of their import at the end of Python to the end of this process.

    In each child that would take as long as all else of a short command.
    """
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]  # no public list
        finalizer.atexit = False
    # At exit, torch._dynamo imports more modules, which fails where no file can be opened.
    if (dynamo := sys.modules.get("torch._dynamo.utils")) is not None:
        atexit.unregister(dynamo.dump_compile_times)


def _run(request: dict[str, Any]) -> dict[str, Any]:
    if request["calls"]:
        return _ask_waiting(request)
    child = _fork()
    if not child:
        _become(request)
    return _supervise(child, request)


def _fork() -> int:
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise RuntimeError(f"the process has {threads} threads: what it forks may hang")
    gc.collect()
    gc.freeze()
    _forget_finalizers()
    return os.fork()


def _ask_waiting(request: dict[str, Any]) -> Any:
    """Have a command go on that waits before its first call that changes a file."""
    if request["folder"] not in _waiting:
        ours, its = socketpair()
        child = _fork()
        if not child:
            failing_calls.hold(request["folder"], lambda: _wait_for_requests(its))
            _become(request)
        its.close()
        _waiting[request["folder"]] = child, ours.makefile("rw")
    _, lines = _waiting[request["folder"]]
    lines.write(json.dumps(request) + "\n")
    lines.flush()
    return json.loads(lines.readline())


def _wait_for_requests(connection: socket) -> None:
    """Fork this command for each request, and return in what is forked, with calls that fail."""
    confined.adopt_orphans()
    _waiting.clear()  # of another process
    with connection.makefile("rw") as lines:
        for line in lines:
            request = json.loads(line)
            child = _fork()
            if not child:
                os.setsid()
                confined.die_with_parent()
                for output in (1, 2):
                    os.ftruncate(output, 0)
                    os.lseek(output, 0, os.SEEK_SET)
                os.chdir(request["cwd"])
                failing_calls.arm(*request["calls"])
                return
            lines.write(json.dumps(_supervise(child, request)) + "\n")
            lines.flush()
    os._exit(0)


def _supervise(child: int, request: dict[str, Any]) -> dict[str, Any]:
    begun = time.monotonic()
    hung = not _wait(child, begun=begun, signals=request["signals"], limit_s=request["limit_s"])
    if hung:
        os.kill(child, signal.SIGABRT)
        if not _ended(child, _ABORTED_S):
            os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return {
        "code": os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
        "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
        "hung": hung,
        "seconds": time.monotonic() - begun,
        "left_processes": _end_left_over(request["grace_s"]),
    }


def _wait(child: int, *, begun: float, signals: list[tuple[float, int]], limit_s: float) -> bool:
    """Wait for the end of the child, and send it signals meanwhile; False if it takes too long."""
    for at_s, number in sorted(signals):
        if _ended(child, begun + at_s - time.monotonic()):
            return True
        os.kill(child, number)
    return _ended(child, begun + limit_s - time.monotonic())


def _ended(child: int, within_s: float) -> bool:
    pidfd = os.pidfd_open(child)
    try:
        ready, _, _ = select.select([pidfd], [], [], max(within_s, 0))
    finally:
        os.close(pidfd)
    return bool(ready)


def _end_left_over(grace_s: float) -> list[str]:
    """Return the command lines of processes that outlive the command by `grace_s`, which are killed."""
    own = psutil.Process()
    left: list[str] = []
    waiting = {psutil.Process(pid) for pid, _ in _waiting.values()}
    orphans = set(own.children(recursive=True)) - waiting
    if orphans:
        _, alive = psutil.wait_procs(orphans, timeout=grace_s)
        alive = list({*alive, *own.children(recursive=True)} - waiting)
        for each in alive:
            try:
                left.append(" ".join(each.cmdline()))
                each.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(alive, timeout=10)
    return left


def _become(request: dict[str, Any]) -> None:
    """Run the command in this forked child, which never returns."""
    code = 1
    try:
        os.setsid()
        for name, number in (("stdout", 1), ("stderr", 2)):
            file = _output(request[name])
            os.dup2(file, number)
            os.close(file)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.clear()
        os.environ.update(request["environment"])
        confined.confine(Path(request["folder"]), uid=request["uid"], limits=request["limits"])
        os.chdir(request["cwd"])
        code = _osora(request["argv"], request["patch"])
    except BaseException:
        traceback.print_exc()
    finally:
        code = _finish(code)
        os._exit(code)


def _output(path: str) -> int:
    """Open what takes the output: a file, or with the name `pipe` a pipe that nobody reads."""
    if path != "pipe":
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    reading, writing = os.pipe()
    os.close(reading)
    return writing


def _osora(argv: list[str], patch: str | None) -> int:
    import faulthandler
    import tempfile

    from opensora_cli.__main__ import main as osora

    sys.stdin = os.fdopen(0)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", errors="strict")
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1)
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr
    faulthandler.enable()
    tempfile.tempdir = None
    sys.argv = ["osora", *argv]
    if patch:
        module, _, function = patch.partition(":")
        getattr(importlib.import_module(module), function)()
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return osora()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1


def _finish(code: int) -> int:
    try:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
        return 1
    return code


if __name__ == "__main__":
    main()
