"""Standard streams that are full, closed, or whose reader has left."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from opensora_cli.cli import app, generate, output
from opensora_cli.cli.command import make_command

def work(*args, **kwargs):
    reporter = output.make_reporter(quiet=False)
    with open(sys.argv[1], "w") as file:
        file.write("begun, ")
        file.flush()
        for number in range(3):
            reporter.note(f"note {number}")
            print("of a library", file=sys.stderr)
        file.write("done")
    print("result", flush=True)

if sys.argv[2:]:
    sys.exit(app.main(sys.argv[2:]))
generate.COMMAND = make_command(work, {"PROMPT": generate.ROWS["PROMPT"]}, name="generate", about="Work.")
sys.exit(app.main(["generate", "x"]))
"""
FULL = "cannot write to standard output: No space left on device"

needs_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="its shell has no such redirections")


LIBRARY = """
import sys, types, warnings
from opensora_cli.cli import app, command, generate
from opensora_cli.cli.command import make_command
from opensora_cli.core.exceptions import OsoraWarning

def work(*args, **kwargs):
    with command.importing():
        import logging
    logging.getLogger("library").warning("of a server: %s", chr(27) + "[2J, https://me:pass@word@host/x")
    warnings.warn("of a file: " + chr(0x202e) + chr(0x9b))
    warnings.warn(OsoraWarning("a.png may be lost"))
    raise AssertionError("a bug" + chr(27))

generate.COMMAND = make_command(work, {"PROMPT": generate.ROWS["PROMPT"]}, name="generate", about="Work.")
sys.exit(app.main(["generate", "x"]))
"""


def run(place: Path, redirection: str, *args: str) -> tuple[int, str, str]:
    """Run the program in a shell with a redirection; return its exit code, and what arrived on both streams."""
    command = ["bash", "-c", f'set -o pipefail; "$@" {redirection}', "bash", sys.executable, "-c", PROGRAM, str(place)]
    done = subprocess.run([*command, *args], capture_output=True, text=True, check=False, timeout=60)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("redirection", [pytest.param("2>/dev/full", marks=needs_full), "2>&- <&-"])
def test_a_log_that_is_lost_ends_no_run(tmp_path: Path, redirection: str) -> None:
    place = tmp_path / "result"
    code, out, _ = run(place, redirection)
    assert (code, out) == (0, "result\n")
    # Nor does it go to the file that is opened next.
    assert place.read_text() == "begun, done"


def test_a_reader_who_has_seen_enough_is_no_error(tmp_path: Path) -> None:
    place = tmp_path / "result"
    assert run(place, "2>&1 | head -n 1") == (0, "note 0\n", "")
    assert place.read_text() == "begun, done"
    code, _, err = run(place, "> >(true)")
    assert (code, "Traceback" in err) == (0, False)


@needs_full
@pytest.mark.parametrize("args", [(), ("--help",)])
def test_a_result_that_is_lost_is_reported(tmp_path: Path, args: tuple[str, ...]) -> None:
    code, _, err = run(tmp_path / "result", ">/dev/full", *args)
    assert (code, err.splitlines()[-1]) == (3, f"error: {FULL}")
    assert "Traceback" not in err


def test_streams_that_the_shell_closed_take_nothing(tmp_path: Path) -> None:
    place = tmp_path / "result"
    code, out, err = run(place, ">&-")
    assert (code, out, err.count("note")) == (0, "", 3)
    assert place.read_text() == "begun, done"


@pytest.mark.parametrize("redirection", [pytest.param("2>/dev/full", marks=needs_full), "2>&-"])
def test_an_interrupt_that_cannot_be_printed_keeps_its_exit_code(redirection: str) -> None:
    program = "from opensora_cli.__main__ import _leave; _leave()"
    command = ["bash", "-c", f'"$@" {redirection}', "bash", sys.executable, "-c", program]
    assert subprocess.run(command, check=False, timeout=60).returncode == 130


def test_logs_warnings_and_tracebacks_of_libraries_steer_no_terminal_and_show_no_password() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIBRARY], capture_output=True, text=True, check=False, timeout=60, encoding="utf-8"
    )
    assert done.returncode == 1
    assert r"of a server: \x1b[2J, https://<hidden>@host/x" in done.stderr
    assert r"UserWarning: of a file: \u202e\x9b" in done.stderr
    assert "\nwarning: a.png may be lost\n" in done.stderr
    assert r"AssertionError: a bug\x1b" in done.stderr
    assert done.stderr.replace("\n", "").isprintable()
