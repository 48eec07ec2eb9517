"""A line of the log for every few steps: means, speed, and the time that is left."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from opensora_cli.core.formatting import duration
from opensora_cli.core.progress import Reporter
from opensora_cli.engine.train.watching.clocks import StepReport
from opensora_cli.parallel.scheduling import Slow

Line = Mapping[str, object]
"""`step`, and its figures. A line that is not of training has an `event`: `skipped` or `validation`."""

BESIDE_TRAINING = ("checkpoint", "validation", "samples")
"""Parts of a step's seconds in which nothing is trained: they do not count in samples and tokens per second."""


class LineSink(Protocol):
    """Keeps lines."""

    def start(self, step: int) -> None:
        """Continue after `step`: existing lines of later steps are void."""

    def write(self, line: Line) -> None:
        """Keep a line."""

    def close(self) -> None:
        """Finish what is written; also after an error."""


class StepLines:
    """Makes a line of the means of `every` few steps, and one of each validation and of each step that was skipped.

    A step that was skipped is in the mean of no loss, and is counted. On a terminal the unfinished line is shown after
    each step. `memory` returns peaks in GiB, by the name of what they count. `mfu` returns the share of the devices'
    peak that training makes use of, from samples and tokens of all ranks and the seconds that they took; None: it is
    unknown. `exchange` returns the bytes per second of exchanges between ranks by their name, and those that were slow,
    since its last call: the first of these is a warning.
    """

    def __init__(
        self,
        sinks: Sequence[LineSink],
        *,
        every: int,
        steps: int,
        memory: Callable[[], Mapping[str, float]],
        mfu: Callable[[int, int, float], float] | None,
        exchange: Callable[[], tuple[Mapping[str, float], Sequence[Slow]]] = lambda: ({}, ()),
        reporter: Reporter,
    ) -> None:
        self._sinks = sinks
        self._every = every
        self._total_steps = steps
        self._memory = memory
        self._mfu = mfu
        self._exchange = exchange
        self._has_warned = False
        self._reporter = reporter
        self._begin_window()

    def start(self, step: int) -> None:
        """Start the sinks."""
        for sink in self._sinks:
            sink.start(step)

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
            self._write({**line, **self._exchange_figures()})
            self._reporter.note("  ".join(f"{name} {value}" for name, value in shown.items()))
            self._begin_window()

    def on_validation(self, step: int, figures: Mapping[str, float]) -> None:
        """Write a line of its own."""
        self._write({"step": step, "event": "validation", **figures})
        shown = "  ".join(f"{name} {value:.5g}" for name, value in figures.items())
        self._reporter.note(f"validation at step {step}  {shown}")

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

    def _exchange_figures(self) -> dict[str, object]:
        rates, slow = self._exchange()
        if slow and not self._has_warned:
            self._has_warned = True
            first = slow[0]
            self._reporter.warn(
                f"an exchange ({first.name}) took {first.seconds:.3g} s, which usually takes {first.usual_s:.3g} s: a "
                "link or a rank is slow; the log counts further ones as slow_exchanges"
            )
        if not rates:
            return {}
        rounded = {name: round(rate / 1e9, 6) for name, rate in rates.items()}
        return {"exchange_gb_per_s": rounded, "slow_exchanges": len(slow)}

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


_figure, _count, _gib = "{:.4g}".format, "{:,.0f}".format, "{:.1f} GiB".format


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


_COLUMNS: dict[str, tuple[str, Callable[[float], str]]] = {
    "learning_rate": ("rate", _figure),
    "grad_norm": ("gradient norm", _figure),
    "seconds_per_step": ("s/step", _figure),
    "samples_per_s": ("samples/s", _figure),
    "tokens_per_s": ("tokens/s", _count),
    "mfu": ("MFU", _percent),
    "data_wait": ("data wait", _percent),
    "peak_allocated_gib": ("memory", _gib),
    "peak_resident_gib": ("memory", _gib),
    "eta_s": ("left", duration),
    "step": ("step", _count),
    "epoch": ("epoch", _count),
    "skipped": ("skipped", _count),
}
"""Name in a line -> how it is called, and written, for people. Others keep their name."""


def cells(line: Mapping[str, object]) -> dict[str, str]:
    """Return names and values of a line of training, in its order, without the parts of its seconds.

    What is seldom is left out where it is zero.
    """
    shown = {}
    for name, value in line.items():
        if isinstance(value, int | float) and (value or name not in ("skipped", "epoch")):
            title, written = _COLUMNS.get(name, (name, _figure))
            shown[title] = written(value)
    return shown
