"""Acceleration report: seconds of stages and blocks, over repeated runs."""

from collections.abc import Mapping, Sequence

from opensora_cli.core.documents import Document
from opensora_cli.memory.monitor import Spread


class TimedPart(Document):
    """Times of a stage, or of a block of a model."""

    name: str
    count: int
    """Number of runs of a stage, or of calls of a block in all runs."""
    mean_s: float
    deviation_s: float
    """Sample standard deviation (n-1) of the runs or calls; 0 for a single one."""


class AccelerationReport(Document):
    """Mean and deviation over the runs after a warm-up run."""

    runs: int
    stages: tuple[TimedPart, ...]
    blocks: tuple[TimedPart, ...]
    """Blocks in the order of the models. On CUDA the times come from events of the device."""

    @classmethod
    def of(
        cls, stages: Mapping[str, Sequence[float]], blocks: Mapping[str, Spread], *, runs: int
    ) -> "AccelerationReport":
        """Return the report from the seconds of each stage in each run, and the calls of blocks in all runs."""
        spreads = {name: Spread.of(seconds) for name, seconds in stages.items()}
        return cls(runs=runs, stages=_parts(spreads), blocks=_parts(blocks))

    def lines(self) -> list[str]:
        """Return two tables, in milliseconds."""
        if not self.stages:
            return []
        found = [f"{f'stage, {self.runs} runs':40}{'runs':>7}{'mean ms':>14}{'deviation':>12}"]
        found += [_line(part) for part in self.stages]
        if self.blocks:
            found.append(f"{'block':40}{'calls':>7}{'mean ms':>14}{'deviation':>12}")
            found += [_line(part) for part in self.blocks]
        return found


def _parts(spreads: Mapping[str, Spread]) -> tuple[TimedPart, ...]:
    return tuple(
        TimedPart(name=name, count=each.count, mean_s=each.mean_s, deviation_s=each.deviation_s)
        for name, each in spreads.items()
    )


def _line(part: TimedPart) -> str:
    return f"  {part.name:38}{part.count:>7}{part.mean_s * 1e3:>14,.3f}{part.deviation_s * 1e3:>12,.3f}"
