"""Starts the ranks of a run on this machine, watches them, and ends them all when one fails.

A rank gets the environment that torchrun gives, so that `--gpus 2` and `torchrun -m opensora_cli` are the same to it.
The agent of torchrun itself is not used, since it is in the way of what is promised here. It only sees ranks that exit,
not those that stop; after a failure it waits 30 s, a number written into it, for a stopped rank to take SIGTERM; it
says nothing to the agents of other machines; it leaves ranks behind when it is killed; and it shows a rank's output by
reading its log file, where no bar can be drawn.
"""

import os
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from opensora_cli.core.exceptions import OutputError
from opensora_cli.core.rank_link import INTERRUPTED
from opensora_cli.engine.launch import failures
from opensora_cli.engine.launch.failures import Cause, RankFailure
from opensora_cli.engine.launch.meeting import Meeting, Neighbours, meet
from opensora_cli.engine.launch.process import RankProcess
from opensora_cli.engine.launch.request import LaunchRequest

COMMAND = (sys.executable, "-m", "opensora_cli")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How often the launcher looks, and how long it waits; all in seconds.

    From the moment a rank stops, the run takes `frozen_s`, `interrupt_s` and `terminate_s` to end, and at most four
    seconds more where it has several machines.
    """

    look_s: float = 0.1
    frozen_s: float = 10.0
    """Without a sign of life, after which a stopped rank, or a machine, counts as frozen."""
    starved_s: float = 60.0
    """The same for a rank that is not stopped: it may be waiting for a disk, or for its turn on a busy machine."""
    settle_s: float = 2.0
    """For the origin to show, when a rank says only what may follow from it."""
    interrupt_s: float = 4.0
    """For the ranks to end by themselves when they are asked to."""
    terminate_s: float = 1.0
    """The same, the second time; then they are killed."""
    finish_s: float = 0.0
    """More time for the first of these after Ctrl-C, to save what is finished."""
    follow_s: float = 60.0
    """Of that time, how much the others have once one rank has ended."""
    meet_s: float = 300.0
    """For the launchers of all machines to come."""


def launch(
    request: LaunchRequest, arguments: Sequence[str], *, command: Sequence[str] = COMMAND, pace: Pace | None = None
) -> None:
    """Run `osora` with `arguments` on all ranks of `request`, and return when all are done.

    Rank 0 prints; the others write to their log files. However this function ends, no rank is left. Signals are the
    caller's: what is raised while it waits, as Ctrl-C does, ends the ranks.

    Args:
        request: how many ranks, and where.
        arguments: of the command line, as each rank gets them.
        command: what gets them.
        pace: times of the launcher; None: the usual.

    Raises:
        RequestError: the request contradicts itself or that of another machine.
        HardwareError: there are fewer cards, or the machines cannot meet.
        OutputError: the log files cannot be written.
        RankFailure: a rank failed; its exit code is that of the rank's error.
        KeyboardInterrupt: its argument says what is kept, or why that went wrong.
    """
    pace = pace or Pace()
    request.check()
    try:
        request.log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot make the folder of log files {request.log_dir}: {error.strerror}") from error
    meeting = meet(request, wait_s=pace.meet_s)
    neighbours = Neighbours(meeting, lost_s=pace.frozen_s, interval_s=min(1.0, pace.frozen_s / 4))
    with _Run(pace) as run, neighbours.watched():
        try:
            run.start(request, meeting, [*command, *arguments])
            failure = run.first_failure(neighbours)
        except KeyboardInterrupt:
            where = f" at machine {request.node_rank}" if request.nnodes > 1 else ""
            neighbours.tell(RankFailure(f"interrupted{where}", hint=None, exit_code=INTERRUPTED))
            run.end(finish_s=pace.finish_s)
            raise KeyboardInterrupt(*(run.kept() or run.failed())) from None
        if failure is not None:
            neighbours.tell(failure)
            is_interrupted = failure.exit_code == INTERRUPTED
            run.end(finish_s=pace.finish_s if is_interrupted else 0.0)
            hints = [failure.hint] if failure.hint else []
            hints += run.kept() or (run.failed() if is_interrupted else [])
            raise RankFailure(failure.message, hint="\n".join(hints) or None, exit_code=failure.exit_code)


@contextmanager
def log_folder(name: str) -> Iterator[Path]:
    """Yield a new folder for log files, which is kept only if a failure's message names it.

    Raises:
        OutputError: it cannot be made.
    """
    folder = Path(tempfile.gettempdir(), f"osora-{name}-{secrets.token_hex(4)}")
    try:
        folder.mkdir()
    except OSError as error:
        raise OutputError(f"cannot make the folder of log files {folder}: {error.strerror}") from error
    is_named = False
    try:
        yield folder
    except RankFailure as failure:
        is_named = str(folder) in f"{failure.message}{failure.hint}"
        raise
    finally:
        if not is_named:
            shutil.rmtree(folder, ignore_errors=True)


class _Run:
    """The ranks of this machine."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._ranks: list[RankProcess] = []
        self._memory_kills = failures.count_memory_kills()

    def __enter__(self) -> "_Run":
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self._ranks:
            rank.kill()
            rank.close()

    def start(self, request: LaunchRequest, meeting: Meeting, command: Sequence[str]) -> None:
        """Start all ranks."""
        shared = _environment(request, meeting)
        for local_rank in range(request.gpus):
            number = meeting.first_rank + local_rank
            environment = {**shared, "RANK": str(number), "LOCAL_RANK": str(local_rank)}
            log = request.log_dir / f"rank{number}.log"
            try:
                with _interruptions_held():
                    self._ranks.append(RankProcess(number, command, environment, log))
            except OSError as error:
                raise OutputError(f"cannot start rank {number} with the log {log}: {error.strerror}") from error

    def first_failure(self, neighbours: Neighbours) -> RankFailure | None:
        """Wait until all ranks of all machines are done, and return None, or until one fails, and return why."""
        settle_until: float | None = None
        last_look = time.monotonic()
        while True:
            self._listen(since_last_look=time.monotonic() - last_look)
            last_look = time.monotonic()
            if (elsewhere := neighbours.failure()) is not None:
                return elsewhere
            have_ended = all(rank.exit_code() is not None for rank in self._ranks)
            causes = self._causes(neighbours)
            if causes:
                cause = failures.origin(causes)
                settle_until = settle_until or time.monotonic() + self._pace.settle_s
                is_all = have_ended and not neighbours
                if not cause.may_follow or is_all or time.monotonic() > settle_until:
                    # On another machine it may be otherwise.
                    return (None if neighbours else failures.told_by_all(self._ranks)) or cause.failure
            else:
                settle_until = None  # a step that took too long has ended
                if all(rank.exit_code() == 0 for rank in self._ranks) and neighbours.all_finished():
                    return None
            time.sleep(self._pace.look_s)

    def end(self, *, finish_s: float) -> None:
        """Ask the ranks to end, in a voice that grows louder; a second Ctrl-C kills them at once.

        Args:
            finish_s: more seconds than usual for them to end by themselves.
        """
        for rank in self._ranks:
            rank.mute()
        try:
            for rank in self._ranks:
                rank.interrupt()
            self._wait(self._pace.interrupt_s + finish_s, after_one=max(self._pace.interrupt_s, self._pace.follow_s))
            for rank in self._ranks:
                rank.send(signal.SIGTERM)
            self._wait(self._pace.terminate_s)
        except KeyboardInterrupt:
            pass
        for rank in self._ranks:
            rank.kill()
            rank.listen()

    def kept(self) -> list[str]:
        """Return what the first rank that was interrupted says of what it finished; nothing if none was."""
        reports = [rank.report for rank in self._ranks if rank.report is not None]
        return [report.hint for report in reports if report.kind == "interrupted" and report.hint][:1]

    def failed(self) -> list[str]:
        """Return what the first rank that could not finish what it was at says of it; nothing if all could."""
        reports = [rank.report for rank in self._ranks if rank.report is not None]
        errors = [(report.message, report.hint) for report in reports if report.kind == "error"]
        return ["\n".join(filter(None, error)) for error in errors][:1]

    def _listen(self, *, since_last_look: float) -> None:
        for rank in self._ranks:
            rank.listen()
            if since_last_look > self._pace.frozen_s / 2:  # this process was stopped itself, maybe with all the ranks
                rank.forgive()

    def _causes(self, neighbours: Neighbours) -> list[Cause]:
        found = self._silent(neighbours)
        for rank in self._ranks:
            code = rank.exit_code()
            if code is None:
                silent_s = rank.silent_s()
                if silent_s > (self._pace.frozen_s if rank.is_stopped() else self._pace.starved_s):
                    found.append(failures.frozen(rank, silent_s))
            elif code != 0:
                rank.listen()  # what it told between the last look and its end
                out_of_memory = failures.count_memory_kills() > self._memory_kills
                found.append(failures.ended(rank, code, out_of_memory=out_of_memory))
        return found

    def _silent(self, neighbours: Neighbours) -> list[Cause]:
        """Return which rank is behind, if a step takes too long, or if no rank of any machine gives a sign of work."""
        running = [rank for rank in self._ranks if rank.exit_code() is None]
        are_idle = all(rank.pulse.is_idle for rank in running)
        # A rank that is left alone waits for nobody.
        are_all_idle = neighbours.all_idle(are_idle) if neighbours else are_idle and len(running) > 1
        if not running or not (are_all_idle or any(rank.pulse.is_late for rank in running)):
            return []
        return [failures.silent(running)]

    def _wait(self, seconds: float, *, after_one: float = 0.0) -> None:
        """Wait so long for all ranks to end, but not longer than `after_one` once one of them has."""
        deadline = time.monotonic() + seconds
        one_has_ended = any(rank.exit_code() is not None for rank in self._ranks)
        while time.monotonic() < deadline and any(
            rank.exit_code() is None and not rank.is_stopped() for rank in self._ranks
        ):
            time.sleep(self._pace.look_s)
            if after_one and not one_has_ended and any(rank.exit_code() is not None for rank in self._ranks):
                one_has_ended = True
                deadline = min(deadline, time.monotonic() + after_one)


