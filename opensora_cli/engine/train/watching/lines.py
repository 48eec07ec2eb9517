"""What is said of every few steps: their means, how fast they were, and what is left to do."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from opensora_cli.core.progress import Reporter
from opensora_cli.engine.train.reports import StepReport
from opensora_cli.engine.train.watching.table import cells

Line = Mapping[str, object]
"""`step`, and what is said of it. A line that is not of training has an `event`: `skipped` or `validation`."""

BESIDE_TRAINING = ("checkpoint", "validation", "samples")
"""Parts of a step's seconds in which nothing is trained: they do not count in samples and tokens per second."""


class LineSink(Protocol):
    """Keeps lines."""

    def begin(self, step: int) -> None:
        """Know that steps after `step` follow: what there is of later ones is of another course of the run."""

    def write(self, line: Line) -> None:
        """Keep a line."""

    def close(self) -> None:
        """Finish what is written; also after an error."""


class StepLines:
    """Makes a line of the means of every few steps, and one of each validation and of each step that was skipped.

    A step that was skipped is in the mean of no loss, and is counted. On a terminal the line in the making is shown
    after each step.

    Args:
        sinks: keep the lines.
        every: steps between two of them.
        steps: of the run.
        memory: returns the peak of memory in GiB, by the name of what it counts.
        mfu: returns the share of the devices' peak that training makes use of, from samples and tokens of all ranks
            and the seconds that they took; None: it cannot be known.
        reporter: shown the lines.
    """

    def __init__(
        self,
        sinks: Sequence[LineSink],
        *,
        every: int,
        steps: int,
        memory: Callable[[], Mapping[str, float]],
        mfu: Callable[[int, int, float], float] | None,
        reporter: Reporter,
    ) -> None:
        self._sinks = sinks
        self._every = every
        self._total_steps = steps
        self._memory = memory
        self._mfu = mfu
        self._reporter = reporter
        self._begin_window()

    def on_step(self, report: StepReport) -> None:
        """Count a step, and write a line where one is due."""
        self._steps += 1
        self._samples += report.samples
        self._tokens += report.tokens
        _add(self._seconds, report.seconds)
        if report.skipped:
            self._skipped += 1
            self._write({"step": report.step, "event": "skipped", "samples": list(report.paths)})
        _add(self._sums, report.figures)
        _add(self._counts, dict.fromkeys(report.figures, 1))
        line = self._line(report)
        shown = cells(line)
        self._reporter.figures(shown)
        if report.step % self._every == 0:
            self._write(line)
            self._reporter.note("  ".join(f"{name} {value}" for name, value in shown.items()))
            self._begin_window()

    def on_validation(self, step: int, figures: Mapping[str, float]) -> None:
        """Write a line of its own."""
        self._write({"step": step, "event": "validation", **figures})
        told = "  ".join(f"{name} {value:.5g}" for name, value in figures.items())
        self._reporter.note(f"validation at step {step}  {told}")

    def close(self) -> None:
        """Close the sinks."""
        for sink in self._sinks:
            sink.close()

    def _begin_window(self) -> None:
        self._steps = self._skipped = self._samples = self._tokens = 0
        self._sums: dict[str, float] = {}
        self._counts: dict[str, float] = {}
        self._seconds: dict[str, float] = {}

    def _line(self, report: StepReport) -> dict[str, object]:
        parts = dict(self._seconds)
        total = parts.pop("total")
        parts["other"] = total - sum(parts.values())
        trained = total - sum(parts.get(name, 0.0) for name in BESIDE_TRAINING)
        return {
            "step": report.step,
            "epoch": report.epoch,
            **{name: round(value / self._counts[name], 6) for name, value in self._sums.items()},
            "learning_rate": report.learning_rate,
            "seconds_per_step": round(total / self._steps, 4),
            **self._speed(trained),
            "data_wait": round(parts.get("data", 0.0) / trained, 4) if trained > 0 else 0.0,
            **self._memory(),
            "eta_s": round((self._total_steps - report.step) * total / self._steps, 1),
            "seconds": {name: round(seconds / self._steps, 6) for name, seconds in parts.items()},
            "skipped": self._skipped,
        }

    def _speed(self, seconds: float) -> dict[str, float]:
        if seconds <= 0:
            return {}
        speed = {
            "samples_per_s": round(self._samples / seconds, 3),
            "tokens_per_s": round(self._tokens / seconds, 1),
        }
        return (
            speed if self._mfu is None else {**speed, "mfu": round(self._mfu(self._samples, self._tokens, seconds), 4)}
        )

    def _write(self, line: Line) -> None:
        for sink in self._sinks:
            sink.write(line)


def _add(sums: dict[str, float], values: Mapping[str, float]) -> None:
    for name, value in values.items():
        sums[name] = sums.get(name, 0.0) + value
