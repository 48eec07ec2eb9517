"""Environment variables that Dockerfiles and shell files set, and the rules of `variables` for them.

Only lines that begin with `ENV`, `ARG` or `export` count. Nothing is expanded: a value with `$` or a backquote counts
as unknown.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from opensora_cli.core.reading import read_text
from opensora_cli.core.redaction import is_relevant
from opensora_cli.engine.env_check.report import Finding, ok
from opensora_cli.engine.env_check.variables import lint_variables

_LARGEST_BYTES = 2**20
_LINE = re.compile(r"^[ \t]*(ENV|ARG|export)[ \t]+((?:\\\n|.)*)", re.MULTILINE)
_WORD = re.compile(r"""(?<!\S)\#.*|(?<!\S)([A-Za-z_]\w*)=("[^"\n]*"|'[^'\n]*'|[^\s;&|]*)""")
_OLD_ENV = re.compile(r"([A-Za-z_]\w*)[ \t]+([^=\n]+)")
"""Form of ENV in which everything after the name is the value."""


def lint_file(path: Path) -> list[Finding]:
    """Return the findings about the variables that a Dockerfile or a shell file sets, in the order of its lines.
    Raises FileProblem if it cannot be read, or is not text.
    """
    text = read_text(path, max_bytes=_LARGEST_BYTES, hint="name a Dockerfile or a shell file")
    # The last assignment counts, as for programs that are started at the end.
    found = {name: (value, line) for name, value, line in _assignments(text) if is_relevant(name)}
    findings = [
        finding.model_copy(update={"line": found[str(finding.variable)][1]})
        for finding in lint_variables({name: value for name, (value, _) in found.items()}, None)
    ]
    findings = findings or [ok(f"nothing wrong with {len(found)} variables that matter here")]
    findings.sort(key=lambda finding: finding.line or 0)
    return [finding.model_copy(update={"check": "file", "file": str(path)}) for finding in findings]


def _assignments(text: str) -> Iterator[tuple[str, str | None, int]]:
    """Yield the names, values and lines of assignments. A value that depends on other variables or commands is None."""
    for line in _LINE.finditer(text):
        keyword, rest = line.groups()
        old = _OLD_ENV.fullmatch(rest) if keyword == "ENV" else None
        for word in [old] if old else _WORD.finditer(rest):
            name, value = word.groups()
            if name is not None:
                known = None if "$" in value or "`" in value else value.strip().strip("\"'")
                yield name, known, text.count("\n", 0, line.start(2) + word.start()) + 1
