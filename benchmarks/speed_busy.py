"""The part of `speed.py` about other programs: the demo's command beside a process that keeps one core busy."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median

from speed_pairs import Row

MOST_TIMES = 2.5
_CHOSEN = "threads: "
"""How the line begins by which the command says that it has chosen its threads."""


def measure_busy(options: argparse.Namespace) -> Iterator[Row]:
    """Yield denoising alone against beside a busy process, one that is there at first and one that comes later."""
    with tempfile.TemporaryDirectory() as folder:
        video = Path(folder) / "video.mp4"
        _denoising_s(video, begins=None)
        for begins in ("first", "later"):
            pairs = [
                (_denoising_s(video, begins=None), _denoising_s(video, begins=begins)) for _ in range(options.pairs)
            ]
            times = [beside / alone for alone, beside in pairs]
            faster = [1 / each for each in times]
            yield Row(
                name=f"one busy process that is there {begins}",
                plain_s=median(alone for alone, _ in pairs),
                ours_s=median(beside for _, beside in pairs),
                faster=median(faster),
                spread=(min(faster), max(faster)),
                goal=1 / MOST_TIMES,
                note=f"alone and beside: {median(times):.2f} times as long, {MOST_TIMES:g} at most",
                figures={"alone_and_beside_s": pairs},
            )


def _denoising_s(video: Path, *, begins: str | None) -> float:
    """Return the seconds of denoising of one run of the command, in a process that chooses its own threads."""
    command = [sys.executable, "-m", "opensora_cli", "generate", "a red ball", "--out", str(video), "--overwrite"]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment
    ) as run:
        assert run.stderr is not None
        if begins == "later":
            while not (line := run.stderr.readline()).startswith(_CHOSEN):
                if not line:
                    raise RuntimeError(f"{' '.join(command)} has not chosen threads")
        with _busy() if begins else nullcontext():
            run.communicate()
    if run.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with exit code {run.returncode}")
    sidecar = json.loads(Path(f"{video}.json").read_text(encoding="utf-8"))
    return float(sidecar["timings_s"]["denoise"])


@contextmanager
def _busy() -> Iterator[None]:
    """Keep one core busy inside the block."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            yield
        finally:
            process.kill()
