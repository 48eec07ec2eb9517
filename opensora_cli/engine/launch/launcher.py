"""Launcher that starts the ranks of a run on this machine, watches them, and ends them all when one fails.

A rank gets the same environment as from torchrun, except for the store. The ranks use a file store in a private folder
because every account of the machine can write to a store on a port. torchrun or srun starts the ranks of several
machines, which `core.ranks` recognizes.

`torch.distributed.elastic.multiprocessing` of torch 2.13 does not suffice: with a stopped rank it returns after 31 s,
with three lines of its own, and a stopped rank outlives a launcher that is killed.
"""

import os
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # it ships none

from opensora_cli.core.device import device_count
from opensora_cli.core.device_names import GPU
from opensora_cli.core.exceptions import HardwareError, OutputError, RequestError
from opensora_cli.core.files import remove_left, temporary_folder, write_json_atomic
from opensora_cli.core.limits import variables_of_ranks
from opensora_cli.core.python_processes import module_command, safe_environment
from opensora_cli.core.ranks import INTERRUPTED, STORE_VARIABLE
from opensora_cli.core.signals import held_back
from opensora_cli.engine.launch import process
from opensora_cli.engine.launch.process import RankFailure, RankProcess
from opensora_cli.settings.devices import DeviceSettings

COMMAND = tuple(module_command("opensora_cli"))
LOOK_S = 0.1
STOPPED_S = 5.0
"""Seconds after which a stopped rank ends the run. With the next three it takes half of the promised time."""
SETTLE_S = 2.0
"""Seconds to wait for the original cause after a rank reports a possible consequence."""
INTERRUPT_S = 4.0
"""Seconds for the ranks to end by themselves after SIGINT."""
TERMINATE_S = 1.0
"""Seconds for the ranks to end by themselves after SIGTERM, before they are killed."""
FOLLOW_S = 60.0
"""Limit of the seconds after SIGINT for the other ranks once one rank has ended."""
_LATEST_LOOK_S = 1.0
"""Largest time between two looks that counts: the launcher may be stopped, but not the ranks."""
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """Request to start ranks on this machine, one for each GPU.

    `log_dir` gets a log file per rank, `rank0.log` and so on; a missing folder is created. `parallel.devices` are
    indexes of GPUs that this process sees. None means the first `gpus`. Temporary files of killed ranks are removed
    from `output_dir` and from the temporary folder of the system.
    """

    parallel: DeviceSettings
    gpus: int
    device_type: str
    log_dir: Path
    output_dir: Path | None = None

    def check(self) -> None:
        """Check the request against this machine.

        Raises RequestError for several machines and for GPU indexes with other devices, and HardwareError if the
        machine has fewer GPUs.
        """
        kind, gpus, nodes, devices = self.device_type, self.gpus, self.parallel.nnodes, self.parallel.devices
        listed = ",".join(map(str, devices or ()))
        if nodes > 1:
            raise RequestError(
                f"parallel.nnodes={nodes}, and ranks are started here on this machine only",
                hint=f"on each machine: torchrun --nnodes {nodes} --nproc-per-node {gpus} --rdzv-backend "
                "c10d --rdzv-endpoint HOST:29500 --no-python osora ... (srun does it, too)",
            )
        if devices is not None and kind != GPU:
            raise RequestError(f"devices={listed} picks GPUs, and the device is {kind}: drop one of them")
        count = gpus if kind == "cpu" else device_count(kind)
        if max([gpus, *(index + 1 for index in devices or ())]) > count:
            asked = f"devices={listed}" if devices else f"gpus={gpus}"
            vendor = "NVIDIA GPU" if kind == GPU else f"{kind} device"
            raise HardwareError(
                f"{asked}, and this machine has {count or 'no'} usable {vendor}{'s' if count > 1 else ''}",
                hint=f"use --gpus {count}" if count else "use --device cpu",
            )
        if sys.platform == "win32":
            raise HardwareError("several ranks can be started on Linux and macOS only")

    def environment(self, store: Path) -> dict[str, str]:
        """Return the environment that all ranks share, with the names of variables that torchrun uses."""
        environment = {
            # The launcher reports the errors behind these warnings in one message.
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            **_loopback_interfaces(),
            **os.environ,
            **variables_of_ranks(os.environ, ranks=self.gpus),
            STORE_VARIABLE: str(store),
            "WORLD_SIZE": str(self.gpus),
            "LOCAL_WORLD_SIZE": str(self.gpus),
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            # The log then contains the output of a rank that was killed.
            "PYTHONUNBUFFERED": "1",
        }
        if (devices := self.parallel.devices) is not None:
            seen = os.environ.get("CUDA_VISIBLE_DEVICES")
            names = seen.split(",") if seen else [str(index) for index in range(max(devices) + 1)]
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(names[index].strip() for index in devices)
        return safe_environment(environment)


