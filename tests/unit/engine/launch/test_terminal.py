"""What rank 0 prints reaches our stream and its log."""

import os
import sys

import pytest

from opensora_cli.engine.launch.terminal import CopiedStream

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="ranks are started on Linux and macOS only")


@pytest.fixture
def log(tmp_path):
    with (tmp_path / "log").open("ab", buffering=0) as file:
        yield file


@pytest.fixture
def target(tmp_path):
    with (tmp_path / "target").open("wb") as file:
        yield file


def test_copied_to_both(tmp_path, log, target):
    with CopiedStream(target.fileno(), log) as stream:
        rank_end = os.dup(stream.end)
        assert not os.isatty(rank_end)
        stream.start()
        os.write(rank_end, b"x" * 100_000 + b"\n")
        os.close(rank_end)
    assert (tmp_path / "log").read_bytes() == (tmp_path / "target").read_bytes() == b"x" * 100_000 + b"\n"


def test_muted(tmp_path, log, target):
    with CopiedStream(target.fileno(), log) as stream:
        rank_end = os.dup(stream.end)
        stream.mute()
        stream.start()
        os.write(rank_end, b"more")
        os.close(rank_end)
    assert (tmp_path / "log").read_bytes() == b"more"
    assert (tmp_path / "target").read_bytes() == b""


def test_no_stream_of_ours(tmp_path, log):
    with CopiedStream(-1, log) as stream:
        rank_end = os.dup(stream.end)
        stream.start()
        os.write(rank_end, b"more")
        os.close(rank_end)
    assert (tmp_path / "log").read_bytes() == b"more"


def test_a_terminal_stays_one(tmp_path, log):
    import pty
    import termios

    screen, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (40, 123))
    with CopiedStream(terminal, log) as stream:
        rank_end = os.dup(stream.end)
        assert os.isatty(rank_end)
        assert termios.tcgetwinsize(rank_end) == (40, 123)
        stream.start()
        os.write(rank_end, b"bar\rbar\n")
        os.close(rank_end)
    assert (tmp_path / "log").read_bytes() == b"bar\rbar\n"
    expected, shown = b"bar\rbar\r\n\x1b[?25h", b""
    while len(shown) < len(expected):  # in as many pieces as the terminal likes
        shown += os.read(screen, 100)
    assert shown == expected
    os.close(screen)
    os.close(terminal)


def test_reader_that_left_is_told_to_the_rank(log):
    source, target = os.pipe()
    os.close(source)
    with CopiedStream(target, log) as stream:
        rank_end = os.dup(stream.end)
        stream.start()
        os.write(rank_end, b"first")
        stream.close()
        with pytest.raises(BrokenPipeError):
            os.write(rank_end, b"second")
        os.close(rank_end)
    os.close(target)
