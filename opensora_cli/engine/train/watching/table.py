"""A line of the log as people read it."""

from collections.abc import Callable, Mapping

from opensora_cli.core.durations import duration


def _figure(value: float) -> str:
    return f"{value:.4g}"


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _gib(value: float) -> str:
    return f"{value:.1f} GiB"


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
