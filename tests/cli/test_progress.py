"""Progress: the time left, plain lines in logs, bars on terminals."""

import io
import re
import sys

import pytest
from rich.console import Console

from opensora_cli.cli import output
from opensora_cli.cli.progress import BarReporter, LineReporter
from opensora_cli.core.formatting import duration
from opensora_cli.core.progress import SilentReporter


class Clock:
    """A clock that advances only when asked."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0, "0.0 s"),
        (2.44, "2.4 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 00 s"),
        (245, "4 min 05 s"),
        (3599.6, "1 h 00 min"),
        (3725, "1 h 02 min"),
    ],
)
def test_duration(seconds: float, expected: str) -> None:
    assert duration(seconds) == expected


def test_lines_are_few(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with LineReporter(every=5, clock=clock).stage("denoise", total=20, unit="steps") as stage:
        for _ in range(20):
            clock.now += 1
            stage.advance()
    assert capsys.readouterr().err.splitlines() == [
        "denoise: 5/20 steps, 5.0 s, about 15.0 s left",
        "denoise: 10/20 steps, 10.0 s, about 10.0 s left",
        "denoise: 15/20 steps, 15.0 s, about 5.0 s left",
        "denoise: 20 steps, 20.0 s",
    ]


def test_bytes_are_shown_as_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with LineReporter(every=1, clock=clock).stage("write", total=24_000_000_000, unit="bytes") as stage:
        for amount in (800_000_000, 2_400_000_000, 20_800_000_000):
            clock.now += 1.5
            stage.advance(amount)
    with LineReporter(every=1, clock=clock).stage("fetch", unit="bytes") as stage:
        clock.now += 2
        stage.advance(250_000)
    assert capsys.readouterr().err.splitlines() == [
        "write: 0.8/24.0 GB, 1.5 s",
        "write: 3.2/24.0 GB, 3.0 s, about 13.0 s left",
        "write: 24.0 GB, 4.5 s",
        "fetch: 250.0 kB, 2.0 s",
        "fetch: 2.0 s",
    ]


def test_short_stage_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with LineReporter(clock=clock).stage("load"):
        clock.now += 0.06
    assert capsys.readouterr().err == "load: 0.1 s\n"


@pytest.mark.parametrize("bars", [False, True])
def test_stage_of_no_time_is_not_printed(bars: bool, capsys: pytest.CaptureFixture[str]) -> None:
    clock, text = Clock(), io.StringIO()
    reporter = BarReporter(Console(file=text), clock=clock) if bars else LineReporter(clock=clock)
    with reporter.stage("save", total=3) as stage:
        clock.now += 0.04
        stage.advance(3)
    assert "save" not in text.getvalue() + capsys.readouterr().err


@pytest.mark.parametrize("bars", [False, True])
def test_failed_stage_leaves_no_line(bars: bool, capsys: pytest.CaptureFixture[str]) -> None:
    text = io.StringIO()
    reporter = BarReporter(Console(file=text)) if bars else LineReporter()

    def fail() -> None:
        with reporter.stage("load", total=3) as stage:
            stage.advance()
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        fail()
    assert "load:" not in text.getvalue() + capsys.readouterr().err


def test_bars_on_a_terminal() -> None:
    text = io.StringIO()
    clock = Clock()
    reporter = BarReporter(Console(file=text, force_terminal=True, color_system=None, width=120), clock=clock)
    with reporter.stage("denoise", total=3, unit="steps") as outer:
        outer.advance(2)
        reporter.note("[not markup]")
        with reporter.stage("save") as inner:
            clock.now += 1
            inner.advance()
    shown = text.getvalue()
    assert "2/3 steps" in shown
    assert "[not markup]" in shown
    assert "save: 1.0 s" in shown
    assert "denoise: 2 steps, 1.0 s" in shown


def test_bars_take_several_stages_one_after_the_other() -> None:
    text, clock = io.StringIO(), Clock()
    reporter = BarReporter(Console(file=text), clock=clock)
    for name in ("load", "text"):
        with reporter.stage(name):
            clock.now += 1
    reporter.warn("odd")
    assert [line.split(":")[0] for line in text.getvalue().splitlines() if line.strip()] == ["load", "text", "warning"]


def test_reporter_suits_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(output.make_reporter(quiet=True), SilentReporter)
    assert isinstance(output.make_reporter(quiet=False), LineReporter)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert isinstance(output.make_reporter(quiet=False), BarReporter)


def test_the_first_line_on_a_terminal_comes_before_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    text = io.StringIO()
    reporter = BarReporter(Console(file=text))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    output.note_start(reporter)
    assert text.getvalue() == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    output.note_start(reporter)
    assert text.getvalue() == "loading torch ...\n"
    monkeypatch.setitem(sys.modules, "torch", None)
    output.note_start(reporter)
    assert text.getvalue() == "loading torch ...\n"


def test_no_colour_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    text = io.StringIO()
    BarReporter(Console(file=text, force_terminal=True)).warn("odd")
    assert text.getvalue() == "warning: odd\n"


def test_names_that_a_stream_cannot_show_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="ascii"))
    output.print_lines(["é.mp4"])
    assert raw.getvalue() == b"\\xe9.mp4\n"


def test_what_a_file_says_steers_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_lines(["a\x1b[2J\nb", "c"])
    output.print_failure(["a\x1b[2J\rb", "c\n"], hint="d\x9b\ne")
    LineReporter().warn("a\x1b\nb")
    BarReporter().note("a\x1b\nb")
    captured = capsys.readouterr()
    assert captured.out == "a\\x1b[2J\\nb\nc\n"
    assert captured.err.splitlines() == [
        "error: a\\x1b[2J\\rb",
        "error: c\\n",
        "       d\\x9b",
        "       e",
        "warning: a\\x1b\\nb",
        "a\\x1b\\nb",
    ]


def test_the_name_of_a_stage_steers_no_terminal() -> None:
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, color_system=None, width=80)
    with BarReporter(console, clock=Clock()).stage("read a\x1b]0;b\u202e.png", total=2) as stage:
        stage.advance()
    shown = text.getvalue()
    assert r"read a\x1b]0;b\u202e.png" in shown
    assert "\x1b]0" not in shown


def test_figures_stand_above_the_bars() -> None:
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, color_system=None, width=40)
    reporter = BarReporter(console, clock=Clock())
    reporter.figures({"loss": "dropped, since nothing runs"})
    with reporter.stage("train", total=3, unit="steps") as stage:
        reporter.figures({"loss": "0.5", "gradient norm": "1.25", "[rate]": "0.001"})
        stage.advance()
        reporter.figures({"loss": "0.25", "gradient norm": "1.5", "[rate]": "0.001"})
    shown = text.getvalue()
    assert "dropped" not in shown
    # As many columns as there is room for: two, and the third below.
    assert re.search(r"loss +gradient norm *\n0.25 +1.5 *\n\[rate\] *\n0.001 *\n", shown)
    assert "0/3 steps" in shown or "1/3 steps" in shown


@pytest.mark.parametrize("reporter", [LineReporter(), SilentReporter()])
def test_figures_are_no_lines(reporter: LineReporter | SilentReporter, capsys: pytest.CaptureFixture[str]) -> None:
    with SilentReporter().stage("train"):
        reporter.figures({"loss": "0.5"})
    assert capsys.readouterr() == ("", "")
