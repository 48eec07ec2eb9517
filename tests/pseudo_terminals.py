"""Programs in a terminal of their own, which can go away as at a lost ssh connection."""

import codecs
import fcntl
import os
import pty
import select
import signal
import subprocess
import termios
import time

LONG_S = 60.0


class Terminal:
    """A pseudo-terminal, and a process that it controls.

    Args:
        command: the program and its arguments.
        ignored: signals that the process is started to ignore, as nohup does.
        options: those of `subprocess.Popen`.
    """

    def __init__(self, command, *, ignored=(), **options):
        self.master, self.slave = pty.openpty()

        def prepare():
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
            for number in ignored:
                signal.signal(number, signal.SIG_IGN)

        self.process = subprocess.Popen(
            command,
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            start_new_session=True,
            preexec_fn=prepare,
            **options,
        )
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
            self.read()
            assert condition() or not (has_ended or time.monotonic() > limit), self.shown

    def read(self):
        if select.select([self.master], [], [], 0.02)[0]:
            self.shown += self._decoder.decode(os.read(self.master, 4096))

    def hang_up(self):
        """Close the terminal: its processes get SIGHUP, and can no longer read or write."""
        os.close(self.slave)
        os.close(self.master)
        self.master = self.slave = None

    def end(self):
        code = self.process.wait(LONG_S)
        if self.master is not None:
            self.read()
        return code
