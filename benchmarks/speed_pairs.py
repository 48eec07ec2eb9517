"""Comparison of two ways to do the same, in alternating pairs in one process, and the table of such comparisons."""

import json
import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Line of the table: a comparison, and the speedup of our way."""

    name: str
    plain_s: float
    ours_s: float
    """Median wall-clock seconds of our way; `plain_s` is the median of the plain way."""
    faster: float
    """Median of the ratios of the pairs, plain over ours."""
    spread: tuple[float, float]
    """Lowest and highest ratio of the pairs."""
    faster_processor: float | None = None
    """Median ratio of CPU seconds, which depend less on other programs; None means not counted."""
    goal: float | None = None
    """Required value of `faster`; None means no requirement."""
    note: str = ""
    """Cost or change, such as an error."""
    figures: dict[str, Any] = field(default_factory=dict)
    """More figures, only for the JSON."""

    def line(self, part: str) -> str:
        """Return the line of the table for people, in the columns of `HEAD`."""
        low, high = self.spread
        processor, goal = ("" if each is None else f"{each:.2f}" for each in (self.faster_processor, self.goal))
        return (
            f"{part:<10} {self.name:<34} {self.plain_s:>9.3f} {self.ours_s:>9.3f} {self.faster:>7.2f} "
            f"{f'{low:.2f}-{high:.2f}':>11} {processor:>9} {goal:>5}  {self.note}"
        ).rstrip()


HEAD = (
    f"{'part':<10} {'what':<34} {'plain s':>9} {'ours s':>9} {'faster':>7} {'spread':>11} {'processor':>9} "
    f"{'goal':>5}  note"
)


def report(rows: Iterable[tuple[str, Row]], path: Path | None, *, schema: str, more: Mapping[str, Any]) -> bool:
    """Print each row, with its part, as soon as it is measured, write all to the JSON file `path`, and return whether
    all goals are reached.
    """
    load, found = os.getloadavg()[0], list[tuple[str, Row]]()
    print(HEAD, flush=True)
    for part, row in rows:
        found.append((part, row))
        print(row.line(part), flush=True)
    if path:
        figures = {
            "schema": schema,
            "torch": torch.__version__,
            "processor": platform.processor() or "cpu",
            "processors": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "load_before": load,
            **more,
            "rows": [{"part": part, **asdict(row)} for part, row in found],
        }
        path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return all(row.goal is None or row.faster >= row.goal for _, row in found)


def compared(
    name: str,
    plain: Callable[[], object],
    ours: Callable[[], object],
    *,
    pairs: int,
    goal: float | None = None,
    note: str = "",
    figures: dict[str, Any] | None = None,
) -> Row:
    """Run both ways once to warm up, then `pairs` times. The order changes with each pair."""
    ways = {"plain": plain, "ours": ours}
    walls: dict[str, list[float]] = {key: [] for key in ways}
    processor: dict[str, list[float]] = {key: [] for key in ways}
    for way in ways.values():
        way()
    for index in range(pairs):
        for key in list(ways)[:: 1 if index % 2 == 0 else -1]:
            wall, cpu = time.perf_counter(), time.process_time()
            ways[key]()
            walls[key].append(time.perf_counter() - wall)
            processor[key].append(time.process_time() - cpu)
    ratios = [theirs / own for theirs, own in zip(walls["plain"], walls["ours"], strict=True)]
    by_processor = [theirs / own for theirs, own in zip(processor["plain"], processor["ours"], strict=True)]
    return Row(
        name=name,
        plain_s=median(walls["plain"]),
        ours_s=median(walls["ours"]),
        faster=median(ratios),
        spread=(min(ratios), max(ratios)),
        faster_processor=median(by_processor),
        goal=goal,
        note=note,
        figures={**(figures or {}), "wall_s": walls, "processor_s": processor},
    )
