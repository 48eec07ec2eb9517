"""The seconds of commands: those of the processes that they start, too, and of commands that did what they should."""

import sys

import pytest
import speed_start

_BUSY = "import time; start = time.process_time()\nwhile time.process_time() < start + 0.2: pass"
_PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {_BUSY!r}], check=True)"


def test_descendants_count_and_the_first_run_does_not() -> None:
    times = speed_start._times([sys.executable, "-S", "-c", _PARENT], 2)
    assert len(times.wall) == len(times.processor) == 2
    assert min(times.processor) >= 0.2


def test_a_limit_is_reached_or_missed() -> None:
    times = speed_start._Times(wall=(1.0, 2.0, 9.0), processor=(0.5, 0.5, 0.6))
    assert times.row("x", 2.0).is_reached
    assert not times.row("x", 1.9).is_reached
    assert times.row("x", 0.5, by_processor=True).is_reached
    assert not times.row("x", 0.4, by_processor=True).is_reached
    assert times.row("x", None).is_reached


def test_a_command_that_fails_is_not_timed() -> None:
    with pytest.raises(SystemExit, match="exited with 3: no"):
        speed_start._times([sys.executable, "-S", "-c", "import sys; print('no', file=sys.stderr); sys.exit(3)"], 1)