@contextmanager
def _interruptions_held() -> Iterator[None]:
    """Hold Ctrl-C and requests to end back until the end of the block, so that no rank is started and forgotten."""
    if threading.current_thread() is not threading.main_thread():  # which alone gets them
        yield
        return
    held: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: held.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
        if callable(signal.getsignal(number))
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if held:
            signal.raise_signal(held[0])


def _environment(request: LaunchRequest, meeting: Meeting) -> dict[str, str]:
    """Return what all ranks of this machine have in common, under torchrun's names."""
    threads = max(1, (os.cpu_count() or 1) // request.gpus)
    environment = {
        # Several ranks that each take all cores slow each other down.
        "OMP_NUM_THREADS": str(threads),
        # The errors that these warnings announce are told by the launcher, in one message.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        **os.environ,
        "MASTER_ADDR": meeting.host,
        "MASTER_PORT": str(meeting.port),
        "WORLD_SIZE": str(meeting.world_size),
        "LOCAL_WORLD_SIZE": str(request.gpus),
        "GROUP_RANK": str(request.node_rank),
        "GROUP_WORLD_SIZE": str(request.nnodes),
        # The store runs in the launcher: no rank starts one.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        # What a rank printed before it was killed is in its log.
        "PYTHONUNBUFFERED": "1",
    }
    devices = request.visible_devices()
    if devices is not None:
        environment["CUDA_VISIBLE_DEVICES"] = devices
    return environment
