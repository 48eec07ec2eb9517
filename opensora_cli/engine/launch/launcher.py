"""Starts the ranks of a run on this machine, watches them, and ends them all when one fails.

A rank gets the environment that torchrun gives, but for the store: ranks meet by a file in a private folder, since each
account of the machine can write to a store that listens on a port. Ranks of several machines are started by torchrun or
srun, and recognised in `core.ranks`.

Why not `torch.distributed.elastic.multiprocessing` (torch 2.13)? Tried with `start_processes`, two ranks, and one of
them killed, two promises could not be kept:

- A dead rank ends the run within 20 s. `PContext.wait` closes the others with SIGTERM and a fixed 30 s: beside a rank
  that was stopped, or that ignored SIGTERM, it returned after 31.2 s, with three lines of its own on stderr.
- Nothing survives the launcher. After SIGKILL of the launcher a stopped rank stayed. The link that ends it here is a
  socket that the rank inherits, and `start_processes` passes no file descriptors on.

Without `wait` and `close` little more than `subprocess.Popen` would be left of it.
"""

import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # it ships none
import torch

from opensora_cli.core.exceptions import HardwareError, OutputError, RequestError
from opensora_cli.core.files import write_json_atomic
from opensora_cli.core.folder_lock import remove_locks_of
from opensora_cli.core.left_overs import is_abandoned, remove_left_by, temporary_folder, temporary_name
from opensora_cli.core.python_processes import module_command, safe_environment
from opensora_cli.core.rank_link import INTERRUPTED, OwnTime
from opensora_cli.core.ranks import STORE_VARIABLE
from opensora_cli.core.signals import held_back
from opensora_cli.core.threads import variables_of_ranks
from opensora_cli.engine.launch import failures
from opensora_cli.engine.launch.failures import Cause, RankFailure
from opensora_cli.engine.launch.process import RankProcess
from opensora_cli.engine.launch.rank import DeviceType
from opensora_cli.settings.devices import DeviceSettings

