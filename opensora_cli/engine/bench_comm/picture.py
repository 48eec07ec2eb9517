"""A benchmark as a picture: bus bandwidth over size, as SVG alone or in a page of HTML; nothing from elsewhere."""

from collections.abc import Iterable, Sequence
from html import escape
from math import ceil, floor, log2, log10

from opensora_cli.engine.bench_comm.report import BenchReport, Row
from opensora_cli.settings.bench_comm import Collective

_WIDTH, _HEIGHT = 860, 460
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 190, 40, 50
_COLOURS = (
    "#3465a4",
    "#cc0000",
    "#4e9a06",
    "#75507b",
    "#c17d11",
    "#06989a",
    "#8f5902",
    "#555753",
    "#d3198f",
    "#888a85",
)
_SVG_STYLE = """
text { font: 12px system-ui, sans-serif; fill: #222 } .axis { stroke: #888 } .grid { stroke: #ddd }
.curve { fill: none; stroke-width: 1.6 } .bound { stroke: #888; stroke-dasharray: 5 4 } .back { fill: #fff }
@media (prefers-color-scheme: dark) { text { fill: #ddd } .grid { stroke: #444 } .back { fill: #1b1b1b } }
"""
_PAGE_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem; color: #222 }
svg { max-width: 100%; height: auto } pre { overflow-x: auto; font-size: 12px }
@media (prefers-color-scheme: dark) { body { background: #1b1b1b; color: #ddd } }
"""


def svg_picture(report: BenchReport) -> str:
    """Return the picture. Both axes are logarithmic; a dashed line is what the links should give at best."""
    expected = max((verdict.expected_gb_per_s or 0.0 for verdict in report.verdicts), default=0.0)
    axes = _Axes(report.rows, expected)
    shown = "function, not speed" if report.header.is_gloo else f"{report.header.ranks} ranks"
    drawn = [
        f"<title>Bus bandwidth over size</title><style>{_SVG_STYLE}</style>",
        f'<rect class="back" width="{_WIDTH}" height="{_HEIGHT}"/>',
        f'<text x="{_LEFT}" y="20">bus bandwidth (GB/s) over size, {report.header.backend}: {escape(shown)}</text>',
        *axes.lines(),
    ]
    if expected:
        y = axes.y(expected)
        drawn.append(f'<line class="bound" x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}"/>')
        drawn.append(f'<text x="{_LEFT + 8}" y="{y - 5:.1f}">expected {expected:.0f} GB/s</text>')
    for index, collective in enumerate(dict.fromkeys(row.collective for row in report.rows)):
        drawn += _curve(collective, [row for row in report.rows if row.collective is collective], axes, index)
    inside = "\n".join(drawn)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
        f'height="{_HEIGHT}" role="img">\n{inside}\n</svg>\n'
    )


def html_page(report: BenchReport) -> str:
    """Return a page with the picture and everything that the command prints."""
    lines = escape("\n".join(report.lines()))
    return (
        '<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8"><title>osora bench-comm</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_PAGE_STYLE}</style></head>\n<body>\n<h1>Communication between {report.header.ranks} ranks</h1>\n"
        f"{svg_picture(report)}<pre>{lines}</pre>\n</body>\n</html>\n"
    )


class _Axes:
    """Where sizes and bandwidths lie in the picture."""

    def __init__(self, rows: Sequence[Row], expected: float) -> None:
        sizes = [row.size_bytes for row in rows] or [1]
        rates = [row.bus_bandwidth_gb_per_s for row in rows if row.bus_bandwidth_gb_per_s > 0] or [1.0]
        self._first, last = floor(log2(min(sizes))), ceil(log2(max(sizes)))
        self._last = max(last, self._first + 1)
        self._low, high = floor(log10(min(rates))), ceil(log10(max(*rates, expected or min(rates))))
        self._high = max(high, self._low + 1)

    def x(self, size: int) -> float:
        """Return where a size lies."""
        return _LEFT + (log2(size) - self._first) / (self._last - self._first) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, rate: float) -> float:
        """Return where a bandwidth lies."""
        share = (log10(rate) - self._low) / (self._high - self._low)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    def lines(self) -> Iterable[str]:
        """Yield the axes with their numbers."""
        bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
        for power in range(self._low, self._high + 1):
            y = self.y(10.0**power)
            yield f'<line class="grid" x1="{_LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>'
            yield f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g}</text>'
        for power in range(self._first, self._last + 1, max((self._last - self._first) // 8, 1)):
            x = self.x(2**power)
            yield f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{_size(2**power)}</text>'
        yield f'<line class="axis" x1="{_LEFT}" y1="{bottom}" x2="{right}" y2="{bottom}"/>'
        yield f'<line class="axis" x1="{_LEFT}" y1="{_TOP}" x2="{_LEFT}" y2="{bottom}"/>'


def _curve(collective: Collective, rows: Sequence[Row], axes: _Axes, index: int) -> Iterable[str]:
    colour = _COLOURS[index % len(_COLOURS)]
    seen = [row for row in rows if row.bus_bandwidth_gb_per_s > 0]
    points = [(axes.x(row.size_bytes), axes.y(row.bus_bandwidth_gb_per_s)) for row in seen]
    if len(points) > 1:
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        yield f'<polyline class="curve" stroke="{colour}" points="{joined}"/>'
    for x, y in points:
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>'
    y = _TOP + 18 * (index + 1)
    yield f'<rect x="{_WIDTH - _RIGHT + 10}" y="{y - 9}" width="10" height="10" fill="{colour}"/>'
    yield f'<text x="{_WIDTH - _RIGHT + 26}" y="{y}">{escape(collective.value)}</text>'


def _size(count: int) -> str:
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count >= 2**power:
            return f"{count >> power} {unit}"
    return f"{count} B"