def _loopback_interfaces() -> dict[str, str]:
    """Return variables that keep connections of ranks on this machine; empty without a loopback interface."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == _LOOPBACK for address in addresses):
            return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
    return {}


def launch(
    request: LaunchRequest, arguments: Sequence[str], *, command: Sequence[str] = COMMAND, finish_s: float = 0.0
) -> None:
    """Run `osora` (or `command`) with `arguments` on all ranks of `request`, and return when all are done.

    Rank 0 prints; the others write to their log files. No rank remains when this function ends. The caller handles
    signals: an exception during the wait, such as Ctrl-C, ends the ranks. `finish_s` is the additional time that they
    get on Ctrl-C, to save finished work.

    Raises OutputError if the log files cannot be written, RankFailure with the exit code of the first rank that failed,
    the errors of `LaunchRequest.check`, and KeyboardInterrupt, whose argument tells where work is saved or why not.
    """
    request.check()
    with temporary_folder() as private, _Run(request.output_dir) as run:
        try:
            run.start(request, [*command, *arguments], store=private / "store")
            failure = run.first_failure()
        except KeyboardInterrupt:
            run.end(finish_s=finish_s)
            raise KeyboardInterrupt(*run.outcome(is_interrupted=True)) from None
        if failure is not None:
            is_interrupted = failure.exit_code == INTERRUPTED
            run.end(finish_s=finish_s if is_interrupted else 0.0)
            hints = [failure.hint, *run.outcome(is_interrupted=is_interrupted)]
            failure.hint = "\n".join(filter(None, hints)) or None
            raise failure


@contextmanager
def log_folder(name: str) -> Iterator[Path]:
    """Yield a new folder for log files, which is kept under a name with `name` if the message of a failure names it.

    Other accounts cannot read it because output and settings of ranks may contain prompts.
    Raises OutputError if the folder cannot be created.
    """
    with temporary_folder() as folder:
        try:
            yield folder
        except RankFailure as failure:
            kept = folder.with_name(f"osora-{name}-{secrets.token_hex(4)}")
            if str(folder) in f"{failure.message} {failure.hint}":
                failure.message = failure.message.replace(str(folder), str(kept))
                failure.hint = failure.hint and failure.hint.replace(str(folder), str(kept))
                folder.rename(kept)
            raise


def write_settings(log_dir: Path, document: object) -> Path:
    """Write the settings of the ranks to a file beside their logs, readable by this account only; return its path."""
    path = log_dir / "settings.json"
    write_json_atomic(path, document)
    path.chmod(0o600)
    return path


class _Run:
    """Ranks of one run."""

    def __init__(self, output_dir: Path | None = None) -> None:
        self._output_dir = output_dir
        self._ranks: list[RankProcess] = []

    def __enter__(self) -> "_Run":
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self._ranks:
            rank.kill()
            rank.close()
        pids = [rank.pid for rank in self._ranks]
        for folder in filter(None, (self._output_dir, Path(tempfile.gettempdir()))):
            remove_left(folder, by=pids)

    def start(self, request: LaunchRequest, command: Sequence[str], *, store: Path) -> None:
        shared = request.environment(store)
        for number in range(request.gpus):
            environment = {**shared, "RANK": str(number), "LOCAL_RANK": str(number)}
            log = request.log_dir / f"rank{number}.log"
            try:
                log.parent.mkdir(parents=True, exist_ok=True)
                with held_back():  # so that every started rank is recorded
                    on_gpu = request.device_type != "cpu"
                    self._ranks.append(RankProcess(number, command, environment, log, on_gpu=on_gpu))
            except OSError as error:
                raise OutputError(f"cannot start rank {number} with the log {log}: {error.strerror}") from error

    def first_failure(self) -> RankFailure | None:
        """Wait until all ranks are done, and return None, or until one fails, and return the failure."""
        settle_until: float | None = None
        looked = time.monotonic()
        while True:
            have_ended = all(rank.exit_code() is not None for rank in self._ranks)
            passed_s, looked = time.monotonic() - looked, time.monotonic()
            if found := self.look(min(passed_s, _LATEST_LOOK_S)):
                first = process.origin(found)
                settle_until = settle_until or time.monotonic() + SETTLE_S
                if not first.may_follow or have_ended or time.monotonic() > settle_until:
                    for rank in self._ranks:
                        if rank.is_idle:
                            rank.log_traceback()
                    return process.shared_error(self._ranks) or first
            elif have_ended:
                return None
            else:
                settle_until = None
            time.sleep(LOOK_S)

    def look(self, passed_s: float) -> list[RankFailure]:
        """Return the failures, `passed_s` seconds after the last look."""
        for rank in self._ranks:
            rank.look(passed_s)
        running = [rank for rank in self._ranks if rank.exit_code() is None]
        found = []
        # A single rank never waits for another.
        are_idle = len(running) > 1 and all(rank.is_idle for rank in running)
        if are_idle and not sum(rank.has_hidden_work() for rank in running):
            found.append(process.behind(running).hung())
        for rank in self._ranks:
            code = rank.exit_code()
            if code is None and rank.stopped_s > STOPPED_S:
                found.append(rank.stopped())
            elif code:
                found.append(rank.failure(code))
        return found

    def end(self, *, finish_s: float) -> None:
        """Escalate from SIGINT to SIGTERM to SIGKILL; a second Ctrl-C kills at once.

        The ranks get `finish_s` more than usual to end by themselves, unless one has not begun: then there is no work
        to save, and the others may wait for it in a call that SIGINT does not end.
        """
        try:
            for rank in self._ranks:
                rank.interrupt()
            have_begun = all(rank.has_begun for rank in self._ranks)
            self._wait(INTERRUPT_S + have_begun * finish_s, after_one=FOLLOW_S)
            for rank in self._ranks:
                rank.terminate()
            self._wait(TERMINATE_S)
        except KeyboardInterrupt:
            pass
        for rank in self._ranks:
            rank.kill()
            rank.listen()

    def outcome(self, *, is_interrupted: bool) -> list[str]:
        """Return the first report of how to continue; if the run was interrupted, else the first error of a rank."""
        left, errors = [], []
        for rank in self._ranks:
            report = rank.report
            left.append((report.hint if report and report.kind == "interrupted" else None) or rank.left)
            if is_interrupted and report and report.kind == "error":
                errors.append("\n".join(filter(None, (report.message, report.hint))))
        return [text for text in (*left, *errors) if text][:1]

    def _wait(self, seconds: float, *, after_one: float = float("inf")) -> None:
        """Wait up to `seconds` for all ranks to end, and at most `after_one` once one of them has ended."""
        deadline = time.monotonic() + seconds
        while any(rank.exit_code() is None and not rank.is_stopped() for rank in self._ranks):
            now = time.monotonic()
            if any(rank.exit_code() is not None for rank in self._ranks):
                deadline, after_one = min(deadline, now + after_one), float("inf")
            if now >= deadline:
                return
            time.sleep(LOOK_S)