COMMAND = tuple(module_command("opensora_cli"))
_LATE_LOOKS = 2.0
_LOOPBACK = "127.0.0.1"
_OF_LAUNCHER = ".launcher"
"""In a folder of log files, what says whose it is: users' folders may have temporary files of their own in them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """The ranks to start on this machine, one for each GPU.

    `log_dir` gets a log file per rank, `rank0.log` and so on; it is made where it is missing. `devices` are GPUs as
    this process counts those it sees; None: the first `gpus`. In `output_dir`, and among the system's temporary files,
    what killed ranks would have removed themselves is removed.
    """

    gpus: int
    device_type: DeviceType
    log_dir: Path
    devices: tuple[int, ...] | None = None
    output_dir: Path | None = None

    @classmethod
    def of(
        cls,
        parallel: DeviceSettings,
        *,
        gpus: int,
        device_type: DeviceType,
        log_dir: Path,
        output_dir: Path | None = None,
    ) -> "LaunchRequest":
        """Return the request for `gpus` ranks on the devices that settings name.
        Raises RequestError if the settings are for several machines.
        """
        if parallel.nnodes > 1:
            raise RequestError(
                f"parallel.nnodes={parallel.nnodes}, and ranks are started here on this machine only",
                hint=f"on each machine: torchrun --nnodes {parallel.nnodes} --nproc-per-node {gpus} --rdzv-backend "
                "c10d --rdzv-endpoint HOST:29500 --no-python osora ... (srun does it, too)",
            )
        return cls(gpus=gpus, device_type=device_type, log_dir=log_dir, devices=parallel.devices, output_dir=output_dir)

    def check(self) -> None:
        """Check what settings alone do not show.
        Raises RequestError if GPUs are picked for ranks on the CPU, and HardwareError if there are fewer GPUs here.
        """
        if self.devices is not None and self.device_type == "cpu":
            listed = ",".join(map(str, self.devices))
            raise RequestError(f"devices={listed} picks GPUs, and the device is cpu: drop one of them")
        if self.device_type == "cuda":
            _require_gpus(self.gpus, self.devices)
        if sys.platform == "win32":
            raise HardwareError("several ranks can be started on Linux and macOS only")

    def visible_devices(self) -> str | None:
        """Return the value of CUDA_VISIBLE_DEVICES that makes the ranks see `devices`; None: leave it as it is."""
        if self.devices is None:
            return None
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = seen.split(",") if seen else [str(index) for index in range(max(self.devices) + 1)]
        return ",".join(names[index].strip() for index in self.devices)


def _require_gpus(gpus: int, devices: tuple[int, ...] | None) -> None:
    count = torch.cuda.device_count()
    if count == 0:
        raise HardwareError(f"gpus={gpus}, and this machine has no usable NVIDIA GPU", hint="use --device cpu")
    names = [f"cuda:{index} ({torch.cuda.get_device_name(index)})" for index in range(count)]
    there = f"this machine has {count}: {', '.join(names)}"
    if gpus > count:
        raise HardwareError(f"gpus={gpus}, and {there}", hint=f"use --gpus {count}")
    absent = [index for index in devices or () if index >= count]
    if absent:
        raise HardwareError(f"devices={','.join(map(str, devices or ()))}: there is no cuda:{absent[0]}, and {there}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How often the launcher looks, and how long it waits; all in seconds.

    From the moment a rank stops, the run takes `frozen_s`, `interrupt_s` and `terminate_s` to end: half of what is
    promised, and more where the launcher itself comes late to look.
    """

    look_s: float = 0.1
    frozen_s: float = 5.0
    """Without a sign of life, after which a stopped rank counts as frozen."""
    starved_s: float = 60.0
    """The same for a rank that is not stopped: it may be waiting for a disk, or for its turn on a busy machine."""
    settle_s: float = 2.0
    """For the origin to show, when a rank reports only what may follow from it."""
    interrupt_s: float = 4.0
    """For the ranks to end by themselves after SIGINT."""
    terminate_s: float = 1.0
    """The same after SIGTERM; then they are killed."""
    finish_s: float = 0.0
    """More time for the first of these after Ctrl-C, to save what is finished."""
    follow_s: float = 60.0
    """Of that time, how much the others have once one rank has ended."""


