"""What went wrong becomes a message and an exit code; what is a bug keeps its traceback."""

import gc
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from cli.fake_engine import FakeEngine

from opensora_cli.cli import errors
from opensora_cli.cli.app import main
from opensora_cli.core.exceptions import (
    CheckpointError,
    HardwareError,
    MediaError,
    OsoraError,
    OutputError,
    RequestError,
)
from opensora_cli.core.progress import Reporter
from opensora_cli.settings.generate import GenerateSettings


def run(args: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = main(args)
    captured = capsys.readouterr()
    assert captured.out == ""
    return code, captured.err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["generat", "x"], "Did you mean 'generate'"),
        (["--versoin"], "no such option: --versoin. Did you mean --version?"),
        (["generate", "x", "--num-frmes", "5"], "no such option: --num-frmes. Did you mean --num-frames?"),
        (["generate", "x", "--save-dir", "y"], "no such option: --save-dir. Did you mean --out?"),
        (["generate", "x", "--cond_type", "t2v"], "no such option: --cond_type. Did you mean --cond?"),
        (["generate", "--sampling_option.seed=3"], "no such option: --sampling_option.seed. Did you mean --seed?"),
        (["vae", "reconstruct", "x", "--ckpt-path=3"], "no such option: --ckpt-path. Did you mean --weights?"),
        (["train", "--save-dir", "y"], "o such option: --save-dir"),
        (["generate", "x", "--cfg-scale", "5"], "--cfg-scale"),
        (["generate", "raining,", "sea"], "quote a text with blanks in it"),
        (["generate", "-sea, raining"], "put a text that begins with - after --"),
        (["generate", "x", "--fit", "zoom"], "'zoom' is not one of 'crop', 'pad', 'stretch'"),
        (["generate", "x", "--steps"], "--steps"),
        (["generate", "x", "--steps", "0"], "sampling.num_inference_steps=0 must be at least 1 (from --steps)"),
        (["generate", "x", "--seed", "1", "--set", "sampling.seed=2"], "contradicts --seed"),
        (["generate", "x", "--ref", ""], "--ref is empty"),
        (["generate", "x", "--lora", "a", "--lora", ""], "--lora is empty: name an adapter, or drop --lora"),
        (["generate", "x", "--model", "open-sora-v2", "--num-frames", "130"], "use 129 (from --num-frames)"),
    ],
)
def test_bad_request(args: list[str], message: str, engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    code, err = run(args, capsys)
    assert code == 2
    assert message in err
    assert err.startswith("error: ")
    assert "Traceback" not in err
    assert "pydantic" not in err


def test_unknown_option_points_to_the_help_of_its_command(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    _, err = run(["generate", "x", "--qqqq"], capsys)
    assert err.endswith("see osora generate --help\n")


@pytest.mark.parametrize(
    ("args", "command"),
    [(["train", "--new"], "osora train"), (["vae", "stats", "a.png", "--dtype"], "osora vae stats")],
)
def test_a_value_that_is_missing_points_to_the_help_of_its_command(
    args: list[str], command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, err = run(args, capsys)
    assert code == 2
    assert "requires an argument" in err
    assert err.endswith(f"see {command} --help\n")


def test_what_failed_instead_of_an_interruption_reports_what_is_finished() -> None:
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


def test_every_broken_rule_has_its_line(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    _, err = run(["generate", " ", "--res", "1px", "--num-frames", "3"], capsys)
    assert [line.startswith("error: ") for line in err.splitlines()] == [True] * 3


def test_unknown_environment_variable(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSORA_SAMPLING__SED", "1")
    code, err = run(["generate", "x"], capsys)
    assert code == 2
    assert "did you mean OSORA_SAMPLING__SEED?" in err


@pytest.mark.parametrize(
    ("option", "name", "content"),
    [
        ("--config", "gone.yaml", None),
        ("--config", "a.yaml", "a: [\n"),
        ("--from", "gone.json", None),
        ("--from", "a.json", "not json"),
    ],
)
def test_bad_files(
    option: str,
    name: str,
    content: str | None,
    engine: FakeEngine,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    code, err = run(["generate", "x", option, str(path)], capsys)
    assert code == 3
    assert str(path) in err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CheckpointError("weights are missing", hint="get them"), 3),
        (MediaError("weights are missing", hint="get them"), 3),
        (OutputError("weights are missing", hint="get them"), 3),
        (HardwareError("weights are missing", hint="get them"), 4),
        (OsoraError("weights are missing", hint="get them"), 1),
    ],
)
def test_errors_of_the_engine(
    error: OsoraError, code: int, engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.while_running = raising(error)
    assert run(["generate", "x"], capsys) == (code, "error: weights are missing\n       get them\n")


def test_out_of_memory(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.while_running = raising(MemoryError())
    assert run(["generate", "x"], capsys) == (4, "error: there is not enough memory\n")


def test_validation_error_of_library_code(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.while_running = lambda reporter: GenerateSettings(prompt="x").replace({"sampling.seed": -1}) and None
    assert run(["generate", "x"], capsys) == (2, "error: sampling.seed=-1 must be at least 0\n")


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (KeyboardInterrupt(), "error: interrupted\n"),
        (
            KeyboardInterrupt("1 of 3 videos is finished\ngo on with --from-latents a"),
            "error: interrupted\n       1 of 3 videos is finished\n       go on with --from-latents a\n",
        ),
    ],
)
def test_interrupt(
    stop: KeyboardInterrupt, expected: str, engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.while_running = raising(stop)
    assert run(["generate", "x"], capsys) == (130, expected)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows sends no signal to a child alone")
@pytest.mark.parametrize(
    ("first", "number"),
    [
        ("", signal.SIGINT),
        # As a shell starts what a script puts into the background.
        ("import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n", signal.SIGTERM),
    ],
)
def test_interrupt_by_a_signal(first: str, number: signal.Signals) -> None:
    code = (
        f"{first}import sys, time; from opensora_cli.cli import app, generate\n"
        "def wait(*args, **kwargs): print('ready', flush=True); time.sleep(60)\n"
        "generate._run = wait; sys.exit(app.main(['generate', 'x']))"
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
def test_interrupt_while_the_program_is_imported(module: str) -> None:
    """From its first import on, also where the import would make another error of it."""
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
    done = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "error: interrupted\n")


def test_interrupt_while_help_is_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("opensora_cli.cli.app.Group.get_help", interrupted)
    assert main([]) == 130
    assert capsys.readouterr().err == "error: interrupted\n"


def test_interrupt_that_turns_into_another_error(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    """A compiled module whose import is interrupted complains of itself."""

    def interrupted_import(reporter: Reporter) -> None:
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        raise AttributeError("module 'numpy' has no attribute 'multiply'")

    engine.while_running = interrupted_import
    assert run(["generate", "x"], capsys) == (130, "error: interrupted\n")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_interrupt_while_an_error_is_explained(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by the launcher of a rank whose peer is gone: no traceback."""

    def interrupted(error: Exception) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(errors, "explain_failure", interrupted)
    engine.while_running = raising(ValueError("a bug"))
    assert main(["generate", "a bay"]) == 130
    assert capsys.readouterr().err == "error: interrupted\n"


def test_interrupt_is_held_back() -> None:
    def hold() -> None:
        with errors.uninterrupted():
            signal.raise_signal(signal.SIGINT)
            reached.append("the end")

    reached: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        hold()
    assert reached == ["the end"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_garbage_is_not_looked_for_in_what_torch_brings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", pytest)
    with errors.uninterrupted():  # it is there: what is of now may be garbage soon
        assert gc.isenabled()
    monkeypatch.delitem(sys.modules, "torch")
    try:
        with errors.uninterrupted():
            assert not gc.isenabled()
            brought: list[object] = [[]]
        assert gc.isenabled()
        assert gc.get_freeze_count() > 0
        assert all(each is not brought for each in gc.get_objects())
    finally:
        gc.unfreeze()


def test_interrupt_in_a_finaliser_is_not_lost(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    class Finalised:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    def collect(reporter: Reporter) -> None:
        Finalised()
        time.sleep(30)

    engine.while_running = collect
    hook = sys.unraisablehook
    assert run(["generate", "x"], capsys) == (130, "error: interrupted\n")
    assert sys.unraisablehook is hook


@pytest.mark.parametrize("error", [RuntimeError("bug"), OSError("bug"), ValueError("bug")])
def test_a_bug_keeps_its_traceback(error: Exception, engine: FakeEngine) -> None:
    engine.while_running = raising(error)
    with pytest.raises(type(error), match="bug"):
        main(["generate", "x"])


def test_a_bug_ends_the_program_with_1() -> None:
    code = (
        "import sys; from opensora_cli.cli import app, generate\n"
        "def broken(*args, **kwargs): raise ZeroDivisionError('bug')\n"
        "generate._run = broken; sys.exit(app.main(['generate', 'x']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback")
    assert done.stderr.endswith("ZeroDivisionError: bug\n")


def test_streams_that_the_shell_closed(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def chatter(reporter: Reporter) -> None:
        reporter.note("a note")

    engine.while_running = chatter
    with monkeypatch.context() as closed:
        closed.setattr(sys, "stderr", None)
        assert main(["generate", "x"]) == 0
        assert main(["generate", ""]) == 2
    assert capsys.readouterr().out == "samples/原野.mp4\n"
    with monkeypatch.context() as closed:
        closed.setattr(sys, "stdout", None)
        assert main(["generate", "x"]) == 0


def test_messages_are_not_wrapped_nor_coloured(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.while_running = raising(CheckpointError("[bold]long[/bold] " * 40))
    _, err = run(["generate", "x"], capsys)
    assert err == f"error: {'[bold]long[/bold] ' * 40}\n"


_NO_FLUSHED_FOLDERS = """
import os, stat, sys
from opensora_cli.cli.app import main
fsync = os.fsync
def fail(descriptor):
    if stat.S_ISDIR(os.fstat(descriptor).st_mode):
        raise OSError(5, "Input/output error")
    fsync(descriptor)
os.fsync = fail
sys.exit(main(sys.argv[1:]))
"""


def test_a_folder_that_cannot_be_flushed_is_one_line_and_no_error(tmp_path: Path) -> None:
    table = tmp_path / "clips.csv"
    table.write_text("path,text\na.mp4,rain\nb.mp4,sea\n")
    command = [sys.executable, "-c", _NO_FLUSHED_FOLDERS, "data", "shard", str(table), "--parts", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    parts = sorted(path for path in tmp_path.iterdir() if path != table)
    assert len(parts) == 2
    cause = "its folder cannot be flushed to the disk: Input/output error"
    assert done.stderr.splitlines() == [
        f"warning: {part} is written, but a power failure may lose it: {cause}" for part in parts
    ]


def raising(error: BaseException):  # type: ignore[no-untyped-def]
    def raise_it(reporter: Reporter) -> None:
        raise error

    return raise_it


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("TORCH_LOGS", "nonsense", "\n  Invalid log settings: 'nonsense'\n try TORCH_LOGS='help'"),
        ("HF_HUB_DOWNLOAD_TIMEOUT", "soon", "invalid literal for int() with base 10: 'soon'"),
    ],
)
def test_a_variable_that_a_library_refuses_while_it_is_imported_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, text: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(RequestError) as caught, errors.uninterrupted():
        raise ValueError(text)
    assert caught.value.message.startswith(f"a library cannot be loaded with {name}='{value}': ")
    assert caught.value.message.isprintable()
    assert caught.value.hint == f"unset {name}, or set a value that it accepts"
    with pytest.raises(ValueError, match="a bug"), errors.uninterrupted():
        raise ValueError("a bug")


def test_a_secret_that_a_library_refuses_is_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "my secret")
    with pytest.raises(RequestError) as caught, errors.uninterrupted():
        raise ValueError("illegal value of HF_TOKEN: 'my secret'")
    hidden = "a library cannot be loaded with HF_TOKEN='<hidden>': illegal value of HF_TOKEN: '<hidden>'"
    assert caught.value.message == hidden


def test_torch_s_own_refusal_of_a_variable_is_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "opensora_cli", "ckpt", "inspect", __file__],
        env={**os.environ, "TORCH_DISTRIBUTED_DEBUG": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: a library cannot be loaded with TORCH_DISTRIBUTED_DEBUG='1': ")
    assert "Traceback" not in done.stderr


RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize("value", ["nonsense", "-1", "999", "9" * 30, "1.5"])
def test_a_channel_that_leads_nowhere(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    for name, text in RANK.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setenv("OSORA_RANK_CHANNEL", value)
    code, err = run(["generate", "x"], capsys)
    assert code == 2
    assert err.startswith(f"error: OSORA_RANK_CHANNEL={value} is not the end of a link")
    assert "unset OSORA_RANK_CHANNEL" in err


def test_a_log_of_a_rank_that_cannot_be_written(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, text in RANK.items():
        monkeypatch.setenv(name, text)
    for path, reason in ((tmp_path, "Is a directory"), (tmp_path / "no" / "log", "No such file or directory")):
        monkeypatch.setenv("OSORA_RANK_LOG", str(path))
        code, err = run(["generate", "x"], capsys)
        assert (code, err.splitlines()[0]) == (3, f"error: cannot write the rank's log {path}: {reason}")
