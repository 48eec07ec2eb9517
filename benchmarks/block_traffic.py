"""Counts the kernels of one block of the released transformer, and the bytes that they move, on a GPU without compile.

    python benchmarks/block_traffic.py --json block_traffic.json

The blocks run on fake CUDA tensors in bf16: nothing is computed, and what each kernel reads and writes is added up. At
least, products of matrices and attention move what they read and write, in as many kernels: what would be left if
compiled code did all the rest on the way.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from opensora_cli.engine.estimate.generation_work import evaluation_work
from opensora_cli.engine.estimate.work import Work
from opensora_cli.models.mmdit.config import MMDiTConfig

SCHEMA = "osora.bench.block-traffic/1"
TEXT_TOKENS = 512
VIDEO_TOKENS = {"256px": 33 * 12 * 21, "768px": 33 * 36 * 64}
"""Of a clip in the shape and length of the preset: frames, rows and columns."""
DEPTHS = {"double": "depth", "single": "depth_single_blocks"}
_DTYPE = torch.bfloat16
_GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Of one block, in one forward pass over one clip."""

    kind: str
    preset: str
    kernels: int
    moved_bytes: int
    least_bytes: int
    """What products of matrices and attention move of that."""

    def row(self) -> str:
        """Return it for the table."""
        times = self.moved_bytes / self.least_bytes
        moved, least = self.moved_bytes / _GB, self.least_bytes / _GB
        return f"| {self.kind}, {self.preset} | {self.kernels} | {moved:.2f} | {least:.2f} | {times:.2f} |"


def traffic(kind: str, preset: str) -> Traffic:
    """Return that of a block, `double` or `single`: what one more of them adds to an evaluation."""
    one = MMDiTConfig(depth=1, depth_single_blocks=1)
    work = _evaluation(one.replace({DEPTHS[kind]: 2}), preset) - _evaluation(one, preset)
    # Queries, keys and values are read, and what they attend to is written.
    attention = 4 * (VIDEO_TOKENS[preset] + TEXT_TOKENS) * one.hidden_size * _DTYPE.itemsize
    least = round(work.product_bytes) + attention
    moved = least + round(work.traffic_bytes)
    return Traffic(kind=kind, preset=preset, kernels=round(work.kernels), moved_bytes=moved, least_bytes=least)


def table() -> tuple[list[Traffic], list[str]]:
    """Return the figures of all blocks and sizes, and the lines of their table."""
    found = [traffic(kind, preset) for preset in VIDEO_TOKENS for kind in DEPTHS]
    head = ["| block | kernels | GB moved | GB at least | times as much |", "|---|---|---|---|---|"]
    return found, [*head, *(each.row() for each in found)]


def _evaluation(config: MMDiTConfig, preset: str) -> Work:
    return evaluation_work(config, VIDEO_TOKENS[preset], TEXT_TOKENS, _DTYPE)


def main(arguments: Sequence[str] | None = None) -> int:
    """Count, and print the table."""
    parser = argparse.ArgumentParser(description="kernels and bytes of a block, counted on fake CUDA tensors")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args(arguments)
    found, lines = table()
    print("\n".join(lines))
    if options.json:
        figures = {"schema": SCHEMA, "blocks": [asdict(each) for each in found]}
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
