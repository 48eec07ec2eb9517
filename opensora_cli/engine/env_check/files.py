"""Variables that Dockerfiles and shell scripts set, and the rules of `environment` for them."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

from opensora_cli.core.exceptions import FileProblem
from opensora_cli.core.redaction import is_relevant
from opensora_cli.engine.env_check.environment import lint_names, lint_variables
from opensora_cli.engine.env_check.findings import Check, Finding
from opensora_cli.engine.env_check.shell_words import Word, split_words

_CHECK = Check("file")
_LARGEST = 2**20
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_INSTRUCTION = re.compile(r"\s*([A-Za-z]+)\s+(.*)", re.DOTALL)
_CLOSED_BY = {
    "if": "fi",
    "case": "esac",
    "for": "done",
    "while": "done",
    "until": "done",
    "select": "done",
    "{": "}",
    "(": ")",
}
_KEYWORDS = frozenset({"then", "else", "elif", "do", "!", "time"}) | _CLOSED_BY.keys() | set(_CLOSED_BY.values())
_DECLARING = frozenset({"export", "declare", "typeset", "readonly", "local"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """A variable that a file sets."""

    name: str
    value: str | None
    """None: it depends on other variables or commands."""
    line: int
    is_certain: bool = True
    """Whether it happens whenever the file runs, and lasts: not in a branch, not for one command."""
    scope: int = 0
    """The stage of a Dockerfile."""
    lasts: bool = True
    """False in RUN, whose shell ends with it."""


def lint_file(path: Path) -> list[Finding]:
    """Return what is wrong with the variables that a Dockerfile or a shell file sets.

    Raises:
        FileProblem: it cannot be read, or is not text.
    """
    text = _read(path)
    is_docker = is_dockerfile(path.name, text)
    assignments = list(read_dockerfile(text) if is_docker else read_shell(text))
    findings = [replace(finding, check=_CHECK.name, file=str(path)) for finding in lint_assignments(assignments)]
    if findings:
        return findings
    count = len({assignment.name for assignment in assignments if is_relevant(assignment.name)})
    return [replace(_CHECK.ok(f"nothing wrong with {count} variables that matter here"), file=str(path))]


def is_dockerfile(name: str, text: str) -> bool:
    """Return whether a file of this name and content is a Dockerfile, not a shell script."""
    lowered = PurePath(name).name.lower()
    if lowered.startswith(("dockerfile", "containerfile")) or lowered.endswith((".dockerfile", ".containerfile")):
        return True
    lines = (line.strip() for line in text.splitlines())
    first = next((line for line in lines if line and not line.startswith("#")), "")
    return bool(re.match(r"(?i)(FROM\s+\S+|ARG\s+\w+)", first))


def lint_assignments(assignments: Sequence[Assignment]) -> list[Finding]:
    """Return the findings for what a file sets, in the order of its lines."""
    findings = [*_set_twice(assignments), *_lost(assignments)]
    # Rules see what holds at the end of each stage, as the programs that are started there do.
    for scope in sorted({assignment.scope for assignment in assignments}):
        last = {found.name: found for found in assignments if found.scope == scope and found.lasts}
        known = {name: found.value for name, found in last.items() if found.value is not None}
        for finding in [*lint_variables(known, None), *lint_names(last.keys() - known.keys())]:
            found = last.get(finding.variable or "")
            findings.append(replace(finding, line=found.line if found else None))
    return sorted(findings, key=lambda finding: finding.line or 0)


def _set_twice(assignments: Sequence[Assignment]) -> Iterator[Finding]:
    seen: dict[tuple[int, str], Assignment] = {}
    for now in assignments:
        if not (now.is_certain and now.lasts and is_relevant(now.name)):
            continue
        before = seen.get((now.scope, now.name))
        seen[now.scope, now.name] = now
        # What extends or defaults to the earlier value is meant to come after it.
        if before is None or now.value is None:
            continue
        same = "to the same value" if before.value == now.value else "and the second value wins"
        finding = _CHECK.warning(
            f"{now.name} is set twice, first in line {before.line}, {same}",
            why="whoever changes the first line changes nothing",
            mend=f"drop line {before.line}",
            variable=now.name,
        )
        yield replace(finding, line=now.line)


def _lost(assignments: Sequence[Assignment]) -> Iterator[Finding]:
    for found in assignments:
        if not found.lasts and is_relevant(found.name):
            finding = _CHECK.warning(
                f"RUN sets {found.name} for itself alone",
                why="its shell ends with the instruction, and nothing that comes later sees the variable",
                mend=f"ENV {found.name}=...",
                variable=found.name,
            )
            yield replace(finding, line=found.line)


def read_dockerfile(text: str) -> Iterator[Assignment]:
    """Yield what `ENV` and `ARG` set, and what `RUN` exports."""
    scope = 0
    for line, instruction in _instructions(text):
        matched = _INSTRUCTION.fullmatch(instruction)
        if matched is None:
            continue
        keyword, rest = matched[1].upper(), matched[2]
        if keyword == "FROM":
            scope += 1
        elif keyword == "RUN":
            for found in read_shell(rest, first_line=line, only_exports=True):
                yield replace(found, scope=scope, lasts=False)
        elif keyword in ("ENV", "ARG"):
            for name, value, at in _pairs(rest, line, keyword=keyword):
                yield Assignment(name=name, value=value, line=at, scope=scope)


def _pairs(rest: str, line: int, *, keyword: str) -> Iterator[tuple[str, str | None, int]]:
    words = list(split_words(rest, first_line=line, has_operators=False))
    if words and keyword == "ENV" and "=" not in words[0].text:
        # The old form: all that follows the name is the value.
        _, _, value = rest.strip().partition(words[0].text)
        yield words[0].text, value.strip() if all(word.is_literal for word in words) else None, words[0].line
        return
    for word in words:
        matched = _ASSIGNMENT.fullmatch(word.text)
        if matched:
            yield matched[1], matched[2] if word.is_literal else None, word.line


def _instructions(text: str) -> Iterator[tuple[int, str]]:
    """Yield each instruction and the number of its first line; continued ones keep backslashes and line ends."""
    lines = text.splitlines()
    index = 0
    while index < len(lines):
        start = index
        if not lines[index].strip() or lines[index].lstrip().startswith("#"):
            index += 1
            continue
        parts: list[str] = []
        while index < len(lines):
            line = lines[index]
            index += 1
            # Comments and empty lines inside an instruction are left out; an escaped break keeps lines counted.
            if parts and (not line.strip() or line.lstrip().startswith("#")):
                parts.append("\\")
                continue
            parts.append(line.rstrip())
            if not line.rstrip().endswith("\\"):
                break
        yield start + 1, "\n".join(parts).removesuffix("\\")


def read_shell(text: str, *, first_line: int = 1, only_exports: bool = False) -> Iterator[Assignment]:
    """Yield what a shell script sets.

    Args:
        text: the script.
        first_line: the number of its first line.
        only_exports: leave out variables that programs started by it do not see.
    """
    open_blocks, command = list[str](), list[Word]()
    for word in [*split_words(text, first_line=first_line), Word("\n", 0, is_operator=True)]:
        if not word.is_operator:
            command.append(word)
            continue
        while command and command[0].text in _KEYWORDS:
            _note_block(open_blocks, command.pop(0).text)
        yield from _assignments_of(command, is_certain=not open_blocks, only_exports=only_exports)
        command = []
        _note_block(open_blocks, word.text)


def _note_block(open_blocks: list[str], text: str) -> None:
    """Open or close a block; the parenthesis after a pattern of `case` closes none."""
    if text in _CLOSED_BY:
        open_blocks.append(text)
    elif open_blocks and _CLOSED_BY[open_blocks[-1]] == text:
        open_blocks.pop()


def _assignments_of(command: Sequence[Word], *, is_certain: bool, only_exports: bool) -> Iterator[Assignment]:
    """Yield what one simple command sets."""
    if not command:
        return
    exports = command[0].text in _DECLARING
    words = command[1:] if exports else command
    leading = []
    for word in words:
        matched = _ASSIGNMENT.fullmatch(word.text)
        if matched:
            leading.append((matched, word))
        elif not exports:
            # NAME=value program: for this program alone.
            is_certain = False
            break
    if only_exports and not exports:
        return
    for matched, word in leading:
        value = matched[2] if word.is_literal else None
        yield Assignment(name=matched[1], value=value, line=word.line, is_certain=is_certain)


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > _LARGEST:
            raise FileProblem(f"{path} is too large for a Dockerfile or a shell file")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise FileProblem(f"{path} does not exist", hint="name a Dockerfile or a shell file") from None
    except OSError as error:
        raise FileProblem(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise FileProblem(f"{path} is not text", hint="name a Dockerfile or a shell file") from None
