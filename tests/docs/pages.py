"""The shell commands of README.md, CONTRIBUTING.md and the pages in docs/, and what each of them needs.

A fenced `bash` block may have a comment on the line before it, `<!-- needs: weights, GPUs -->`, with what a machine
that runs the tests does not have.
"""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Written by docs/generate_reference.py. The commands in it are the examples of the help texts.
PAGES.remove(ROOT / "docs" / "reference" / "commands.md")
PAGES.append(ROOT / "examples" / "demo" / "README.md")

NEEDS: dict[str, frozenset[int]] = {
    "weights": frozenset({3, 4}),
    "GPUs": frozenset({3, 4}),
    "several machines": frozenset({4}),
    "your files": frozenset({3}),
    "the steps before": frozenset({0, 3}),
    "network": frozenset({0}),
    "minutes": frozenset({0}),
    "hours": frozenset({0, 3}),
    "a development environment": frozenset({0}),
    "a server": frozenset({0}),
}
"""What a block may need, and with which exit codes a command ends that is planned without it."""

_BLOCK = re.compile(
    r"^(?:<!-- (?:needs: (.*?)|\.ci/run runs this block) -->\n)?```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class Block:
    """A fenced block of shell commands."""

    page: str
    needs: tuple[str, ...]
    text: str

    @property
    def runs_here(self) -> bool:
        """Whether a machine without GPUs, weights and network can run it after the blocks before it."""
        return not set(self.needs) - {"the steps before"} and "pip install" not in self.script

    @property
    def script(self) -> str:
        """What is run: osora is installed already."""
        return re.sub(r"^pip install [^&\n]* && (?=osora )", "", self.text, flags=re.MULTILINE)

    @property
    def exit_codes(self) -> frozenset[int]:
        """The exit codes with which its commands may end when they are planned alone."""
        return frozenset({0}).union(*(NEEDS[need] for need in self.needs))

    def osora_commands(self) -> list[tuple[str, ...]]:
        """Return the arguments of each `osora` command."""
        found = []
        for line in re.sub(r"\\\n\s*", " ", self.text).splitlines():
            for part in re.split(r"&&|;(?= )", line):
                words = tuple(shlex.split(part.replace('eval "$(', "").removesuffix(')"'), comments=True))
                for name in ("osora", "opensora_cli"):
                    if name in words and words[0] not in ("git", "cd"):
                        found.append(words[words.index(name) + 1 :])
        return found


def blocks_of(page: Path) -> list[Block]:
    """Return the shell blocks of a page in their order."""
    name = str(page.relative_to(ROOT))
    found = []
    for needs, language, text in _BLOCK.findall(page.read_text(encoding="utf-8")):
        if language in ("bash", "console", "sh", "shell"):
            assert language == "bash", f"{name}: shell blocks are bash, without prompts"
            found.append(Block(name, tuple(need for need in needs.split(", ") if need), text))
    return found
