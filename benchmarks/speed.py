"""Compare osora's defaults with plain ways built from the same modules, in one process on the CPU.

    python benchmarks/speed.py --json speed.json
    python benchmarks/speed.py --part loop --part block --tokens 1152 --pairs 5

Each part compares in alternating pairs, after a warm-up of both. For each comparison it prints the median wall-clock
seconds, and the median, lowest and highest ratio of the pairs. It also prints the ratio of CPU seconds, which depend
less on other programs. The part `start` compares whole commands with limits in seconds, in the column `plain s`: CPU
seconds of commands that refuse or explain, else wall-clock seconds of an idle machine. The exit code is 1 if a part
misses its goal in wall-clock time.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

import torch
from speed_loop import measure_block, measure_loop
from speed_pairs import Row, report

SCHEMA = "osora.bench.speed/1"
_TORCH = [sys.executable, "-c", "import torch"]
_OSORA = [sys.executable, "-m", "opensora_cli"]
_DEMO = ["generate", "raining, sea", "--model", "demo", "--device", "cpu", "--quiet"]
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


PARTS = {"loop": measure_loop, "block": measure_block, "start": measure_start}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table line by line, and return 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=list(PARTS), help="may be repeated; default: all")
    parser.add_argument("--pairs", type=int, default=7, help="of each comparison")
    parser.add_argument("--threads", type=int, help="that compute; default: torch's choice")
    parser.add_argument("--steps", type=int, default=50, help="of the loop")
    parser.add_argument("--tokens", type=int, default=8832, help="of the block, text included")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    rows = ((name, row) for name in options.part or PARTS for row in PARTS[name](options))
    return 0 if report(rows, options.json, schema=SCHEMA, more={}) else 1


if __name__ == "__main__":
    sys.exit(main())
