"""The key q in a terminal, and what becomes of the terminal's settings, whatever ends or stops the run."""

import os
import signal
import subprocess
import sys
import time

import pytest
from pseudo_terminals import Terminal

RUN = """
import os, sys, time
from opensora_cli.cli import errors
from opensora_cli.cli.keys import ended_by_q
from opensora_cli.cli.progress import LineReporter

try:
    with errors.interruptible(), ended_by_q(LineReporter(), wanted="quiet" not in sys.argv):
        print("running", flush=True)
        if "fail" in sys.argv:
            while not os.path.exists(sys.argv[2]):
                time.sleep(0.01)
            raise ValueError("failed")
        time.sleep(60)
except errors.InterruptError:
    print("interrupted", flush=True)
    sys.exit(130)
"""
NOTE = "q ends the run, as Ctrl-C does"


def running(*arguments):
    return Terminal([sys.executable, "-c", RUN, *arguments])


@pytest.fixture
def terminal():
    with running() as terminal:
        terminal.wait_for(lambda: "running" in terminal.shown and terminal.is_changed)
        assert NOTE in terminal.shown
        yield terminal


def test_q_interrupts_and_other_keys_do_nothing(terminal):
    terminal.type(b"abc\n")
    time.sleep(0.2)
    assert terminal.process.poll() is None
    terminal.type(b"q")
    assert terminal.end() == 130
    assert terminal.settings() == terminal.before
    assert terminal.shown.endswith("interrupted\r\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_with_the_terminal_as_it_was(terminal, number):
    terminal.process.send_signal(number)
    assert terminal.end() == 130
    assert terminal.settings() == terminal.before


def test_while_it_is_stopped_the_terminal_is_as_it_was(terminal):
    terminal.type(b"\x1a")  # Ctrl-Z
    _, status = os.waitpid(terminal.process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    assert terminal.settings() == terminal.before
    terminal.process.send_signal(signal.SIGCONT)
    terminal.wait_for(lambda: terminal.is_changed)
    terminal.type(b"q")
    assert terminal.end() == 130
    assert terminal.settings() == terminal.before


def test_an_error_ends_with_the_terminal_as_it_was(tmp_path):
    with running("fail", str(tmp_path / "now")) as terminal:
        terminal.wait_for(lambda: "running" in terminal.shown and terminal.is_changed)
        (tmp_path / "now").touch()
        assert terminal.end() == 1
        assert terminal.settings() == terminal.before
        assert "ValueError: failed" in terminal.shown


def test_where_it_is_not_wanted_the_terminal_is_left_alone():
    with running("quiet") as terminal:
        terminal.wait_for(lambda: "running" in terminal.shown)
        terminal.type(b"q")
        time.sleep(0.2)
        assert terminal.process.poll() is None
        assert terminal.settings() == terminal.before
        assert NOTE not in terminal.shown


def test_without_a_terminal_nothing_is_said():
    command = [sys.executable, "-c", RUN.replace("time.sleep(60)", "pass")]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
    assert (ended.stdout, ended.stderr) == ("running\n", "")
