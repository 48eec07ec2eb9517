"""Progress: the time left, plain lines in logs, bars on terminals."""

import io
import sys

import pytest
from rich.console import Console

from opensora_cli.cli import output
from opensora_cli.cli.command import Call
from opensora_cli.core.exceptions import RequestError
from opensora_cli.core.progress import ConsoleReporter


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def lines(clock: Clock | None = None, every_s: float = 10.0) -> ConsoleReporter:
    return ConsoleReporter(has_bars=False, every_s=every_s, clock=clock or Clock())


@pytest.fixture
def text():
    return io.StringIO()


def bars(text: io.StringIO, clock: Clock | None = None, *, width: int = 120) -> ConsoleReporter:
    console = Console(file=text, force_terminal=True, color_system=None, width=width)
    return ConsoleReporter(console, has_bars=True, clock=clock or Clock())


@pytest.mark.parametrize(("on_ranks", "printed"), [(False, "a note\n"), (True, "")])
def test_only_commands_that_run_on_ranks_are_silent_on_the_others(monkeypatch, capsys, on_ranks, printed):
    rank = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in rank.items():
        monkeypatch.setenv(name, value)
    Call((), {}, on_ranks=on_ranks).reporter.note("a note")
    assert capsys.readouterr().err == printed


def test_lines_are_few(capsys):
    clock = Clock()
    with lines(clock, 5).stage("denoise", total=20, unit="steps") as stage:
        for _ in range(20):
            clock.now += 1
            stage.advance()
    assert capsys.readouterr().err.splitlines() == [
        "denoise: 5/20 steps, 5.0 s, about 15.0 s left",
        "denoise: 10/20 steps, 10.0 s, about 10.0 s left",
        "denoise: 15/20 steps, 15.0 s, about 5.0 s left",
        "denoise: 20 steps, 20.0 s",
    ]


def test_bytes_are_shown_as_sizes(capsys):
    clock = Clock()
    with lines(clock, 1).stage("write", total=24_000_000_000, unit="bytes") as stage:
        for amount in (800_000_000, 2_400_000_000, 20_800_000_000):
            clock.now += 1.5
            stage.advance(amount)
    with lines(clock, 1).stage("fetch", unit="bytes") as stage:
        clock.now += 2
        stage.advance(250_000)
    assert capsys.readouterr().err.splitlines() == [
        "write: 0.8/24.0 GB, 1.5 s",
        "write: 3.2/24.0 GB, 3.0 s, about 13.0 s left",
        "write: 24.0 GB, 4.5 s",
        "fetch: 250.0 kB, 2.0 s",
        "fetch: 2.0 s",
    ]


@pytest.mark.parametrize("has_bars", [False, True])
def test_a_stage_that_takes_no_time_or_fails_leaves_no_line(has_bars, text, capsys):
    clock = Clock()
    reporter = ConsoleReporter(Console(file=text) if has_bars else None, has_bars=has_bars, clock=clock)

    def fail() -> None:
        with reporter.stage("load", total=3) as stage:
            clock.now += 1
            stage.advance()
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        fail()
    with reporter.stage("save", total=3) as stage:
        clock.now += 0.04
        stage.advance(3)
    with reporter.stage("text"):
        clock.now += 0.06
    reporter.warn("odd")
    printed = text.getvalue() + capsys.readouterr().err
    assert [line for line in printed.splitlines() if line.strip()] == ["text: 0.1 s", "warning: odd"]


def test_bars_on_a_terminal(text):
    clock = Clock()
    reporter = bars(text, clock)
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


def test_the_first_line_on_a_terminal_comes_before_torch(monkeypatch, capsys):
    for is_terminal, module, printed in ((False, None, ""), (True, None, "loading torch ...\n"), (True, sys, "")):
        monkeypatch.setattr("sys.stderr.isatty", lambda is_terminal=is_terminal: is_terminal)
        with monkeypatch.context() as patch:
            patch.delitem(sys.modules, "torch", raising=False)
            if module is not None:
                patch.setitem(sys.modules, "torch", module)
            with Call((), {}).loading():
                pass
        assert capsys.readouterr().err == printed


def test_no_text_steers_a_terminal(text, capsys):
    output.print_lines(["a\x1b[2J\nb", "c"])
    output.print_failure(RequestError("a\x1b[2J\rb\nc", hint="d\x9b\ne"))
    lines().warn("a\x1b\nb")
    captured = capsys.readouterr()
    assert captured.out == "a\\x1b[2J\\nb\nc\n"
    printed = ["error: a\\x1b[2J\\rb", "error: c", "       d\\x9b", "       e", "warning: a\\x1b\\nb"]
    assert captured.err.splitlines() == printed
    with bars(text, width=80).stage("read a\x1b]0;b\u202e.png", total=2) as stage:
        stage.advance()
    assert r"read a\x1b]0;b\u202e.png" in text.getvalue()
    assert "\x1b]0" not in text.getvalue()


def test_a_brief_reporter_leaves_out_stages_and_details(capsys):
    clock = Clock()
    reporter = ConsoleReporter(has_bars=False, is_brief=True, every_s=5, clock=clock)
    for line in ("model: demo", "threads: 3 (as set)", "attention: sdpa", "continue with: osora"):
        reporter.note(line)
    reporter.warn("odd")
    with reporter.stage("denoise", total=6, unit="steps") as stage:
        for _ in range(6):
            clock.now += 1
            stage.advance()
    assert capsys.readouterr().err.splitlines() == [
        "model: demo",
        "continue with: osora",
        "warning: odd",
        "denoise: 5/6 steps, 5.0 s, about 1.0 s left",
    ]
