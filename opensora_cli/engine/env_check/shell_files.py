"""Variables that Dockerfiles and shell files set, and the rules of `variables` for them.

Lines are split by `shlex`. What it cannot read, such as a quote over several lines, is not read, and reported so.
Nothing is expanded: a value with `$` or a backquote counts as not known.
"""

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from opensora_cli.core.exceptions import FileProblem
from opensora_cli.core.redaction import is_relevant
from opensora_cli.engine.env_check.report import Check, Finding
from opensora_cli.engine.env_check.variables import lint_variables

_CHECK = Check("file")
_LARGEST_BYTES = 2**20
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_INNER_HASH = re.compile(r"(?<=[^\s;&|()<>])#")
_HASH = "\ue000"
"""A private character in place of `#`."""
_DECLARING = frozenset({"export", "declare", "typeset", "readonly", "local"})
_OPENING = {"if": "fi", "case": "esac", "for": "done", "while": "done", "until": "done", "select": "done"}
_CLOSED_BY = {**_OPENING, "{": "}", "(": ")"}
_KEYWORDS = frozenset({*_CLOSED_BY, *_CLOSED_BY.values(), "then", "else", "elif", "do", "!", "time"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """A variable that a file sets."""

    name: str
    value: str | None
    """None: it depends on other variables or commands."""
    line: int
    is_certain: bool = True
    """Whether it always happens, and lasts: not in a branch, not for one command."""
    stage: int = 0
    """The stage of a Dockerfile."""
    lasts: bool = True
    """False in RUN, whose shell ends with it."""


@dataclass(frozen=True, slots=True)
class Unread:
    """A line that `shlex` cannot split."""

    line: int
    reason: str


def lint_file(path: Path) -> list[Finding]:
    """Return what is wrong with the variables that a Dockerfile or a shell file sets, in the order of its lines.
    Raises FileProblem if it cannot be read, or is not text.
    """
    text = _read(path)
    read = list(read_dockerfile(text) if is_dockerfile(path.name, text) else read_shell(text))
    assignments = [item for item in read if isinstance(item, Assignment)]
    findings = lint_assignments(assignments)
    for item in read:
        if isinstance(item, Unread):
            findings.append(_CHECK.unknown(item.reason).model_copy(update={"line": item.line}))
    if not findings:
        count = len({assignment.name for assignment in assignments if is_relevant(assignment.name)})
        findings = [_CHECK.ok(f"nothing wrong with {count} variables that matter here")]
    findings.sort(key=lambda finding: finding.line or 0)
    return [finding.model_copy(update={"check": _CHECK.name, "file": str(path)}) for finding in findings]


def is_dockerfile(name: str, text: str) -> bool:
    """Return whether a file of this name and content is a Dockerfile, not a shell script."""
    lowered = name.lower()
    if lowered.startswith(("dockerfile", "containerfile")) or lowered.endswith((".dockerfile", ".containerfile")):
        return True
    first = next((line for line in map(str.strip, text.splitlines()) if line and not line.startswith("#")), "")
    return bool(re.match(r"(?i)(FROM\s+\S+|ARG\s+\w+)", first))


def lint_assignments(assignments: Sequence[Assignment]) -> list[Finding]:
    """Return the findings for what a file sets."""
    findings = [*_set_twice(assignments), *_lost(assignments)]
    # Rules see what holds at the end of each stage, as the programs that are started there do.
    for stage in sorted({assignment.stage for assignment in assignments}):
        last = {found.name: found for found in assignments if found.stage == stage and found.lasts}
        for finding in lint_variables({name: found.value for name, found in last.items()}, None):
            line = last[finding.variable].line if finding.variable in last else None
            findings.append(finding.model_copy(update={"line": line}))
    return findings


def _set_twice(assignments: Iterable[Assignment]) -> Iterator[Finding]:
    seen: dict[tuple[int, str], Assignment] = {}
    for now in assignments:
        if not (now.is_certain and now.lasts and is_relevant(now.name)):
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
        ).model_copy(update={"line": now.line})


def _lost(assignments: Iterable[Assignment]) -> Iterator[Finding]:
    for found in assignments:
        if not found.lasts and is_relevant(found.name):
            yield _CHECK.warning(
                f"RUN sets {found.name} for itself alone",
                why="its shell ends with the instruction, and nothing that comes later sees the variable",
                fix=f"ENV {found.name}=...",
                variable=found.name,
            ).model_copy(update={"line": found.line})


def read_dockerfile(text: str) -> Iterator[Assignment | Unread]:
    """Yield what `ENV` and `ARG` set, and what `RUN` exports."""
    stage = 0
    for line, instruction in _joined_lines(text):
        keyword, _, rest = instruction.strip().partition(" ")
        keyword = keyword.upper()
        if keyword == "FROM":
            stage += 1
        elif keyword == "RUN":
            for found in _read_commands([(line, rest)], only_exports=True):
                yield replace(found, stage=stage, lasts=False) if isinstance(found, Assignment) else found
        elif keyword in ("ENV", "ARG"):
            try:
                words = _split(rest, line, operators="", comments="")
            except ValueError as error:
                yield Unread(line, str(error))
                continue
            if words and keyword == "ENV" and "=" not in words[0][0]:
                # The old form: all that follows the name is the value.
                words = [(f"{words[0][0]}={' '.join(word for word, _ in words[1:])}", line)]
            for word, at in words:
                if matched := _ASSIGNMENT.fullmatch(word):
                    yield Assignment(name=matched[1], value=_literal(matched[2]), line=at, stage=stage)


def read_shell(text: str) -> Iterator[Assignment | Unread]:
    """Yield what a shell script sets."""
    return _read_commands(_joined_lines(text), only_exports=False)


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


def _literal(value: str) -> str | None:
    return None if "$" in value or "`" in value else value


def _read_commands(lines: Iterable[tuple[int, str]], *, only_exports: bool) -> Iterator[Assignment | Unread]:
    """Yield what commands set; `only_exports` leaves out variables that other programs do not see."""
    open_blocks: list[str] = []
    document_end: str | None = None
    for line, text in lines:
        if document_end is not None:  # inside of <<EOF
            document_end = None if text.strip() == document_end else document_end
            continue
        try:
            words = _split(text, line, operators="();<>|&", comments="#")
        except ValueError as error:
            yield Unread(line, str(error))
            continue
        command: list[tuple[str, int]] = []
        for index, (word, at) in enumerate([*words, (";", line)]):
            if word == "<<" and words[index + 1 :] and (end := words[index + 1][0].removeprefix("-")).isidentifier():
                document_end = end
            is_operator = bool(word) and not word.strip("();<>|&")
            if is_operator or (word in _KEYWORDS and not command):
                yield from _assignments(command, is_certain=not open_blocks, only_exports=only_exports)
                command = []
                for mark in word if is_operator else [word]:
                    _note_block(open_blocks, mark)
            else:
                command.append((word, at))


def _note_block(open_blocks: list[str], mark: str) -> None:
    """Open or close a block; the parenthesis after a pattern of `case` closes none."""
    if mark in _CLOSED_BY:
        open_blocks.append(mark)
    elif open_blocks and _CLOSED_BY[open_blocks[-1]] == mark:
        open_blocks.pop()


def _assignments(command: Sequence[tuple[str, int]], *, is_certain: bool, only_exports: bool) -> Iterator[Assignment]:
    """Yield what one simple command sets."""
    exports = bool(command) and command[0][0] in _DECLARING
    if only_exports and not exports:
        return
    matches = [(_ASSIGNMENT.fullmatch(word), line) for word, line in command[1 if exports else 0 :]]
    for matched, line in matches:
        if matched is None:
            if not exports:
                return
            continue
        # NAME=value program: for this program alone.
        lasts = exports or all(other for other, _ in matches)
        yield Assignment(name=matched[1], value=_literal(matched[2]), line=line, is_certain=is_certain and lasts)


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > _LARGEST_BYTES:
            raise FileProblem(f"{path} is too large for a Dockerfile or a shell file")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise FileProblem(f"{path} does not exist", hint="name a Dockerfile or a shell file") from None
    except OSError as error:
        raise FileProblem(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise FileProblem(f"{path} is not text", hint="name a Dockerfile or a shell file") from None
