"""Part of `speed.py` about overhead: commands as separate processes, compared with limits in seconds.

The limit takes the column `plain s`. Commands that refuse or explain are limited in CPU seconds, and commands that
compute in wall-clock seconds of an idle machine.
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
"""Additional seconds of two processes."""


@dataclass(frozen=True, slots=True)
class _Times:
    """Seconds of several runs of a command, with its descendants."""

    wall: tuple[float, ...]
    processor: tuple[float, ...]

    def row(self, name: str, limit_s: float | None, *, by_processor: bool = False) -> Row:
        """Return the row of the table; None means no limit."""
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
    """Yield rows for torch's import, commands without it, a plan of the demo, and the demo in one and two processes."""
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
    """Return the seconds of a command that exits with `expected`, after a run to warm up the disk cache."""
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
    """Return the import path of this process for commands, which start in an empty folder."""
    return os.pathsep.join(os.path.abspath(path) for path in sys.path)
