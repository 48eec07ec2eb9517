"""Runs in a terminal that goes away, as at a lost ssh connection."""

import codecs
import fcntl
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time

import pytest
from safetensors import safe_open

from opensora_cli.engine.generate.sample import STEPS_KEY

pytestmark = pytest.mark.slow

LONG_S = 60.0
OSORA = [sys.executable, "-m", "opensora_cli"]
SMALL = ["--height", "32", "--width", "32", "--num-frames", "1"]


class Terminal:
    """A pseudo-terminal, and a process that it controls, which is started to ignore some signals, as by nohup."""

    def __init__(self, command, *, ignored=(), cwd):
        self.master, self.slave = pty.openpty()

        def prepare():
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
            for number in ignored:
                signal.signal(number, signal.SIG_IGN)

        streams = dict.fromkeys(("stdin", "stdout", "stderr"), self.slave)
        self.process = subprocess.Popen(command, start_new_session=True, preexec_fn=prepare, cwd=cwd, **streams)
        self.shown = ""
        # A read may end inside a character.
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    def __enter__(self):
        return self

    def __exit__(self, *reason):
        self.process.kill()
        self.process.wait()
        for end in (self.master, self.slave):
            if end is not None:
                os.close(end)

    def wait_for(self, condition):
        limit = time.monotonic() + LONG_S
        while not condition():
            has_ended = self.process.poll() is not None
            if select.select([self.master], [], [], 0.02)[0]:
                self.shown += self._decoder.decode(os.read(self.master, 4096))
            assert condition() or not (has_ended or time.monotonic() > limit), self.shown

    def hang_up(self):
        """Close the terminal: its processes get SIGHUP, and can no longer read or write."""
        os.close(self.slave)
        os.close(self.master)
        self.master = self.slave = None


def test_a_generation_on_two_ranks_saves_its_latents(tmp_path):
    steps = ["--steps", "1000", "--gpus", "2", "--device", "cpu", "--out", "a.png"]
    with Terminal([*OSORA, "generate", "sea", *SMALL, *steps], cwd=tmp_path) as terminal:
        terminal.wait_for(lambda: re.search(r"\d\d/\d+ evaluations", terminal.shown))
        terminal.hang_up()
        assert terminal.process.wait(LONG_S) == 130
    with safe_open(tmp_path / "a.latents.safetensors", framework="numpy") as latents:
        assert int(latents.metadata()[STEPS_KEY]) < 1000
    assert [path.name for path in tmp_path.iterdir()] == ["a.latents.safetensors"]


def test_with_nohup_a_generation_goes_on_to_its_end(tmp_path):
    command = [*OSORA, "generate", "sea", *SMALL, "--steps", "30", "--out", "a.png"]
    with Terminal(command, ignored=[signal.SIGHUP], cwd=tmp_path) as terminal:
        terminal.wait_for(lambda: "denoise" in terminal.shown)
        terminal.hang_up()
        assert terminal.process.wait(LONG_S) == 3  # its result is made, and could not be printed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "a.png.json"]
