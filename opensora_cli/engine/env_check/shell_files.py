"""Variables that Dockerfiles and shell files set, and the rules of `variables` for them.

Lines are split by `shlex`. What it cannot read, such as a quote over several lines, is not read, and reported so.
Nothing is expanded: a value with `$` or a backquote counts as not known.
"""

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

from opensora_cli.core.reading import read_text
from opensora_cli.core.redaction import is_relevant
from opensora_cli.engine.env_check.report import Check, Finding
from opensora_cli.engine.env_check.variables import lint_variables

_CHECK = Check("file")
_LARGEST_BYTES = 2**20
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_OPERATORS = "();<>|&"
_INNER_HASH, _HASH = re.compile(r"(?<=[^\s;&|()<>])#"), "\ue000"
"""A `#` inside a word, and a private character in its place."""
_DECLARING = frozenset({"export", "declare", "typeset", "readonly", "local"})
_CLOSED_BY = {"if": "fi", "case": "esac", **dict.fromkeys(("for", "while", "until", "select"), "done")}
_CLOSED_BY |= {"{": "}", "(": ")"}
_KEYWORDS = frozenset({*_CLOSED_BY, *_CLOSED_BY.values(), "then", "else", "elif", "do", "!", "time"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """A variable that a file sets."""

    name: str
    value: str | None
    """None: it depends on other variables or commands."""
    line: int
    is_certain: bool
    """Whether it always happens, and lasts: not in a branch, not for one command."""
    is_exported: bool
    stage: int = 0
    """The stage of a Dockerfile."""


def lint_file(path: Path) -> list[Finding]:
    """Return what is wrong with the variables that a Dockerfile or a shell file sets, in the order of its lines.
    Raises FileProblem if it cannot be read, or is not text.
    """
    text = _read(path)
    read = list(read_dockerfile(text) if is_dockerfile(path.name, text) else read_shell(text))
    assignments = [item for item in read if isinstance(item, Assignment) and is_relevant(item.name)]
    findings = [*_set_twice(assignments), *(item for item in read if isinstance(item, Finding))]
    # Rules see what holds at the end of each stage, as the programs that are started there do.
    for stage in sorted({found.stage for found in assignments}):
        last = {found.name: found for found in assignments if found.stage == stage}
        for finding in lint_variables({name: found.value for name, found in last.items()}, None):
            findings.append(finding.model_copy(update={"line": last[str(finding.variable)].line}))
    if not findings:
        count = len({found.name for found in assignments})
        findings = [_CHECK.ok(f"nothing wrong with {count} variables that matter here")]
    findings.sort(key=lambda finding: finding.line or 0)
    return [finding.model_copy(update={"check": _CHECK.name, "file": str(path)}) for finding in findings]


def is_dockerfile(name: str, text: str) -> bool:
    """Return whether a file of this name and content is a Dockerfile, not a shell script."""
    if re.search(r"(?i)^(docker|container)file|\.(docker|container)file$", name):
        return True
    first = next((line for line in map(str.strip, text.splitlines()) if line and not line.startswith("#")), "")
    return bool(re.match(r"(?i)(FROM\s+\S+|ARG\s+\w+)", first))


def _set_twice(assignments: Iterable[Assignment]) -> Iterator[Finding]:
    seen: dict[tuple[int, str], Assignment] = {}
    for now in assignments:
        if not now.is_certain:
            continue
        before = seen.get((now.stage, now.name))
        seen[now.stage, now.name] = now
        # What extends or defaults to the earlier value is meant to come after it.
        if before is None or now.value is None:
            continue
        same = "to the same value" if before.value == now.value else "and the second value wins"
        yield _CHECK.warning(
            f"{now.name} is set twice, first in line {before.line}, {same}",
            why="a change of the first line changes nothing",
            fix=f"drop line {before.line}",
            variable=now.name,
            line=now.line,
        )


def read_dockerfile(text: str) -> Iterator[Assignment | Finding]:
    """Yield what `ENV` and `ARG` set, and findings: what `RUN` exports in vain, and lines that cannot be read."""
    stage = 0
    for line, instruction in _joined_lines(text):
        keyword, _, rest = instruction.strip().partition(" ")
        match keyword.upper():
            case "FROM":
                stage += 1
            case "RUN":
                for found in _read_commands([(line, rest)]):
                    if isinstance(found, Finding):
                        yield found
                    elif found.is_exported and is_relevant(found.name):
                        yield _lost(found)
            case "ENV" | "ARG" as kind:
                try:
                    words = _split(rest, line, operators="", comments="")
                except ValueError as error:
                    yield _CHECK.unknown(str(error), line=line)
                    continue
                if words and kind == "ENV" and "=" not in words[0][0]:
                    # The old form: all that follows the name is the value.
                    words = [(f"{words[0][0]}={' '.join(word for word, _ in words[1:])}", line)]
                for assignment in _assignments([("export", line), *words], is_certain=True):
                    yield replace(assignment, stage=stage)


def _lost(found: Assignment) -> Finding:
    return _CHECK.warning(
        f"RUN sets {found.name} for itself alone",
        why="its shell ends with the instruction, and nothing that comes later sees the variable",
        fix=f"ENV {found.name}=...",
        variable=found.name,
        line=found.line,
    )


def read_shell(text: str) -> Iterator[Assignment | Finding]:
    """Yield what a shell script sets, and findings: lines that cannot be read."""
    return _read_commands(_joined_lines(text))


def _joined_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield lines, each with its number and joined with those that continue it; comments and empty lines left out."""
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


def _split(text: str, line: int, *, operators: str, comments: str) -> list[tuple[str, int]]:
    """Return the words of a text that begins in `line`, each with its own line.
    Raises ValueError if a quote or an escape has no end.
    """
    if comments:  # a shell's comment begins a word, but `shlex` sees one inside of words, too
        text = _INNER_HASH.sub(_HASH, text)
    lexer = shlex.shlex(text, posix=True, punctuation_chars=operators)
    lexer.whitespace_split, lexer.commenters, lexer.lineno = True, comments, line
    return [(word.replace(_HASH, "#"), lexer.lineno) for word in lexer]


def _read_commands(lines: Iterable[tuple[int, str]]) -> Iterator[Assignment | Finding]:
    closers: list[str] = []  # of the blocks that are open
    document_end: str | None = None
    for line, text in lines:
        if document_end is not None:  # inside of <<EOF
            document_end = None if text.strip() == document_end else document_end
            continue
        try:
            words = _split(text, line, operators=_OPERATORS, comments="#")
        except ValueError as error:
            yield _CHECK.unknown(str(error), line=line)
            continue
        command: list[tuple[str, int]] = []
        for index, (word, at) in enumerate([*words, (";", line)]):
            if word == "<<" and words[index + 1 :] and (end := words[index + 1][0].removeprefix("-")).isidentifier():
                document_end = end
            is_operator = bool(word) and not word.strip(_OPERATORS)
            if not is_operator and (command or word not in _KEYWORDS):
                command.append((word, at))
                continue
            yield from _assignments(command, is_certain=not closers)
            command = []
            for mark in word if is_operator else [word]:
                if mark in _CLOSED_BY:
                    closers.append(_CLOSED_BY[mark])
                elif closers and closers[-1] == mark:  # the parenthesis after a pattern of `case` closes none
                    closers.pop()


def _assignments(command: Sequence[tuple[str, int]], *, is_certain: bool) -> Iterator[Assignment]:
    """Yield what one simple command sets."""
    is_exported = bool(command) and command[0][0] in _DECLARING
    words = command[1:] if is_exported else list(takewhile(lambda item: _ASSIGNMENT.fullmatch(item[0]), command))
    # NAME=value program: for this program alone.
    lasts = is_exported or len(words) == len(command)
    for word, line in words:
        if matched := _ASSIGNMENT.fullmatch(word):
            name, value = matched.groups()
            known = None if "$" in value or "`" in value else value
            yield Assignment(
                name=name, value=known, line=line, is_certain=is_certain and lasts, is_exported=is_exported
            )


def _read(path: Path) -> str:
    return read_text(path, max_bytes=_LARGEST_BYTES, hint="name a Dockerfile or a shell file")
