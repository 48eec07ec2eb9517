"""Tables fit a terminal of 80 columns."""

import re
import shlex
from pathlib import Path

import pytest
import tiny_training

from opensora_cli.cli import output
from opensora_cli.cli.app import main

CLIPS = Path(tiny_training.TABLE).parent
WEIGHTS = Path(__file__).parents[1] / "golden" / "data" / "mmdit_video.safetensors"
BENCH = "--repeats 2 --num-frames 1 --steps 2 --try sampling.num_inference_steps=1 --model demo --quiet"


def too_long(text: str) -> list[str]:
    """Return the lines over 80 characters, except lines with a command, and words such as a path or URL."""
    lines = [line for line in text.splitlines() if not re.match(r" *(-> )?osora |.* --set ", line)]
    return [line for line in lines if len(line) > 80 and len(line.split()) > 2]


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        'generate "raining, sea" --dry-run',
        "generate sea --dry-run --on 4090 --model open-sora-v2 --res 768px",
        "train --config demo_lora --dry-run",
        "mem-profile --on 4090",
        "env-check",
        f"ckpt inspect {WEIGHTS}",
        f"show {WEIGHTS}",
        "presets",
        f"bench-generate sea {BENCH}",
        f"data scan {CLIPS} --out table.csv",
    ],
)
def test_tables_fit_80_columns(
    command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(output, "_terminal_width", lambda: 80)
    code, printed = main(shlex.split(command)), capfd.readouterr()
    assert (code, too_long(printed.out)) == (0, [])
    assert len(printed.out.splitlines()) > 1


def test_a_text_behind_a_label_is_wrapped_and_a_command_stays_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["writes    " + "word " * 20 + "end", "  fits H100, " + "x" * 90, "  -> osora generate " + "y " * 50]
    output.print_lines(lines)
    assert capsys.readouterr().out.splitlines() == lines
    monkeypatch.setattr(output, "_terminal_width", lambda: 80)
    output.print_lines(lines)
    shown = capsys.readouterr().out.splitlines()
    assert shown[:2] == ["writes    " + "word " * 13 + "word", " " * 10 + "word " * 6 + "end"]
    assert shown[2:] == ["  fits H100,", "  " + "x" * 90, lines[2]]
