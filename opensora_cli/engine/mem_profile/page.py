"""A profile as one page of HTML: charts as inline SVG, nothing from elsewhere."""

from collections.abc import Iterable, Sequence
from dataclasses import astuple
from html import escape

from opensora_cli.engine.mem_profile.report import MemProfile, StageProfile, Technique, Timeline, mib

_ALSO = ("parameters", "buffer", "allocator", "note", "batch")
_WIDTH, _BAR, _HEIGHT = 640, 22, 160
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; color: #222 }
h1, p { overflow-wrap: anywhere } svg { max-width: 100%; height: auto } .wide { overflow-x: auto }
table { border-collapse: collapse; margin: 1rem 0 } td, th { padding: .2rem .8rem; text-align: right }
td:first-child, th:first-child { text-align: left } tr { border-bottom: 1px solid #ddd }
.predicted { fill: #b8c9e6 } .measured { fill: #3465a4 } .line { fill: none; stroke: #3465a4; stroke-width: 1.5 }
.mark { stroke: #999; stroke-dasharray: 3 3 } text { font-size: 12px; fill: #222 }
@media (prefers-color-scheme: dark) { body { background: #1b1b1b; color: #ddd } text { fill: #ddd } }
"""


def html_page(profile: MemProfile) -> str:
    """Return the page."""
    parts = [
        f"<h1>Memory of {escape(profile.of)}</h1>",
        f"<p>{escape(profile.device)} ({escape(profile.device_name)}). {escape(profile.how)}.</p>",
        "<h2>Peaks</h2>",
        _bars(profile.stages),
    ]
    for stage in profile.stages:
        parts += [f"<h2>{escape(stage.name)}</h2>", *_stage(stage)]
    if profile.techniques:
        parts += ["<h2>Techniques</h2>", _techniques(profile.techniques)]
    if profile.attention:
        rows = [
            (cost.kind, f"{cost.tokens:,}", cost.reason or mib(cost.memory_bytes), _milliseconds(cost.seconds))
            for cost in profile.attention
        ]
        parts += ["<h2>Attention</h2>", _table(("kind", "tokens", "memory", "time"), rows)]
    lines = [line for line in profile.lines() if line.startswith(_ALSO)]
    parts += ["<h2>Also</h2>", *(f"<p>{escape(line)}</p>" for line in lines)]
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8"><title>osora mem-profile</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _stage(stage: StageProfile) -> Iterable[str]:
    if stage.not_measured:
        yield f"<p>Not measured: {escape(stage.not_measured)}.</p>"
    rows = [(part.name, mib(part.predicted_bytes), mib(part.measured_bytes)) for part in stage.parts]
    yield _table(
        ("", "predicted", "measured"), [*rows, ("peak", mib(stage.predicted_bytes), mib(stage.measured_bytes))]
    )
    if stage.timeline:
        yield _curve(stage.timeline)
    if stage.modules:
        shares = [(name, f"{count:,}", *map(mib, sizes)) for name, count, *sizes in map(astuple, stage.modules)]
        yield _table(("module", "parameters", "weights", "gradients", "optimizer", "activations"), shares)


def _bars(stages: Sequence[StageProfile]) -> str:
    most = max(max(stage.predicted_bytes, stage.measured_bytes or 0) for stage in stages) or 1
    drawn = []
    for index, stage in enumerate(stages):
        top = index * (2 * _BAR + 14)
        for row, (kind, size) in enumerate((("predicted", stage.predicted_bytes), ("measured", stage.measured_bytes))):
            y = top + row * _BAR
            width = (size or 0) / most * (_WIDTH - 300)
            drawn.append(f'<rect class="{kind}" x="130" y="{y}" width="{width:.1f}" height="{_BAR - 4}"/>')
            drawn.append(f'<text x="{136 + width:.1f}" y="{y + 13}">{kind} {mib(size)}</text>')
        drawn.append(f'<text x="0" y="{top + 20}">{escape(stage.name)}</text>')
    return _svg(drawn, title="Peaks of the stages", height=len(stages) * (2 * _BAR + 14))


def _curve(timeline: Timeline) -> str:
    sizes = timeline.live_bytes
    most = max(sizes) or 1
    steps = max(len(sizes) - 1, 1)
    points = " ".join(
        f"{index / steps * _WIDTH:.1f},{_HEIGHT - size / most * (_HEIGHT - 20):.1f}" for index, size in enumerate(sizes)
    )
    drawn = [f'<polyline class="line" points="{points}"/>', f'<text x="0" y="12">{mib(most)}</text>']
    for name, place in timeline.marks:
        x = place * _WIDTH
        drawn.append(f'<line class="mark" x1="{x:.1f}" y1="0" x2="{x:.1f}" y2="{_HEIGHT}"/>')
        anchor = "end" if place > 0.5 else "start"
        drawn.append(f'<text x="{x:.1f}" y="{_HEIGHT - 4}" text-anchor="{anchor}">{escape(name)}</text>')
    return _svg(drawn, title="Bytes in use over the stage", height=_HEIGHT)


def _techniques(techniques: Sequence[Technique]) -> str:
    rows = []
    for row in techniques:
        if row.saved_bytes is None or row.saved_share is None or row.time_added is None:
            rows.append((row.name, row.reason or "", "", "", ""))
        else:
            rows.append((row.name, mib(row.saved_bytes), f"{row.saved_share:.1%}", f"{row.time_added:+.1%}", row.of))
    return _table(("technique", "memory saved", "share", "time added", "of"), rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    inside = "\n".join([row(head, "th"), *(row(cells, "td") for cells in rows)])
    return f'<div class="wide"><table>\n{inside}\n</table></div>'


def _svg(drawn: Sequence[str], *, title: str, height: int) -> str:
    inside = "\n".join((f"<title>{escape(title)}</title>", *drawn))
    return f'<svg viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" role="img">\n{inside}\n</svg>'


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.1f} ms"
