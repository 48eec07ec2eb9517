"""Findings of the checks, and the report that `osora env-check` prints."""

from collections.abc import Sequence
from enum import StrEnum
from math import ceil
from typing import ClassVar, Self

from pydantic import Field

from opensora_cli.core.documents import Document
from opensora_cli.core.exceptions import HardwareError
from opensora_cli.core.formatting import aligned_rows
from opensora_cli.core.redaction import Redactor

_GIB = 2**30


class Severity(StrEnum):
    """Effect of a finding on a run, worst last."""

    OK = "ok"
    NOTE = "note"
    """Information; nothing to fix."""
    UNKNOWN = "unknown"
    """The check failed."""
    WARNING = "warning"
    """Runs work, but slower or with less memory than the machine has."""
    PROBLEM = "problem"
    """Prevents a run."""


class Finding(Document):
    """Result of one check."""

    check: str = ""
    """Name of the check, filled in by `env_check`."""
    severity: Severity
    message: str
    why: str | None = None
    """Consequence."""
    fix: str | None = None
    """Command or change that fixes it."""
    variable: str | None = None
    """Environment variable concerned."""
    file: str | None = None
    """File that sets the variable. None means this machine."""
    line: int | None = None

    def lines(self) -> list[str]:
        place = f"{self.file}:{self.line}: " if self.file and self.line else f"{self.file}: " if self.file else ""
        head = f"{self.check:<12}{self.severity:<9}{place}{self.message}"
        return [head, *(f"{'':21}{text}" for text in (self.why, self.fix and f"-> {self.fix}") if text)]


def ok(message: str) -> Finding:
    """Return a finding that needs no action."""
    return Finding(severity=Severity.OK, message=message)


def note(message: str, *, why: str | None = None, fix: str | None = None) -> Finding:
    """Return a finding that informs."""
    return Finding(severity=Severity.NOTE, message=message, why=why, fix=fix)


def warning(message: str, *, why: str, fix: str, variable: str | None = None) -> Finding:
    """Return a finding that costs time or memory."""
    return Finding(severity=Severity.WARNING, message=message, why=why, fix=fix, variable=variable)


def problem(message: str, *, why: str, fix: str, variable: str | None = None) -> Finding:
    """Return a finding that prevents a run."""
    return Finding(severity=Severity.PROBLEM, message=message, why=why, fix=fix, variable=variable)


class PresetNeeds(Document):
    """Memory that a preset of `osora generate` needs on this machine."""

    name: str
    video: str
    needed_bytes: int
    """Peak of the stage that needs most."""
    free_bytes: int
    offload: str
    """Offload mode with which this peak is reached."""
    has_weights: bool
    fits: bool
    """Whether `needed_bytes` are free."""


class EnvReport(Document):
    """Findings of all checks, in the schema `osora.env-check/2`."""

    SCHEMA: ClassVar[str | None] = "osora.env-check/2"

    osora: str
    platform: str
    fine: bool
    """Whether no finding prevents a run."""
    findings: tuple[Finding, ...]
    presets: tuple[PresetNeeds, ...]
    environment: dict[str, str]
    """Relevant environment variables, without secrets."""
    is_bug_report: bool = Field(default=False, exclude=True)

    def bug_report(self, redactor: Redactor) -> Self:
        """Return the report without names and paths, to be printed in short."""
        fields = {name: redactor.document(value) for name, value in self.model_dump(mode="json").items()}
        return type(self).model_validate({**fields, "is_bug_report": True})

    def raise_for_problems(self) -> None:
        """Raise HardwareError if a finding prevents a run."""
        if count := self._count(Severity.PROBLEM):
            noun = "problem stops" if count == 1 else "problems stop"
            raise HardwareError(f"{count} {noun} a run", hint="each is marked problem, with its fix")

    def lines(self) -> list[str]:
        """Return the lines for people. A bug report has one line for each finding."""
        table = ["", *_table_lines(self.presets)] if self.presets else []
        if not self.is_bug_report:
            found = [line for finding in self.findings for line in finding.lines()]
            return [*found, *table, "", self._summary()]
        heads = [finding.lines()[0] for finding in self.findings]
        variables = [f"{name}={value}" for name, value in self.environment.items()]
        return [f"osora {self.osora}, {self.platform}", *heads, *table, *variables]

    def _count(self, severity: Severity) -> int:
        return sum(finding.severity is severity for finding in self.findings)

    def _summary(self) -> str:
        problems, warnings, failed = map(self._count, (Severity.PROBLEM, Severity.WARNING, Severity.UNKNOWN))
        counted = [
            f"{count} {noun}{'' if count == 1 else 's'}"
            for count, noun in ((problems, "problem"), (warnings, "warning"))
            if count
        ]
        return ", ".join([*counted, *([f"{failed} not checked"] if failed else [])]) or "all fine"


def _table_lines(presets: Sequence[PresetNeeds]) -> list[str]:
    rows = [("preset", "video, frames", "needs", "free", "fits", "offload", "weights")]
    for preset in presets:
        # Rounded up, so that no preset seems to fit that does not.
        needed = ceil(preset.needed_bytes / _GIB * 100) / 100
        rows.append(
            (
                preset.name,
                preset.video.removesuffix(" frames"),
                f"{needed:.2f} GiB",
                f"{preset.free_bytes / _GIB:.1f} GiB",
                "yes" if preset.fits else "no",
                preset.offload,
                "here" if preset.has_weights else "missing",
            )
        )
    return aligned_rows(rows)
