"""Stages and steps become signs that a rank gets on."""

import pytest

from opensora_cli.core.progress import BYTES, SilentReporter
from opensora_cli.engine.launch import reporting
from opensora_cli.engine.launch.reporting import WatchedReporter


@pytest.fixture
def beats(monkeypatch):
    told = []
    monkeypatch.setattr(
        reporting, "beat", lambda stage, step_s=None, *, on_device=False: told.append((stage, step_s, on_device))
    )
    return told


class Recorder(SilentReporter):
    def __init__(self):
        self.said = []

    def note(self, text):
        self.said.append(text)

    def warn(self, text):
        self.said.append(f"warning: {text}")

    def advance(self, amount=1):
        self.said.append(amount)


def test_longest_step_so_far_until_the_last(beats):
    times = iter([0.0, 5.0, 6.0, 14.0, 15.0])
    reporter = WatchedReporter(Recorder(), clock=lambda: next(times))
    with reporter.stage("denoise", total=4) as progress:
        for _ in range(4):
            progress.advance()
    assert beats == [
        ("denoise", None, True),
        ("denoise", 5.0, True),
        ("denoise", 5.0, True),
        ("denoise", 8.0, True),
        ("denoise", None, True),
        ("denoise", None, False),
    ]


def test_reading_has_no_pace(beats):
    with WatchedReporter(SilentReporter()).stage("load", total=10, unit=BYTES) as progress:
        progress.advance(5)
    assert beats == [("load", None, False), ("load", None, False)]


def test_all_is_handed_on(beats):
    recorder = Recorder()
    reporter = WatchedReporter(recorder)
    reporter.note("a")
    reporter.warn("b")
    with reporter.stage("decode") as progress:
        progress.advance(3)
    assert recorder.said == ["a", "warning: b", 3]
