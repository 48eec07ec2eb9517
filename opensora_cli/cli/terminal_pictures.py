"""Pictures in terminals: by the protocols of kitty, iTerm2 and sixel, or else as coloured half blocks.

What a terminal can do is taken from its environment: if it were asked, its answer would come among keys that are typed.
"""

import base64
import io
import re
from collections.abc import Iterator, Mapping
from itertools import groupby

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from rich.color import Color
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import ControlType, Segment
from rich.style import Style
from rich.text import Text

_MOST_COLUMNS, _MOST_ROWS = 120, 16
_KITTY_CHUNK = 4096
_SIXEL_CELL = (8, 16)
"""Pixels of a character, wide and high: those of real ones differ, and so does the size of what is shown."""
_SIXEL_BAND = 6
_SIXEL_TERMINALS = ("foot", "mlterm", "contour", "yaft")
_KITTY_PROGRAMS = ("kitty", "ghostty")
_ITERM_PROGRAMS = ("iTerm.app", "WezTerm", "mintty")


def shown(png: bytes, console: Console, environment: Mapping[str, str]) -> RenderableType | None:
    """Return what shows a PNG file in a terminal, at most 16 lines high; None where it shows no colours."""
    if console.color_system is None or console.legacy_windows:
        return None
    with Image.open(io.BytesIO(png), formats=["PNG"]) as file:
        picture = file.convert("RGB")
    columns, rows = _cells(picture.size, console.width)
    match _protocol(environment):
        case "kitty":
            return _Raw(_kitty(png, columns, rows))
        case "iterm":
            return _Raw(_iterm(png, columns, rows))
        case "sixel":
            size = columns * _SIXEL_CELL[0], rows * _SIXEL_CELL[1]
            return _Raw(_sixel(picture.resize(size, Image.Resampling.BICUBIC)))
    return None if console.options.ascii_only else _half_blocks(picture.resize((columns, 2 * rows)))


def _cells(size: tuple[int, int], width: int) -> tuple[int, int]:
    """Return the columns and rows of a picture of this width and height, in characters twice as high as wide."""
    columns = min(_MOST_COLUMNS, width - 1, _MOST_ROWS * 2 * size[0] // size[1])
    return max(1, columns), max(1, columns * size[1] // (2 * size[0]))


def _protocol(environment: Mapping[str, str]) -> str | None:
    terminal, program = environment.get("TERM", ""), environment.get("TERM_PROGRAM", "")
    if "TMUX" in environment or "STY" in environment or terminal.startswith(("tmux", "screen")):
        return None  # they do not hand on what they do not know
    if "KITTY_WINDOW_ID" in environment or program in _KITTY_PROGRAMS or "kitty" in terminal:
        return "kitty"
    if program in _ITERM_PROGRAMS or environment.get("LC_TERMINAL") == "iTerm2":
        return "iterm"
    konsole = environment.get("KONSOLE_VERSION", "")
    is_konsole = re.fullmatch(r"\d{6}", konsole) is not None and konsole >= "220400"
    return "sixel" if is_konsole or "sixel" in terminal or terminal.startswith(_SIXEL_TERMINALS) else None


class _Raw:
    """Text for the terminal itself, which rich neither measures nor wraps."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        # Anything counts as a control code that has one.
        yield Segment(self._text, None, [(ControlType.CARRIAGE_RETURN,)])
        yield Segment.line()


def _kitty(png: bytes, columns: int, rows: int) -> str:
    """Return the escape sequences of the terminal graphics protocol: shown at once, and not answered.

    https://sw.kovidgoyal.net/kitty/graphics-protocol/
    """
    data = base64.standard_b64encode(png).decode("ascii")
    chunks = [data[start : start + _KITTY_CHUNK] for start in range(0, len(data), _KITTY_CHUNK)]
    first = f"a=T,f=100,q=2,c={columns},r={rows},"
    return "".join(
        f"\x1b_G{'' if index else first}m={int(index + 1 < len(chunks))};{chunk}\x1b\\"
        for index, chunk in enumerate(chunks)
    )


def _iterm(png: bytes, columns: int, rows: int) -> str:
    """Return the escape sequence of an inline image: https://iterm2.com/documentation-images.html"""
    data = base64.standard_b64encode(png).decode("ascii")
    return f"\x1b]1337;File=inline=1;size={len(png)};width={columns};height={rows}:{data}\x07"


def _sixel(picture: Image.Image) -> str:
    """Return the escape sequence of an RGB picture in DEC's sixels, of up to 256 colours.

    https://vt100.net/docs/vt3xx-gp/chapter14.html
    """
    indexed = picture.quantize(256)
    indices_HW: NDArray[np.uint8] = np.asarray(indexed)
    height, width = indices_HW.shape
    percents = np.asarray(indexed.getpalette(), dtype=int).reshape(-1, 3) * 100 // 255
    colours = "".join(f"#{index};2;{red};{green};{blue}" for index, (red, green, blue) in enumerate(percents))
    bands = ("$".join(_sixel_lines(indices_HW[top : top + _SIXEL_BAND])) for top in range(0, height, _SIXEL_BAND))
    return f'\x1bP0;1;0q"1;1;{width};{height}{colours}{"-".join(bands)}\x1b\\'


def _sixel_lines(band_hW: NDArray[np.uint8]) -> Iterator[str]:
    """Yield a line for each colour of six rows of indices: a character has a bit for each row."""
    bits_h1 = (1 << np.arange(len(band_hW)))[:, None]
    for colour in np.unique(band_hW):
        line = bytes((((band_hW == colour) * bits_h1).sum(axis=0) + 63).astype(np.uint8)).decode("ascii")
        runs = ((character, len(list(run))) for character, run in groupby(line))
        yield f"#{colour}" + "".join(f"!{count}{char}" if count > 3 else char * count for char, count in runs)


def _half_blocks(picture: Image.Image) -> Text:
    """Return a picture of even height with two pixels to a character."""
    pixels_HW3: NDArray[np.uint8] = np.asarray(picture)
    text = Text()
    for index in range(0, len(pixels_HW3), 2):
        for upper, lower in zip(*pixels_HW3[index : index + 2].tolist(), strict=True):
            text.append("▀", Style(color=Color.from_rgb(*upper), bgcolor=Color.from_rgb(*lower)))
        text.append("\n" if index + 2 < len(pixels_HW3) else "")
    return text
