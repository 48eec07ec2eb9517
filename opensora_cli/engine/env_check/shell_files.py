"""Environment variables that Dockerfiles and shell files set, and the rules of `variables` for them.

Only lines that begin with `ENV`, `ARG` or `export` count. Nothing is expanded: a value with `$` or a backquote counts
as unknown.
"""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from opensora_cli.core.reading import read_text
from opensora_cli.core.redaction import is_relevant
from opensora_cli.engine.env_check.report import Finding, ok, unknown, warning
from opensora_cli.engine.env_check.variables import lint_variables

_LARGEST_BYTES = 2**20
_LINE = re.compile(r"\s*(?:(FROM)\s|(RUN)\s.*?\bexport\s+|(ENV|ARG|export)\s+)(.*)", re.DOTALL)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)


class _Assignment(NamedTuple):
    name: str
    value: str | None
    """None if it depends on other variables or commands."""
    line: int
    stage: int
    """Stage of a Dockerfile."""
    is_certain: bool
    """Whether the line is not indented, as in a branch."""


def lint_file(path: Path) -> list[Finding]:
    """Return the findings about the variables that a Dockerfile or a shell file sets, in the order of its lines.
    Raises FileProblem if it cannot be read, or is not text.
    """
    text = read_text(path, max_bytes=_LARGEST_BYTES, hint="name a Dockerfile or a shell file")
    read = list(_read(text))
    findings = [item for item in read if isinstance(item, Finding)]
    assignments = [item for item in read if isinstance(item, _Assignment) and is_relevant(item.name)]
    seen: dict[tuple[int, str], _Assignment] = {}
    for now in assignments:
        before = seen.get((now.stage, now.name))
        seen[now.stage, now.name] = now
        # A value that extends the earlier one is meant to follow it.
        if before is not None and before.is_certain and now.is_certain and now.value is not None:
            findings.append(
                warning(
                    f"{now.name} is set twice, first in line {before.line}",
                    why="a change of the first line changes nothing",
                    fix=f"drop line {before.line}",
                    variable=now.name,
                    line=now.line,
                )
            )
    # The rules see the values at the end of each stage, as the programs that are started there do.
    for stage in sorted({found.stage for found in assignments}):
        last = {name: found for (number, name), found in seen.items() if number == stage}
        for finding in lint_variables({name: found.value for name, found in last.items()}, None):
            findings.append(finding.model_copy(update={"line": last[str(finding.variable)].line}))
    if not findings:
        count = len({found.name for found in assignments})
        findings = [ok(f"nothing wrong with {count} variables that matter here")]
    findings.sort(key=lambda finding: finding.line or 0)
    return [finding.model_copy(update={"check": "file", "file": str(path)}) for finding in findings]


def _read(text: str) -> Iterator[_Assignment | Finding]:
    stage = 0
    for line, joined in _joined_lines(text):
        if (matched := _LINE.match(joined)) is None:
            continue
        begins_stage, runs, keyword, rest = matched.groups()
        if begins_stage:
            stage += 1
            continue
        lexer = shlex.shlex(rest, posix=True, punctuation_chars=";&|")
        lexer.whitespace_split, lexer.lineno = True, line
        lexer.commenters = "#" if keyword == "export" else ""
        try:
            words = [(word, lexer.lineno) for word in lexer]
        except ValueError as error:
            yield unknown(str(error), line=line)
            continue
        if keyword == "ENV" and words and "=" not in words[0][0]:
            # The old form: everything after the name is the value.
            words = [(f"{words[0][0]}={' '.join(word for word, _ in words[1:])}", line)]
        for word, at in words:
            if word.strip(";&|") == "":
                break  # another command
            if (assignment := _ASSIGNMENT.fullmatch(word)) is None:
                continue
            name, value = assignment.groups()
            if not runs:
                known = None if "$" in value or "`" in value else value
                yield _Assignment(name, known, at, stage, is_certain=not joined[0].isspace())
            elif is_relevant(name):
                yield warning(
                    f"RUN sets {name} for itself alone",
                    why="its shell ends with the instruction, and no later program sees the variable",
                    fix=f"ENV {name}=...",
                    variable=name,
                    line=at,
                )


def _joined_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield each line with its number, joined with the lines that continue it, without comments and empty lines."""
    joined, start = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            joined += "\n" if joined else ""
            continue
        start = start if joined else number
        if line.rstrip().endswith("\\"):
            joined += line.rstrip()[:-1] + " \n"
        else:
            yield start, joined + line
            joined = ""
    if joined:
        yield start, joined
