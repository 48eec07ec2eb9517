"""The part of `speed.py` about all that is not work: commands as processes of their own, against limits in seconds.

Each stands where the plain way stands elsewhere: `plain s` is the limit. What refuses or explains is held to it by
seconds of the processor, what computes by the clock of an idle machine.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from speed_pairs import Row

_TORCH = [sys.executable, "-c", "import torch"]
_OSORA = [sys.executable, "-m", "opensora_cli"]
_DEMO = ["generate", "raining, sea", "--model", "demo", "--device", "cpu", "--no-cache", "--quiet"]
_PLAN_S = 2.3
_DEMO_S = 3.5
_RANKS_S = 3.0
"""More than one process takes."""


@dataclass(frozen=True, slots=True)
class _Times:
    """Seconds of some runs of a command, its descendants' included."""

    wall: tuple[float, ...]
    processor: tuple[float, ...]

    def row(self, name: str, limit_s: float | None, *, by_processor: bool = False) -> Row:
        """Return the line of the table; None: there is no limit."""
        held = self.processor if by_processor else self.wall
        limit = median(held) if limit_s is None else limit_s
        return Row(
            name=name,
            plain_s=limit,
            ours_s=median(held),
            faster=limit / median(held),
            spread=(limit / max(held), limit / min(held)),
            faster_processor=limit / median(self.processor),
            goal=None if limit_s is None else 1.0,
            note=f"{median(self.processor):.2f} s of the processor, {median(self.wall):.2f} s on the clock",
            figures={"wall_s": self.wall, "processor_s": self.processor},
        )


def measure_start(options: argparse.Namespace) -> Iterator[Row]:
    """Yield torch's import alone, what needs none of it, a plan of the demo, and the demo by one process and by two."""
    runs = options.pairs
    yield _times(_TORCH, runs).row("import torch", None)
    yield _times([*_OSORA, "--help"], runs).row("--help", 0.3, by_processor=True)
    wrong = _times([*_OSORA, "generate", "sea", "--steps", "0"], runs, expected=2)
    yield wrong.row("a wrong request", 0.5, by_processor=True)
    yield _times([*_OSORA, *_DEMO, "--dry-run"], runs).row("generate --dry-run", _PLAN_S)
    alone = _times([*_OSORA, *_DEMO], runs)
    yield alone.row("generate", _DEMO_S)
    limit = median(alone.wall) + _RANKS_S
    yield _times([*_OSORA, *_DEMO, "--gpus", "2"], runs).row("generate --gpus 2", limit)


def _times(command: Sequence[str], runs: int, *, expected: int = 0) -> _Times:
    """Return the seconds of a command that exits with `expected`, after one run to warm up the disk's cache."""
    found, environment = [], {**os.environ, "PYTHONPATH": _packages()}
    for _ in range(runs + 1):
        with tempfile.TemporaryDirectory() as folder:
            before, start = _processor_s(), time.perf_counter()
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True)
            found.append((time.perf_counter() - start, _processor_s() - before))
        if done.returncode != expected:
            raise SystemExit(f"{' '.join(command)} exited with {done.returncode}: {done.stderr.decode()}")
    wall, processor = zip(*found[1:], strict=True)
    return _Times(wall, processor)


def _processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _packages() -> str:
    """Return where this process finds packages: a command starts in an empty folder."""
    return os.pathsep.join(os.path.abspath(path) for path in sys.path)
