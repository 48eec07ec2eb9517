"""Error messages for runs of several ranks that fail."""

import signal
import socket
from collections.abc import Iterable
from dataclasses import dataclass
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


class RankFailure(OsoraError):
    """A rank failed, and so the run ends; the message names rank, host, stage, cause and log file."""

    def __init__(self, message: str, *, hint: str | None, exit_code: int, is_reported: bool = False) -> None:
        super().__init__(message, hint=hint)
        self.exit_code = exit_code
        self.is_reported = is_reported
        """Whether the rank raised an error. Otherwise it was killed, crashed, hung or lost the others."""

    def rename(self, folder: Path, kept: Path) -> bool:
        """Replace the path of a folder in the texts, and return whether one has it."""
        before = self.message, self.hint
        self.message = self.message.replace(str(folder), str(kept))
        self.hint = self.hint and self.hint.replace(str(folder), str(kept))
        return before != (self.message, self.hint)


@dataclass(frozen=True, slots=True)
class Cause:
    """Failure of one rank. The cause with the smallest `weight` is most likely the origin of all failures."""

    weight: int
    rank: int
    failure: RankFailure

    @property
    def may_follow(self) -> bool:
        """Whether to wait for more causes: this one may follow from another, or others may report the same error."""
        return self.weight >= _WEIGHTS["silent"] or self.weight == _WEIGHTS["error"]


# A rank that dies ends its peers: their connections are closed, and NCCL's watchdog then aborts them.
_WEIGHTS = {
    "signal": 0,
    "stopped": 1,
    "error": 2,
    "bug": 3,
    "exit": 3,
    "interrupted": 4,
    "behind": 5,
    "silent": 6,
    "abort": 7,
    "lost": 8,
}


def origin(causes: Iterable[Cause]) -> Cause:
    """Return the cause that explains the others."""
    return min(causes, key=lambda cause: (cause.weight, cause.rank))


def ended(process: RankProcess, code: int, *, out_of_memory: bool) -> Cause:
    """Return the cause for a rank that ended with `code`, which is not 0, and negative for a signal.

    `out_of_memory` tells whether the system has killed processes for lack of memory during the run.
    """
    report = process.report
    if code < 0 and report is None:
        return _killed(process, -code, out_of_memory=out_of_memory)
    if report is None:
        last = process.last_line()
        cause = f"ended with exit code {code}" + (f": {plain(last)}" if last else "")
        return _cause(process, "exit", cause, hint=None, exit_code=code)
    if report.kind == "error":
        # The message stays as reported because a user can fix it.
        hint = "\n".join(filter(None, [report.hint, f"reported by {_where(process)}", f"log: {process.log}"]))
        failure = RankFailure(report.message, hint=hint, exit_code=report.exit_code, is_reported=True)
        return Cause(_WEIGHTS["error"], process.rank, failure)
    if report.kind == "interrupted":
        return _cause(process, "interrupted", "interrupted", hint=report.hint, exit_code=INTERRUPTED)
    cause = f"lost the others: {report.message}" if report.kind == "lost" else report.message
    return _cause(process, report.kind, cause, hint=report.hint, exit_code=report.exit_code)


def stopped(process: RankProcess) -> Cause:
    """Return the cause for a stopped rank."""
    cause = f"stopped (SIGSTOP), no sign of life for {process.stopped_s:.0f} s"
    return _cause(process, "stopped", cause, hint=None, exit_code=HardwareError.exit_code)


def hung(processes: Iterable[RankProcess]) -> Cause:
    """Return the cause for running ranks without progress.

    It names the rank behind, preferably a stopped one, then one that does not wait.
    """
    order = {process: (process.state.waits, process.state.moves, process.rank) for process in processes}
    if stopped_ones := [process for process in order if process.is_stopped()]:
        return stopped(min(stopped_ones, key=order.__getitem__))
    process = min(order, key=order.__getitem__)
    cause = f"no progress for {process.still_s if process.is_late else process.idle_s:.0f} s"
    if process.state.waits:
        cause += ", it waits for other ranks"
    kind = "silent" if process.state.waits else "behind"
    return _cause(process, kind, cause, hint=_HUNG_HINT, exit_code=HardwareError.exit_code)


def shared_error(processes: Iterable[RankProcess]) -> RankFailure | None:
    """Return the user's error if all ranks report the same one, else None. It names no rank and no log."""
    reports = {process.report for process in processes}
    report = reports.pop()
    if reports or report is None or report.kind != "error":
        return None
    return RankFailure(report.message, hint=report.hint, exit_code=report.exit_code, is_reported=True)


def count_memory_kills() -> int:
    """Return the number of processes killed for lack of memory since the system started; 0 if unknown."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def _killed(process: RankProcess, number: int, *, out_of_memory: bool) -> Cause:
    try:
        name = signal.Signals(number).name
    except ValueError:  # a real-time signal
        name = f"signal {number}"
    cause, hint = f"{'crashed' if number in _CRASHES else 'killed'} ({name})", _HINTS.get(number)
    if number == signal.SIGKILL and out_of_memory:
        cause, hint = f"out of memory: the system killed it ({name})", _OUT_OF_MEMORY_HINT
    exit_code = OsoraError.exit_code if number in _CRASHES else HardwareError.exit_code
    kind = "abort" if number == signal.SIGABRT else "signal"
    return _cause(process, kind, cause, hint=hint, exit_code=exit_code)


def _cause(process: RankProcess, kind: str, cause: str, *, hint: str | None, exit_code: int) -> Cause:
    hint = "\n".join(filter(None, [hint, f"log: {process.log}"]))
    failure = RankFailure(f"{_where(process)}: {cause}", hint=hint, exit_code=exit_code, is_reported=kind == "bug")
    return Cause(_WEIGHTS[kind], process.rank, failure)


def _where(process: RankProcess) -> str:
    return f"rank {process.rank} on {socket.gethostname()}, in the stage {process.state.stage}"
