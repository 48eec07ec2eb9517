"""Ctrl-C and SIGTERM while a step runs."""

import signal
import threading

import pytest

from opensora_cli.engine.train.run import deferred_interrupts


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_recorded_and_reported(number):
    reported = threading.Event()
    with deferred_interrupts(reported.set) as is_interrupted:
        assert not is_interrupted()
        signal.raise_signal(number)
        assert is_interrupted()
        assert reported.wait(10)


def test_the_second_signal_interrupts():
    def press_twice() -> None:
        with deferred_interrupts(lambda: None):
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        press_twice()


def test_handlers_are_put_back():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with deferred_interrupts(lambda: None):
        assert signal.getsignal(signal.SIGINT) is not before[0]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    with pytest.raises(ZeroDivisionError), deferred_interrupts(lambda: None):
        raise ZeroDivisionError
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_what_is_ignored_stays_so():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with deferred_interrupts(lambda: None) as is_interrupted:
            signal.raise_signal(signal.SIGINT)
            assert not is_interrupted()
            signal.raise_signal(signal.SIGTERM)
            assert is_interrupted()
    finally:
        signal.signal(signal.SIGINT, before)


def test_elsewhere_than_in_the_main_thread_nothing_is_noted():
    before, found = signal.getsignal(signal.SIGINT), []

    def run() -> None:
        with deferred_interrupts(lambda: None) as is_interrupted:
            found.append((signal.getsignal(signal.SIGINT) is before, is_interrupted()))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [(True, False)]
