"""A timed all-reduce over the devices of this machine, in processes of its own: a hang is a finding, not a hang."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from opensora_cli.core.left_overs import temporary_folder
from opensora_cli.core.python_processes import python_command, safe_environment
from opensora_cli.engine.env_check.report import Check, Finding

_CHECK = Check("all-reduce")
_POLL_S = 0.05
# By its path, and without putting its folder on the path: it needs nothing but torch.
_WORKER = tuple(python_command(str(Path(__file__).with_name("all_reduce_worker.py"))))


class Outcome(StrEnum):
    """How it ended."""

    DONE = "done"
    HUNG = "hung"
    FAILED = "failed"
    NOT_STARTED = "not started"
    """The time was over before torch was imported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduce:
    """What came of the all-reduce."""

    backend: str
    ranks: int
    outcome: Outcome
    stage: str = ""
    """Where it hung or failed: connecting, reducing."""
    reason: str = ""
    """The last line of a process that failed."""
    num_bytes: int = 0
    seconds: float = 0.0
    limit_s: float = 0.0

    @property
    def bus_bandwidth_gb_per_s(self) -> float:
        """The rate that the slowest link sees: 2(n-1)/n of the bytes (NCCL's convention for all-reduce)."""
        return 2 * (self.ranks - 1) / self.ranks * self.num_bytes / self.seconds / 1e9 if self.seconds else 0.0


def run_all_reduce(
    *, num_gpus: int, seconds: float, environment: Mapping[str, str], worker: Sequence[str] = _WORKER
) -> AllReduce:
    """Reduce over all GPUs with NCCL, or on a machine without between two processes with gloo.

    All processes are killed after `seconds`. `worker` takes rank, ranks, backend and a file to meet at.
    """
    backend, ranks = ("nccl", num_gpus) if num_gpus else ("gloo", 2)
    with temporary_folder() as folder:
        commands = [[*worker, str(rank), str(ranks), backend, str(folder / "meeting_place")] for rank in range(ranks)]
        outputs = [folder / f"output-{rank}" for rank in range(ranks)]
        with _running(commands, outputs, environment) as processes:
            is_over = _wait(processes, seconds)
            codes = [process.poll() for process in processes]
        texts = [output.read_text(encoding="utf-8", errors="replace") for output in outputs]
    return _judge(codes, texts, backend=backend, is_over=is_over, limit_s=seconds)


@contextmanager
def _running(
    commands: Sequence[Sequence[str]], outputs: Sequence[Path], environment: Mapping[str, str]
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run processes, and kill what is left of them at the end."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for command, output in zip(commands, outputs, strict=True):
            with output.open("wb") as file:
                # A session of its own, so that Ctrl-C comes to us alone and we can end what the process started, too.
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env=safe_environment(environment),
                    start_new_session=True,
                )
            processes.append(process)
        yield processes
    finally:
        for process in processes:
            _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        if sys.platform == "win32":
            process.kill()
        else:
            # Its session is its process group, of its own; until it is waited for, its id is not reused.
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _wait(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> bool:
    """Wait until all have ended, or one has failed; return whether that was in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        codes = [process.poll() for process in processes]
        if None not in codes or any(codes):
            return True
        time.sleep(_POLL_S)
    return False


def _judge(
    codes: Sequence[int | None], texts: Sequence[str], *, backend: str, is_over: bool, limit_s: float
) -> AllReduce:
    ranks = len(texts)
    stages = [_stage(text) for text in texts]
    if not is_over:
        # The one that is furthest behind holds up the others.
        behind = min(stages, key=_STAGES.index)
        outcome = Outcome.HUNG if behind else Outcome.NOT_STARTED
        return AllReduce(backend=backend, ranks=ranks, outcome=outcome, stage=behind, limit_s=limit_s)
    failed = [rank for rank, code in enumerate(codes) if code]
    if failed:
        rank = failed[0]
        lines = [line.strip() for line in texts[rank].splitlines() if line.strip() and line.strip() not in _STAGES]
        reason = lines[-1][:300] if lines else f"exit code {codes[rank]}"
        return AllReduce(backend=backend, ranks=ranks, outcome=Outcome.FAILED, stage=stages[rank], reason=reason)
    done = [line.split() for text in texts for line in text.splitlines() if line.startswith("done ")]
    return AllReduce(
        backend=backend,
        ranks=ranks,
        outcome=Outcome.DONE,
        num_bytes=int(done[0][1]),
        seconds=max(float(words[2]) for words in done),
    )


_STAGES = ("", "connecting", "reducing")


def _stage(text: str) -> str:
    reached = [line for line in text.splitlines() if line in _STAGES]
    return reached[-1] if reached else ""


def check_all_reduce(result: AllReduce) -> Iterator[Finding]:
    """Judge it: a hang stops runs on several GPUs."""
    noun = "processes" if result.backend == "gloo" else "GPU" if result.ranks == 1 else "GPUs"
    over = f"{result.backend} over {result.ranks} {noun}"
    make = _CHECK.problem if result.backend == "nccl" and result.ranks > 1 else _CHECK.warning
    if result.outcome is Outcome.DONE:
        rate = f", {result.bus_bandwidth_gb_per_s:.1f} GB/s on the bus" if result.ranks > 1 else ""
        size = f"{result.num_bytes / 2**20:.0f} MiB in {result.seconds * 1e3:.1f} ms"
        yield _CHECK.ok(f"{over}: {size}{rate}")
    elif result.outcome is Outcome.NOT_STARTED:
        yield _CHECK.unknown(f"processes were not ready within {result.limit_s:g} s: the machine is busy")
    elif result.outcome is Outcome.HUNG:
        yield make(
            f"{over} hangs while {result.stage}: ended after {result.limit_s:g} s",
            why="a run over several devices would hang in the same place",
            fix=_FIXES[result.backend, result.stage],
        )
    else:
        yield make(
            f"{over} fails{f' while {result.stage}' if result.stage else ''}: {result.reason}",
            why="a run over several devices would fail in the same way",
            fix="NCCL_DEBUG=INFO osora env-check reports more" if result.backend == "nccl" else _GLOO_FIX,
        )


_GLOO_FIX = "the name of this machine must lead to itself (/etc/hosts), or GLOO_SOCKET_IFNAME=lo"
_FIXES = {
    ("gloo", "connecting"): _GLOO_FIX,
    ("gloo", "reducing"): _GLOO_FIX,
    ("nccl", "connecting"): "the name of this machine must lead to itself (/etc/hosts); check NCCL_SOCKET_IFNAME",
    ("nccl", "reducing"): "try NCCL_P2P_DISABLE=1: if that helps, switch off ACS or the IOMMU in the BIOS",
}
