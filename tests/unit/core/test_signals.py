"""Ctrl-C and requests to end: recorded while a step runs, held back, and left to the process that trains."""

import signal
import threading

import pytest

from opensora_cli.core import signals
from opensora_cli.core.signals import END_REQUESTS, deferred_interrupts, held_back, interrupts


@pytest.mark.parametrize("number", [signal.SIGINT, *END_REQUESTS])
def test_the_first_signal_is_recorded_and_reported(number):
    reported = threading.Event()
    with deferred_interrupts(reported.set) as is_interrupted:
        assert not is_interrupted()
        signal.raise_signal(number)
        assert is_interrupted()
        assert reported.wait(10)


@pytest.fixture
def clock(monkeypatch):
    """The seconds that `core.signals` sees, in a list of one."""
    now = [100.0]
    monkeypatch.setattr(signals.time, "monotonic", lambda: now[0])
    return now


def test_a_second_ctrl_c_interrupts(clock):
    def press_twice() -> None:
        with deferred_interrupts(lambda: None):
            signal.raise_signal(signal.SIGINT)
            clock[0] += 1
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        press_twice()


@pytest.mark.parametrize(
    ("numbers", "apart_s"),
    [
        # As `timeout -s INT` and torchrun send it: to a process, and to its group.
        ([signal.SIGINT, signal.SIGINT], 0.0),
        ([signal.SIGTERM, signal.SIGTERM, signal.SIGTERM], 60.0),
        # A launcher hands on what its job got, too.
        ([signal.SIGUSR1, signal.SIGINT, signal.SIGTERM], 60.0),
    ],
)
def test_the_same_request_again_changes_nothing(clock, numbers, apart_s):
    reports = []
    with deferred_interrupts(lambda: reports.append("saving")) as is_interrupted:
        for number in numbers:
            signal.raise_signal(number)
            clock[0] += apart_s
        assert is_interrupted()
    assert reports in ([], ["saving"])  # from another thread


@pytest.mark.parametrize("number", [signal.SIGINT, *END_REQUESTS])
def test_ctrl_c_and_requests_to_end_interrupt_once(clock, number):
    before, counted = signal.getsignal(number), 0

    def send() -> None:
        nonlocal counted
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt:
            counted += 1

    with interrupts() as was_asked:
        assert not was_asked()
        send()
        send()
        assert (counted, was_asked()) == (1, True)
        clock[0] += 1
        send()
        # The end of the shell sends SIGHUP a second time, which may come late.
        assert counted == (1 if number.name == "SIGHUP" else 2)
    assert signal.getsignal(number) is before


def test_what_was_held_back_is_sent_where_the_block_raises():
    def fail_while_held() -> None:
        with held_back():
            signal.raise_signal(signal.SIGINT)
            raise OSError("the block's own")

    with pytest.raises(KeyboardInterrupt) as caught:
        fail_while_held()
    assert isinstance(caught.value.__context__, OSError)


@pytest.mark.parametrize("name", ["SIGINT", "SIGHUP"])
def test_what_is_ignored_stays_so(name):
    """As in the background of a script, and with nohup."""
    number = getattr(signal, name)
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with interrupts(), deferred_interrupts(lambda: None) as is_interrupted:
            signal.raise_signal(number)
            assert not is_interrupted()
            signal.raise_signal(signal.SIGTERM)
            assert is_interrupted()
    finally:
        signal.signal(number, before)
