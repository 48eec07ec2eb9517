"""Compare osora's defaults with plain ways built from the same modules, in one process on the CPU.

    python benchmarks/speed.py --json speed.json
    python benchmarks/speed.py --part loop --part block --tokens 1152 --pairs 5

Each part compares in alternating pairs, after a warm-up of both. For each comparison it prints the median wall-clock
seconds, and the median, lowest and highest ratio of the pairs. It also prints the ratio of CPU seconds, which depend
less on other programs. The exit code is 1 if a part misses its goal in wall-clock time.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from speed_loop import measure_block, measure_loop
from speed_pairs import Row, report
from speed_start import measure_start
from speed_vae import SIZES, measure_vae

SCHEMA = "osora.bench.speed/1"


class Part(NamedTuple):
    """Part that `--part` can name."""

    what: str
    measure: Callable[[argparse.Namespace], Iterator[Row]]


PARTS = {
    "loop": Part("the demo's denoising, t2v and i2v, against three batched branches at every step", measure_loop),
    "block": Part("an evaluation of blocks of the released size", measure_block),
    "start": Part("commands as a whole, help and refusals to the demo on two ranks, against limits", measure_start),
    "vae": Part("the autoencoder, encode and decode, whole and in tiles: time and memory", measure_vae),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table line by line, and return 1 if a goal is missed."""
    parts = "\n".join(f"  {name:<10} {part.what}" for name, part in PARTS.items())
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\nparts:\n{parts}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", action="append", choices=list(PARTS), help="may be repeated; default: all")
    parser.add_argument("--pairs", type=int, default=7, help="of each comparison")
    parser.add_argument("--threads", type=int, help="that compute; default: torch's choice")
    parser.add_argument("--steps", type=int, default=50, help="of the loop")
    parser.add_argument("--tokens", type=int, default=8832, help="of the block, text included")
    parser.add_argument("--pixels", type=int, action="append", choices=list(SIZES), help="of the vae; default: all")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    rows = ((name, row) for name in options.part or PARTS for row in PARTS[name].measure(options))
    return 0 if report(rows, options.json, schema=SCHEMA, more={}) else 1


if __name__ == "__main__":
    sys.exit(main())
