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
from statistics import median

from speed_pairs import Row

_TORCH = [sys.executable, "-c", "import torch"]
_OSORA = [sys.executable, "-m", "opensora_cli"]
_DEMO = ["generate", "raining, sea", "--model", "demo", "--device", "cpu", "--no-cache", "--quiet"]
_PLAN_S = 2.3
_DEMO_S = 3.5
_RANKS_S = 3.0
"""Additional seconds of two processes."""


def measure_start(options: argparse.Namespace) -> Iterator[Row]:
    """Yield rows for torch's import, commands without it, a plan of the demo, and the demo in one and two processes."""
    yield _row("import torch", _TORCH, None, options.pairs)
    yield _row("--help", [*_OSORA, "--help"], 0.3, options.pairs, by_processor=True)
    wrong = [*_OSORA, "generate", "sea", "--steps", "0"]
    yield _row("a wrong request", wrong, 0.5, options.pairs, by_processor=True, expected=2)
    yield _row("generate --dry-run", [*_OSORA, *_DEMO, "--dry-run"], _PLAN_S, options.pairs)
    alone = _row("generate", [*_OSORA, *_DEMO], _DEMO_S, options.pairs)
    yield alone
    yield _row("generate --gpus 2", [*_OSORA, *_DEMO, "--gpus", "2"], alone.ours_s + _RANKS_S, options.pairs)


def _row(
    name: str,
    command: Sequence[str],
    limit_s: float | None,
    runs: int,
    *,
    by_processor: bool = False,
    expected: int = 0,
) -> Row:
    """Return the seconds of a command that exits with `expected`, after a run to warm up the disk cache."""
    walls, processor = list[float](), list[float]()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    for _ in range(runs + 1):
        with tempfile.TemporaryDirectory() as folder:
            before, start = _processor_s(), time.perf_counter()
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True)
            walls.append(time.perf_counter() - start)
            processor.append(_processor_s() - before)
        if done.returncode != expected:
            raise SystemExit(f"{' '.join(command)} exited with {done.returncode}: {done.stderr.decode()}")
    held = (processor if by_processor else walls)[1:]
    limit = median(held) if limit_s is None else limit_s
    return Row(
        name=name,
        plain_s=limit,
        ours_s=median(held),
        faster=limit / median(held),
        spread=(limit / max(held), limit / min(held)),
        faster_processor=limit / median(processor[1:]),
        goal=None if limit_s is None else 1.0,
        note=f"{median(processor[1:]):.2f} s of the processor, {median(walls[1:]):.2f} s on the clock",
        figures={"wall_s": walls[1:], "processor_s": processor[1:]},
    )


def _processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
