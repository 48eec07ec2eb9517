"""Two ways to do the same, compared in alternating pairs in one process: what each part of `speed.py` is made of."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of the table: what was compared, and how much faster ours is."""

    name: str
    plain_s: float
    ours_s: float
    """Medians, on the clock."""
    faster: float
    """Median of the ratios of the pairs, plain over ours."""
    spread: tuple[float, float]
    """The lowest and the highest of them."""
    faster_processor: float | None = None
    """The same by seconds of the processor, which mind other programs less; None: not counted."""
    goal: float | None = None
    """What `faster` should be; None: nothing is asked."""
    note: str = ""
    """What it costs or changes, such as an error."""
    figures: dict[str, Any] = field(default_factory=dict)
    """More, for the JSON alone."""

    @property
    def is_reached(self) -> bool:
        """Whether it is as fast as it should be."""
        return self.goal is None or self.faster >= self.goal

    def line(self, part: str) -> str:
        """Return it for people; see `HEAD`."""
        low, high = self.spread
        processor, goal = ("" if each is None else f"{each:.2f}" for each in (self.faster_processor, self.goal))
        return (
            f"{part:<10} {self.name:<34} {self.plain_s:>9.3f} {self.ours_s:>9.3f} {self.faster:>7.2f} "
            f"{f'{low:.2f}-{high:.2f}':>11} {processor:>9} {goal:>5}  {self.note}"
        ).rstrip()

    def document(self, part: str) -> dict[str, Any]:
        """Return it for the JSON."""
        return {"part": part, **asdict(self)}


HEAD = (
    f"{'part':<10} {'what':<34} {'plain s':>9} {'ours s':>9} {'faster':>7} {'spread':>11} {'processor':>9} "
    f"{'goal':>5}  note"
)


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
    """Run both once to warm up, then `pairs` times in turns, each first in every second pair."""
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
