"""`osora train --plot`: loss, learning rate and gradient norm of runs as a chart. It does not need torch."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from opensora_cli.checkpoint.formats.colossal import SETTINGS_FILE
from opensora_cli.core.documents import Document
from opensora_cli.core.exceptions import FileProblem, RequestError
from opensora_cli.core.files import require_writable
from opensora_cli.core.reading import read_text
from opensora_cli.engine.train.early import LOG_FILE, MAX_LOG_BYTES
from opensora_cli.media.plots import new_figure, write_figure

_CURVES = {"loss": "loss", "learning_rate": "learning rate", "grad_norm": "gradient norm"}
_ENDINGS = (".png", ".svg", ".pdf")


class TrainPlot(Document):
    """Chart that was written."""

    SCHEMA = "osora.train-plot/1"

    plot: Path
    runs: tuple[Path, ...]

    def lines(self) -> list[str]:
        return [str(self.plot)]


def plot_runs(runs: Sequence[str], path: Path, *, overwrite: bool = False) -> TrainPlot:
    """Draw the logs of runs, given by their folders, in one chart; validation losses are dashed.

    Raises RequestError for an ending other than .png, .svg or .pdf, FileProblem for a run without a log, OutputError
    if the chart exists and `overwrite` is false, and HardwareError if matplotlib is missing.
    """
    if path.suffix.lower() not in _ENDINGS:
        raise RequestError(f"--plot {path} must end in {', '.join(_ENDINGS)}")
    require_writable(path, overwrite=overwrite)
    logs = {run: _read(Path(run)) for run in runs}
    figure = new_figure(height=9.0)
    rows = figure.subplots(len(_CURVES), sharex=True)
    for run, lines in logs.items():
        for axes, name in zip(rows, _CURVES, strict=True):
            (curve,) = axes.plot(*_points(lines, None, name), label=run)
            if name == "loss" and any(line.get("event") == "validation" for line in lines):
                validated = _points(lines, "validation", name)
                axes.plot(*validated, "o--", color=curve.get_color(), markersize=3, label=f"{run}, validation")
    for axes, title in zip(rows, _CURVES.values(), strict=True):
        axes.set_ylabel(title)
        axes.grid(alpha=0.3)
    rows[0].legend()
    rows[-1].set_xlabel("step")
    write_figure(figure, path, replace=overwrite)
    return TrainPlot(plot=path, runs=tuple(map(Path, logs)))


def _read(run: Path) -> list[Mapping[str, Any]]:
    """Return the lines of a log, except broken ones: a crash or a run in progress may leave a partial line."""
    path = run / LOG_FILE if run.is_dir() else run
    if (run / SETTINGS_FILE).exists() and not path.exists():
        raise FileProblem(f"{run} has no log yet", hint="a run logs every loop.log_every steps")
    lines: list[Mapping[str, Any]] = []
    for text in read_text(path, max_bytes=MAX_LOG_BYTES, hint="name the folder of a run").splitlines():
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict):
            lines.append(line)
    if not _points(lines, None, "loss")[0]:
        raise FileProblem(f"{path} has no line of a step with a loss", hint="name the folder of a run")
    return lines


def _points(lines: Sequence[Mapping[str, Any]], event: str | None, name: str) -> tuple[list[float], list[float]]:
    """Return the steps and the finite values of a figure in the lines of an event; None means training."""
    values = {
        line["step"]: value
        for line in lines
        if line.get("event") == event and isinstance(line.get("step"), int | float)
        if isinstance(value := line.get(name), int | float) and math.isfinite(value)
    }
    return [*values], [*values.values()]
