"""Stages and steps become signs of a rank's progress."""

import pytest

from opensora_cli.core.progress import BYTES, SilentReporter
from opensora_cli.engine.launch import rank
from opensora_cli.engine.launch.rank import WatchedReporter


@pytest.fixture
def beats(monkeypatch):
    sent = []
    monkeypatch.setattr(
        rank, "beat", lambda stage, step_s=None, *, on_device=False: sent.append((stage, step_s, on_device))
    )
    return sent


def test_a_step_may_take_as_long_as_the_longest_before_it(beats):
    times = iter([0.0, 5.0, 6.0, 14.0, 15.0])
    reporter = WatchedReporter(SilentReporter(), on_device=("denoise",), clock=lambda: next(times))
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


def test_reading_has_no_limit(beats):
    with WatchedReporter(SilentReporter()).stage("load", total=10, unit=BYTES) as progress:
        progress.advance(5)
    assert beats == [("load", None, False), ("load", None, False)]