def launch(
    request: LaunchRequest, arguments: Sequence[str], *, command: Sequence[str] = COMMAND, pace: Pace | None = None
) -> None:
    """Run `osora` (or `command`) with `arguments` on all ranks of `request`, and return when all are done.

    Rank 0 prints; the others write to their log files. However this function ends, no rank is left. Signals are the
    caller's: what is raised while it waits, as Ctrl-C does, ends the ranks.

    Raises:
        RequestError: the request contradicts itself.
        HardwareError: there are fewer GPUs.
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
    with temporary_folder() as private, _Run(pace, output_dir=request.output_dir) as run:
        try:
            run.start(request, [*command, *arguments], store=private / "store")
            failure = run.first_failure()
        except KeyboardInterrupt:
            run.end(finish_s=pace.finish_s)
            raise KeyboardInterrupt(*(run.kept() or run.failed())) from None
        if failure is not None:
            is_interrupted = failure.exit_code == INTERRUPTED
            run.end(finish_s=pace.finish_s if is_interrupted else 0.0)
            hints = [failure.hint] if failure.hint else []
            hints += run.kept() or (run.failed() if is_interrupted else [])
            raise RankFailure(failure.message, hint="\n".join(hints) or None, exit_code=failure.exit_code)


@contextmanager
def log_folder(name: str) -> Iterator[Path]:
    """Yield a new folder for log files, which is kept only if a failure's message names it.

    No other account can look into it: what ranks print, and their settings, may have prompts in them.
    Those of launchers that were killed are removed. Raises OutputError if it cannot be made.
    """
    parent = Path(tempfile.gettempdir())
    for killed in parent.glob(f"osora-*/{_OF_LAUNCHER}/.osora-*.tmp"):
        if is_abandoned(killed):
            shutil.rmtree(killed.parent.parent, ignore_errors=True)
    folder = parent / f"osora-{name}-{secrets.token_hex(4)}"
    running = folder / _OF_LAUNCHER
    try:
        folder.mkdir(mode=0o700)
        running.mkdir()
        (running / temporary_name()).touch()
    except OSError as error:
        raise OutputError(f"cannot make the folder of log files {folder}: {error.strerror}") from error
    is_named = False
    try:
        yield folder
    except RankFailure as failure:
        is_named = str(folder) in f"{failure.message}{failure.hint}"
        raise
    finally:
        shutil.rmtree(running if is_named else folder, ignore_errors=True)


def write_settings(log_dir: Path, document: object) -> Path:
    """Write what the ranks are to do to a file beside their logs, for this account alone, and return its path."""
    path = log_dir / "settings.json"
    write_json_atomic(path, document)
    path.chmod(0o600)
    return path


class _Run:
    """All ranks."""

    def __init__(self, pace: Pace, *, output_dir: Path | None = None, own_time: OwnTime | None = None) -> None:
        self._pace = pace
        self._output_dir = output_dir
        self._time = own_time or OwnTime(_LATE_LOOKS * pace.look_s)
        self._ranks: list[RankProcess] = []
        self._memory_kills = failures.count_memory_kills()

    def __enter__(self) -> "_Run":
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self._ranks:
            rank.kill()
            rank.close()
        pids = [rank.pid for rank in self._ranks]
        for folder in filter(None, (self._output_dir, Path(tempfile.gettempdir()))):
            remove_left_by(pids, folder)
            remove_locks_of(pids, folder)

    def start(self, request: LaunchRequest, command: Sequence[str], *, store: Path) -> None:
        """Start all ranks; `store` is the file by which they meet."""
        shared = _environment(request, store)
        for number in range(request.gpus):
            environment = {**shared, "RANK": str(number), "LOCAL_RANK": str(number)}
            log = request.log_dir / f"rank{number}.log"
            try:
                with held_back():  # so that every rank that was started is known
                    self._ranks.append(RankProcess(number, command, environment, log, own_time=self._time))
            except OSError as error:
                raise OutputError(f"cannot start rank {number} with the log {log}: {error.strerror}") from error

    def first_failure(self) -> RankFailure | None:
        """Wait until all ranks are done, and return None, or until one fails, and return why."""
        settle_until: float | None = None
        while True:
            have_ended = all(rank.exit_code() is not None for rank in self._ranks)
            causes = self.look()
            if causes:
                cause = failures.origin(causes)
                settle_until = settle_until or time.monotonic() + self._pace.settle_s
                if not cause.may_follow or have_ended or time.monotonic() > settle_until:
                    return failures.shared_error(self._ranks) or cause.failure
            elif have_ended:
                return None
            else:
                settle_until = None  # a step that took too long has ended
            time.sleep(self._pace.look_s)

    def look(self) -> list[Cause]:
        """Take what the ranks report, and return what is wrong with any of them."""
        self._time.look()
        for rank in self._ranks:
            rank.listen()
        return self._causes()

    def end(self, *, finish_s: float) -> None:
        """Escalate from SIGINT to SIGTERM to SIGKILL; a second Ctrl-C kills at once.

        The ranks get `finish_s` more than usual to end by themselves, unless one had not begun: the others have made
        nothing without it, and may wait for it in a call that SIGINT does not end.
        """
        try:
            for rank in self._ranks:
                rank.interrupt()
            have_begun = all(rank.has_begun() for rank in self._ranks)
            self._wait(
                self._pace.interrupt_s + (finish_s if have_begun else 0.0),
                after_one=max(self._pace.interrupt_s, self._pace.follow_s),
            )
            for rank in self._ranks:
                rank.terminate()
            self._wait(self._pace.terminate_s)
        except KeyboardInterrupt:
            pass
        for rank in self._ranks:
            rank.kill()
            rank.listen()

    def kept(self) -> list[str]:
        """Return what the first rank that was interrupted, or left something, reports of that; nothing if none did."""
        reports = [(rank.report, rank.left) for rank in self._ranks]
        hints = (report.hint or left if report and report.kind == "interrupted" else left for report, left in reports)
        return [hint for hint in hints if hint][:1]

    def failed(self) -> list[str]:
        """Return what the first rank that could not finish its work reports of it; nothing if all could."""
        reports = [rank.report for rank in self._ranks if rank.report is not None]
        errors = [(report.message, report.hint) for report in reports if report.kind == "error"]
        return ["\n".join(filter(None, error)) for error in errors][:1]

    def _causes(self) -> list[Cause]:
        found = self._hung()
        for rank in self._ranks:
            code = rank.exit_code()
            if code is None:
                silent_s = rank.silent_s()
                if silent_s > (self._pace.frozen_s if rank.is_stopped() else self._pace.starved_s):
                    found.append(failures.frozen(rank, silent_s))
            elif code != 0:
                rank.listen()  # what it sent between the last look and its end
                out_of_memory = failures.count_memory_kills() > self._memory_kills
                found.append(failures.ended(rank, code, out_of_memory=out_of_memory))
        return found

    def _hung(self) -> list[Cause]:
        """Return which rank is behind, if a step takes too long, or if no rank gives a sign of work.

        That of a rank which waits for others takes as long as theirs, which may be kept from working by the machine.
        """
        running = [rank for rank in self._ranks if rank.exit_code() is None]
        pulses = [rank.pulse for rank in running]
        # A single rank waits for no other.
        are_all_idle = len(running) > 1 and all(pulse.is_idle for pulse in pulses)
        are_all_behind = all(pulse.is_late or pulse.is_idle for pulse in pulses)
        is_one_late = any(pulse.is_late and (are_all_behind or not pulse.waits) for pulse in pulses)
        if not (are_all_idle or is_one_late):
            return []
        return [failures.hung(running)]

    def _wait(self, seconds: float, *, after_one: float = 0.0) -> None:
        """Wait so long for all ranks to end, but not longer than `after_one` once one of them has."""
        deadline = time.monotonic() + seconds
        one_has_ended = False
        while time.monotonic() < deadline and any(
            rank.exit_code() is None and not rank.is_stopped() for rank in self._ranks
        ):
            if after_one and not one_has_ended and any(rank.exit_code() is not None for rank in self._ranks):
                one_has_ended = True
                deadline = min(deadline, time.monotonic() + after_one)
            time.sleep(self._pace.look_s)


def _environment(request: LaunchRequest, store: Path) -> dict[str, str]:
    """Return what all ranks have in common; the names that torchrun has, too, are its."""
    environment = {
        # The launcher reports the errors that these warnings announce, in one message.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        **_loopback_interfaces(),
        **os.environ,
        **variables_of_ranks(os.environ, ranks=request.gpus),
        STORE_VARIABLE: str(store),
        "WORLD_SIZE": str(request.gpus),
        "LOCAL_WORLD_SIZE": str(request.gpus),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        # What a rank printed before it was killed is in its log.
        "PYTHONUNBUFFERED": "1",
    }
    devices = request.visible_devices()
    if devices is not None:
        environment["CUDA_VISIBLE_DEVICES"] = devices
    return safe_environment(environment)


def _loopback_interfaces() -> dict[str, str]:
    """Return the variables that keep the ranks' connections on this machine; none where it has no loopback."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == _LOOPBACK for address in addresses):
            return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
    return {}
