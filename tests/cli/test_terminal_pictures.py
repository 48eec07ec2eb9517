"""Pictures in terminals: what is sent, by what the environment says of the terminal."""

import base64
import io
import re

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from opensora_cli.cli import output
from opensora_cli.cli.progress import BarReporter
from opensora_cli.cli.terminal_pictures import shown

HEIGHT, WIDTH = 12, 36


@pytest.fixture
def png():
    pixels = np.zeros((HEIGHT, WIDTH, 3), dtype=np.uint8)
    pixels[:, : WIDTH // 2] = (255, 0, 0)
    pixels[HEIGHT // 2 :, WIDTH // 2 :] = (0, 0, 255)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, format="PNG")
    return stream.getvalue()


def printed(png, environment, *, encoding="utf-8", **options):
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(
        file=file, **{"force_terminal": True, "color_system": "truecolor", "width": 80, "_environ": {}, **options}
    )
    renderable = shown(png, console, environment)
    if renderable is None:
        return None
    console.print(renderable, soft_wrap=True)
    file.flush()
    return file.buffer.getvalue().decode(encoding)


@pytest.mark.parametrize(
    "environment", [{"KITTY_WINDOW_ID": "1"}, {"TERM": "xterm-kitty"}, {"TERM_PROGRAM": "ghostty"}], ids=str
)
def test_kitty_gets_the_file_in_chunks(png, environment):
    large = png + bytes(9000)
    sent = printed(large, environment)
    parts = re.findall(r"\x1b_G([^;]*);([^\x1b]*)\x1b\\", sent)
    assert base64.b64decode("".join(data for _, data in parts)) == large
    assert [control for control, _ in parts] == ["a=T,f=100,q=2,c=79,r=13,m=1", "m=1", "m=0"]
    assert re.sub(r"\x1b_G[^\x1b]*\x1b\\", "", sent) == "\n"


@pytest.mark.parametrize("environment", [{"TERM_PROGRAM": "iTerm.app"}, {"LC_TERMINAL": "iTerm2"}], ids=str)
def test_iterm_gets_the_file(png, environment):
    data = base64.b64encode(png).decode()
    assert printed(png, environment) == f"\x1b]1337;File=inline=1;size={len(png)};width=79;height=13:{data}\x07\n"


def decoded_sixels(text):
    """Return the pixels (H, W, 3), in percent, that a terminal would show."""
    width, height, body = re.fullmatch(r'\x1bP0;1;0q"1;1;(\d+);(\d+)(.*)\x1b\\\n', text, re.DOTALL).groups()
    pixels = np.full((int(height), int(width), 3), -1)
    colours = {int(i): (int(r), int(g), int(b)) for i, r, g, b in re.findall(r"#(\d+);2;(\d+);(\d+);(\d+)", body)}
    body = re.sub(r"#\d+;2;\d+;\d+;\d+", "", body)
    for band, rows in enumerate(body.split("-")):
        for line in rows.split("$"):
            number, codes = re.fullmatch(r"#(\d+)(.*)", line).groups()
            column = 0
            for count, code in re.findall(r"(?:!(\d+))?([?-~])", codes):
                span = int(count or 1)
                for bit in range(6):
                    if (ord(code) - 63) >> bit & 1:
                        pixels[6 * band + bit, column : column + span] = colours[int(number)]
                column += span
            assert column == int(width)
    return pixels


@pytest.mark.parametrize("environment", [{"TERM": "foot"}, {"KONSOLE_VERSION": "230800"}], ids=str)
def test_sixels_are_the_picture(png, environment):
    pixels = decoded_sixels(printed(png, environment))
    assert pixels.shape == (13 * 16, 79 * 8, 3)
    assert pixels.min() == 0  # every pixel has a colour
    corners = pixels[[0, 0, -1, -1], [0, -1, 0, -1]]
    assert np.abs(corners - [[100, 0, 0], [0, 0, 0], [100, 0, 0], [0, 0, 100]]).max() <= 3


@pytest.mark.parametrize(
    "environment",
    [{"TERM": "xterm-256color"}, {"TERM": "tmux-256color", "KITTY_WINDOW_ID": "1"}, {"KONSOLE_VERSION": "210800"}],
    ids=str,
)
def test_other_terminals_get_half_blocks(png, environment):
    lines = printed(png, environment).splitlines()
    assert [line.count("▀") for line in lines] == [79] * 13
    first = re.search(r"\x1b\[38;2;(\d+);(\d+);(\d+);48;2;(\d+);(\d+);(\d+)m", lines[0])
    assert [int(value) for value in first.groups()] == [255, 0, 0, 255, 0, 0]


def test_a_terminal_that_cannot_shows_nothing(png):
    assert printed(png, {}, color_system=None) is None
    assert printed(png, {}, encoding="ascii") is None
    assert printed(png, {}, legacy_windows=True) is None


def test_a_picture_is_shown_above_the_bars_where_it_is_wanted(png):
    def shown_by(**options):
        file = io.StringIO()
        console = Console(file=file, force_terminal=True, color_system="truecolor", width=80, _environ={})
        reporter = BarReporter(console, **options)
        with reporter.stage("denoise", total=2) as progress:
            progress.advance()
            reporter.picture(png, "preview of seed 7")
        return file.getvalue()

    assert "preview" not in shown_by()
    assert "preview of seed 7" in shown_by(pictures=True)


def test_without_a_terminal_or_with_quiet_nothing_is_shown(png, capsys):
    for quiet in (False, True):
        output.make_reporter(quiet=quiet, pictures=True).picture(png, "preview")
    assert capsys.readouterr() == ("", "")
