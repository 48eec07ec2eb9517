"""Error messages for runs of several ranks that fail."""

import signal
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path

from opensora_cli.core.exceptions import HardwareError, OsoraError
from opensora_cli.core.formatting import plain
from opensora_cli.core.rank_link import INTERRUPTED
from opensora_cli.engine.launch.process import RankProcess

_CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSYS, signal.SIGTRAP}
_HINTS: dict[int, str] = {
    signal.SIGKILL: "if no user killed it, the system did for lack of memory: see the system's log (dmesg)",
    signal.SIGBUS: "a file that it read was truncated, or /dev/shm is full",
}
_OUT_OF_MEMORY_HINT = "use fewer --gpus on this machine, stronger --offload, or a smaller --res"
_HUNG_HINT = "its log shows where it hangs; osora bench-comm shows whether the links are good"
_KINDS = ("signal", "stopped", "error", "bug", "exit", "interrupted", "behind", "silent", "abort", "lost")
"""Kinds of failures; a kind is more likely the origin of all failures than those after it.

A rank that dies ends its peers: their connections are closed, and NCCL's watchdog then aborts them.
"""


class RankFailure(OsoraError):
    """A rank failed, and so the run ends; the message names rank, host, stage, cause and log file."""

    def __init__(self, message: str, *, hint: str | None, exit_code: int, kind: str = "exit") -> None:
        super().__init__(message, hint=hint)
        self.exit_code, self.kind = exit_code, kind

    @property
    def is_reported(self) -> bool:
        """Whether the rank raised an error. Otherwise it was killed, crashed, hung or lost the others."""
        return self.kind in ("error", "bug")

    @property
    def may_follow(self) -> bool:
        """Whether to wait for more failures: this may follow from another, or others may report the same error."""
        return self.kind in ("error", "silent", "abort", "lost")

    def rename(self, folder: Path, kept: Path) -> bool:
        """Replace the path of a folder in the texts, and return whether one has it."""
        before = self.message, self.hint
        self.message = self.message.replace(str(folder), str(kept))
        self.hint = self.hint and self.hint.replace(str(folder), str(kept))
        return before != (self.message, self.hint)


def origin(found: Iterable[RankFailure]) -> RankFailure:
    """Return the failure that explains the others."""
    return min(found, key=lambda failure: _KINDS.index(failure.kind))


def ended(process: RankProcess, code: int, *, out_of_memory: bool) -> RankFailure:
    """Return the failure of a rank that ended with `code`, which is not 0, and negative for a signal.

    `out_of_memory` tells whether the system has killed processes for lack of memory during the run.
    """
    report = process.report
    if report is None and code < 0:
        return _killed(process, -code, out_of_memory=out_of_memory)
    if report is None:
        last = process.last_line()
        cause = f"ended with exit code {code}" + (f": {plain(last)}" if last else "")
        return _failure(process, "exit", cause, exit_code=code)
    if report.kind == "error":
        # The message stays as reported because a user can fix it.
        hint = "\n".join(filter(None, [report.hint, f"reported by {_where(process)}", f"log: {process.log}"]))
        return RankFailure(report.message, hint=hint, exit_code=report.exit_code, kind="error")
    if report.kind == "interrupted":
        return _failure(process, "interrupted", "interrupted", hint=report.hint, exit_code=INTERRUPTED)
    cause = f"lost the others: {report.message}" if report.kind == "lost" else report.message
    return _failure(process, report.kind, cause, hint=report.hint, exit_code=report.exit_code)


def stopped(process: RankProcess) -> RankFailure:
    """Return the failure of a stopped rank."""
    return _failure(process, "stopped", f"stopped (SIGSTOP), no sign of life for {process.stopped_s:.0f} s")


def hung(processes: Iterable[RankProcess]) -> RankFailure:
    """Return the failure of running ranks without progress.

    It names the rank behind, preferably a stopped one, then one that does not wait.
    """
    order = sorted(processes, key=lambda each: (each.state.waits, each.state.moves, each.rank))
    for process in order:
        if process.is_stopped():
            return stopped(process)
    process = order[0]
    cause = f"no progress for {process.still_s if process.is_late else process.idle_s:.0f} s"
    if process.state.waits:
        return _failure(process, "silent", f"{cause}, it waits for other ranks", hint=_HUNG_HINT)
    return _failure(process, "behind", cause, hint=_HUNG_HINT)


def shared_error(processes: Sequence[RankProcess]) -> RankFailure | None:
    """Return the user's error if all ranks report the same one, else None. It names no rank and no log."""
    report = processes[0].report
    if report is None or report.kind != "error" or any(process.report != report for process in processes):
        return None
    return RankFailure(report.message, hint=report.hint, exit_code=report.exit_code, kind="error")


def count_memory_kills() -> int:
    """Return the number of processes killed for lack of memory since the system started; 0 if unknown."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def _killed(process: RankProcess, number: int, *, out_of_memory: bool) -> RankFailure:
    try:
        name = signal.Signals(number).name
    except ValueError:  # a real-time signal
        name = f"signal {number}"
    is_crash, hint = number in _CRASHES, _HINTS.get(number)
    cause = f"{'crashed' if is_crash else 'killed'} ({name})"
    if number == signal.SIGKILL and out_of_memory:
        cause, hint = f"out of memory: the system killed it ({name})", _OUT_OF_MEMORY_HINT
    exit_code = OsoraError.exit_code if is_crash else HardwareError.exit_code
    return _failure(process, "abort" if number == signal.SIGABRT else "signal", cause, hint=hint, exit_code=exit_code)


def _failure(
    process: RankProcess, kind: str, cause: str, *, hint: str | None = None, exit_code: int = HardwareError.exit_code
) -> RankFailure:
    hint = "\n".join(filter(None, [hint, f"log: {process.log}"]))
    return RankFailure(f"{_where(process)}: {cause}", hint=hint, exit_code=exit_code, kind=kind)


def _where(process: RankProcess) -> str:
    return f"rank {process.rank} on {socket.gethostname()}, in the stage {process.state.stage}"
