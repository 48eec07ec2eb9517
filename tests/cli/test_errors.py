"""Errors become a message and an exit code, also Ctrl-C; a bug keeps its traceback."""

import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from opensora_cli.cli import errors
from opensora_cli.cli.app import main
from opensora_cli.core.exceptions import CheckpointError, HardwareError, MediaError, OsoraError, OutputError
from opensora_cli.core.progress import Reporter
from opensora_cli.settings.generate import GenerateSettings

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(engine, capsys):
    """Run `osora generate` with an engine that raises an error or calls a function; return exit code and stderr."""

    def call(happens: BaseException | Callable[[Reporter], object], *args: str) -> tuple[int, str]:
        def happen(reporter: Reporter) -> None:
            if isinstance(happens, BaseException):
                raise happens
            happens(reporter)

        engine.while_running = happen
        code = main(["generate", *(args or ["x"])])
        captured = capsys.readouterr()
        assert captured.out == ""
        return code, captured.err

    return call


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        *(
            (kind("weights are missing", hint="get them"), code, "weights are missing\n       get them")
            for kind, code in (
                (CheckpointError, 3),
                (MediaError, 3),
                (OutputError, 3),
                (HardwareError, 4),
                (OsoraError, 1),
            )
        ),
        # Neither wrapped nor read as markup.
        (CheckpointError("[bold]long[/bold] " * 40), 3, "[bold]long[/bold] " * 40),
        (MemoryError(), 4, "there is not enough memory"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (KeyboardInterrupt("1 of 3 is made\ngo on"), 130, "interrupted\n       1 of 3 is made\n       go on"),
    ],
)
def test_exit_code_and_message_of_an_error(error, code, message, run):
    assert run(error) == (code, f"error: {message}\n")


def test_every_broken_rule_has_its_line(run):
    expected = (2, "error: sampling.seed=-1 must be at least 0\n")
    assert run(lambda reporter: GenerateSettings(prompt="x").replace({"sampling.seed": -1})) == expected
    code, err = run(lambda reporter: None, " ", "--res", "1px", "--num-frames", "3")
    assert (code, [line.startswith("error: ") for line in err.splitlines()]) == (2, [True] * 3)


@pytest.mark.parametrize("error", [RuntimeError("bug"), OSError("bug"), ValueError("bug")])
def test_a_bug_keeps_its_traceback(error, run):
    with pytest.raises(type(error), match="bug"):
        run(error)


def test_an_error_in_place_of_an_interruption_reports_what_is_finished():
    def fail() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            failed = HardwareError("a watched collective failed")
            failed.add_note("finished: sea.mp4")
            raise failed from None

    with pytest.raises(errors.InterruptError) as caught, errors.interruptible():
        fail()
    assert (caught.value.message, caught.value.hint) == ("interrupted", "finished: sea.mp4")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows sends no signal to a child alone")
@pytest.mark.parametrize(
    ("first", "number"),
    [
        ("", signal.SIGINT),
        # A shell starts the background commands of a script with Ctrl-C ignored.
        ("import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n", signal.SIGTERM),
    ],
)
def test_interrupt_by_a_signal(first, number):
    code = (
        f"{first}import sys, time; from opensora_cli.cli import app, generate\n"
        "def wait(*args, **kwargs): print('ready', flush=True); time.sleep(60)\n"
        "generate.generate_request = wait; sys.exit(app.main(['generate', 'x']))"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "error: interrupted\n")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows sends no signal to a child alone")
@pytest.mark.parametrize("module", ["typer", "opensora_cli.cli.generate"])
def test_interrupt_while_the_program_is_imported(module):
    """Ctrl-C counts from the first import on, also if the import turns it into another error."""
    code = (
        "import signal, sys\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == '{module}':\n"
        "            try: signal.raise_signal(signal.SIGINT)\n"
        "            except KeyboardInterrupt: raise ImportError('numpy is broken') from None\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "from opensora_cli.__main__ import main; sys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "generate", "--help"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "error: interrupted\n")


def test_a_log_of_a_rank_that_cannot_be_written(run, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, text in {**rank, "OSORA_RANK_LOG": "no/log", "OSORA_RANK_CHANNEL": "0"}.items():
        monkeypatch.setenv(name, text)
    found, err = run(lambda reporter: None)
    assert (found, err.partition("\n")[0]) == (3, "error: cannot write no/log: No such file or directory")


def test_a_shell_without_completion_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert errors.run(lambda: 1) == 4
    assert "error: no shell was found that can complete commands\n" in capsys.readouterr().err
