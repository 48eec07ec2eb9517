"""Draw the terminal of a first run: what `osora generate "raining, sea"` prints, as an SVG.

    python docs/record_terminal.py

The command runs in a pseudo-terminal of 80 columns, in an empty folder without settings or weights of yours. The
picture is written to `docs/pictures/terminal.svg`.
"""

import io
import os
import pty
import re
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

COMMAND = ["generate", "raining, sea"]
COLUMNS = 80
PATH = Path(__file__).parent / "pictures" / "terminal.svg"
# Sequences that move the cursor or erase. Colors (ending in m) are part of the text.
_PARTS = re.compile(r"(\r|\n|\x1b\[[\d;?]*[A-LN-Za-ln-z])")


def record(command: list[str], folder: str) -> str:
    """Run osora in a pseudo-terminal, and return all that it writes."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OSORA_", "HF_"))}
    environment = {**kept, "COLUMNS": str(COLUMNS), "LINES": "24", "TERM": "xterm-256color", "HF_HOME": folder}
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(folder)
        os.execve(sys.executable, [sys.executable, "-m", "opensora_cli", *command], environment)
    written = b""
    try:
        while part := os.read(terminal, 65_536):
            written += part
    except OSError:  # Linux reports the end of the process as an error.
        pass
    os.close(terminal)
    if os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]):
        raise SystemExit(written.decode())
    return written.decode()


def last_screen(written: str) -> list[str]:
    """Return the lines that are visible at the end. A line is always written whole, as progress bars do."""
    lines = [""]
    row = 0
    replaced = False
    for part in _PARTS.split(written):
        if part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part == "\r":
            replaced = True
            continue
        elif part.startswith("\x1b[") and part.endswith("A"):
            row -= int(part[2:-1] or 1)
        elif part.startswith("\x1b[") and part.endswith("K"):
            lines[row] = ""
        elif part and not _PARTS.fullmatch(part):
            lines[row] = part if replaced else lines[row] + part
        else:
            continue
        replaced = False
    return [line for line in lines if Text.from_ansi(line).plain.strip()]


def main() -> None:
    """Run the command and write the picture."""
    with tempfile.TemporaryDirectory() as folder:
        lines = last_screen(record(COMMAND, folder))
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text('$ osora generate "raining, sea"', style="bold"))
    for line in lines:
        console.print(Text.from_ansi(line))
    console.print()  # The picture cuts off the lower edge of its last line.
    svg = console.export_svg(title="osora", unique_id="osora")
    # The fonts of the reader are used: a page loads nothing from other hosts.
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL).replace("Fira Code, monospace", "monospace")
    PATH.write_text(svg, encoding="utf-8")
    print(PATH)


if __name__ == "__main__":
    main()
