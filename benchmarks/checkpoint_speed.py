"""Measures how fast checkpoints are written, as a share of what the same disk gives to `cp` in the same run.

    python benchmarks/checkpoint_speed.py
    python benchmarks/checkpoint_speed.py --mib 16384 --rounds 9 --folder /mnt/disk --cold

Two tasks, each in pairs with `cp --reflink=never SOURCE TARGET && sync TARGET`, in alternating order:

- `reshard`: one fp32 safetensors file to shards of a quarter of its size, without hashing.
- `cast`: the same file to one bf16 file.

Both end when everything is on the disk. Throughput counts the bytes that are read, so `ratio` is the time of `cp` over
the time of the task; the medians over all rounds are to be compared with `target`.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from opensora_cli.checkpoint import lazy
from opensora_cli.checkpoint.contents import Format
from opensora_cli.checkpoint.formats.safetensors import open_safetensors, write_safetensors
from opensora_cli.checkpoint.lazy import LazyTensor
from opensora_cli.checkpoint.writing import write_checkpoint

SCHEMA = "osora.bench.checkpoint_speed/1"
TARGETS = {"reshard": 0.7, "cast": 0.5}
_WIDTH = 3072
_TENSOR_MIB = 4 * _WIDTH * _WIDTH // 2**20


def make_source(path: Path, *, mib: int) -> int:
    """Write an fp32 checkpoint of matrices and biases as in the released model, and return how long it is."""
    generator = torch.Generator().manual_seed(0)
    weight = LazyTensor.of(torch.randn(_WIDTH, _WIDTH, generator=generator))
    bias = LazyTensor.of(torch.randn(_WIDTH, generator=generator))
    entries = {}
    for index in range(max(1, round(mib / _TENSOR_MIB))):
        entries |= {f"blocks.{index}.weight": weight, f"blocks.{index}.bias": bias}
    write_safetensors(path, entries, metadata={})
    return path.stat().st_size


def copy(source: Path, target: Path) -> None:
    """Copy with the system's own command, down to the disk."""
    subprocess.run(["cp", "--reflink=never", source, target], check=True)
    subprocess.run(["sync", target], check=True)


def reshard(source: Path, target: Path) -> None:
    """Write `source` again in four shards."""
    entries, metadata = open_safetensors(source)
    shard_bytes = source.stat().st_size // 4
    write_checkpoint(entries, target, format=Format.SAFETENSORS_SHARDS, shard_bytes=shard_bytes, metadata=metadata)


def cast(source: Path, target: Path) -> None:
    """Write `source` again in bf16."""
    entries, metadata = open_safetensors(source)
    rounded = {name: lazy.cast(entry, torch.bfloat16, name=name) for name, entry in entries.items()}
    write_checkpoint(rounded, target, format=Format.SAFETENSORS, metadata=metadata)


def seconds(task: Callable[[Path, Path], None], source: Path, target: Path, *, cold: bool) -> float:
    """Return how long `task` takes, from a quiet disk to a quiet disk; its target is removed."""
    os.sync()
    if cold:
        with source.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    start = time.perf_counter()
    task(source, target)
    elapsed = time.perf_counter() - start
    if target.is_dir():
        shutil.rmtree(target)
    else:
        target.unlink()
    return elapsed


def measure(folder: Path, *, mib: int, rounds: int, cold: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """Return the report of all tasks."""
    source, target = folder / "source.safetensors", folder / "target"
    read_bytes = make_source(source, mib=mib)
    for task in (copy, reshard, cast):
        seconds(task, source, target, cold=cold)  # what is slow only the first time
    report = {}
    for name, task in (("reshard", reshard), ("cast", cast)):
        times: dict[Callable[[Path, Path], None], list[float]] = {task: [], copy: []}
        for number in range(rounds):
            for each in (task, copy) if number % 2 else (copy, task):
                times[each].append(seconds(each, source, target, cold=cold))
            say(f"{name}, round {number + 1} of {rounds}: {times[task][-1]:.2f} s, cp {times[copy][-1]:.2f} s")
        ratios = [theirs / ours for ours, theirs in zip(times[task], times[copy], strict=True)]
        report[name] = {
            "target": TARGETS[name],
            "ratio": statistics.median(ratios),
            "ratios": ratios,
            "mb_per_s": read_bytes / statistics.median(times[task]) / 1e6,
            "cp_mb_per_s": read_bytes / statistics.median(times[copy]) / 1e6,
        }
    return {"read_bytes": read_bytes, "tasks": report}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        prog="checkpoint_speed.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=4096, help="size of the checkpoint (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="pairs of each task (%(default)s)")
    parser.add_argument("--folder", type=Path, help="where to write; default: where temporary files go")
    parser.add_argument("--cold", action="store_true", help="read the source from the disk each time, not from memory")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit code."""
    options = parse(arguments)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        report = measure(
            Path(folder),
            mib=options.mib,
            rounds=options.rounds,
            cold=options.cold,
            say=lambda text: print(text, file=sys.stderr, flush=True),
        )
    about = {
        "schema": SCHEMA,
        "cold": options.cold,
        "rounds": options.rounds,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    print(json.dumps(about | report, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
