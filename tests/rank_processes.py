"""A test file as several ranks: processes that run it as a program."""

import os
import subprocess
import sys
from pathlib import Path


def run_as_ranks(file: str, *arguments: object, ranks: int) -> None:
    """Run `file` with `arguments` and, last, the number of the rank; each process ends by printing `done`."""
    command = [sys.executable, file, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    processes = [
        subprocess.Popen(
            [*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        for rank in range(ranks)
    ]
    try:
        for process in processes:
            out, _ = process.communicate(timeout=300)
            assert process.returncode == 0, out
            assert out.endswith("done\n")
    finally:
        for process in processes:
            process.kill()
