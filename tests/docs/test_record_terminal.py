"""The picture of the terminal shows its last screen."""

import importlib.util

from docs.pages import ROOT


def test_erased_and_replaced_lines_are_not_shown() -> None:
    spec = importlib.util.spec_from_file_location("record_terminal", ROOT / "docs" / "record_terminal.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    bars = "\x1b[?25l\r\x1b[2Ktext \x1b[33m0:01\x1b[0m\ndenoise\r\x1b[1A\x1b[2Ktext 0:02\n\x1b[2Kdenoise 2/50"
    assert module.last_screen(
        f"model: demo\r\n{bars}\r\x1b[2K\x1b[1A\x1b[2K\x1b[?25h\rsaved \x1b[32ma.mp4\x1b[0m\r\n"
    ) == [
        "model: demo",
        "saved \x1b[32ma.mp4\x1b[0m",
    ]
