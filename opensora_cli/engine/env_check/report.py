"""What the checks found: findings, and the report that `osora env-check` prints."""

import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import ceil
from typing import ClassVar, Self

from pydantic import Field

import opensora_cli
from opensora_cli.core.documents import Document
from opensora_cli.core.exceptions import HardwareError, OsoraError
from opensora_cli.core.redaction import Redactor
from opensora_cli.engine.components.hardware import GIB


class Severity(StrEnum):
    """How much a finding matters, worst last."""

    OK = "ok"
    NOTE = "note"
    """Worth knowing; nothing to fix."""
    UNKNOWN = "unknown"
    """It could not be checked."""
    WARNING = "warning"
    """Runs work, but slower or with less than the machine could give."""
    PROBLEM = "problem"
    """It stops a run."""


class Finding(Document):
    """One thing that was found."""

    check: str
    """The subject, in a word: `environment`."""
    severity: Severity
    message: str
    why: str | None = None
    """What follows from it."""
    fix: str | None = Field(default=None, serialization_alias="mend", description="What to do.")
    """What to do; in JSON `mend`, as long as the schema has this version."""
    variable: str | None = None
    """The environment variable concerned."""
    file: str | None = None
    """The file that it is in; None: this machine."""
    line: int | None = None

    def lines(self) -> list[str]:
        place = f"{self.file}:{self.line}: " if self.file and self.line else f"{self.file}: " if self.file else ""
        head = f"{self.check:<12}{self.severity:<9}{place}{self.message}"
        return [head, *(f"{'':21}{text}" for text in (self.why, self.fix and f"-> {self.fix}") if text)]


@dataclass(frozen=True, slots=True)
class Check:
    """Makes the findings of one check; all have its name."""

    name: str

    def ok(self, message: str) -> Finding:
        """All is well."""
        return Finding(check=self.name, severity=Severity.OK, message=message)

    def note(self, message: str, *, why: str | None = None, fix: str | None = None) -> Finding:
        """Something to know."""
        return Finding(check=self.name, severity=Severity.NOTE, message=message, why=why, fix=fix)

    def warning(
        self, message: str, *, why: str, fix: str, variable: str | None = None, line: int | None = None
    ) -> Finding:
        """Something that costs time or memory."""
        severity = Severity.WARNING
        return Finding(
            check=self.name, severity=severity, message=message, why=why, fix=fix, variable=variable, line=line
        )

    def problem(self, message: str, *, why: str, fix: str, variable: str | None = None) -> Finding:
        """Something that stops a run."""
        return Finding(check=self.name, severity=Severity.PROBLEM, message=message, why=why, fix=fix, variable=variable)

    def unknown(self, reason: str, *, line: int | None = None) -> Finding:
        """Something that could not be checked."""
        message = f"could not be checked: {reason}"
        return Finding(check=self.name, severity=Severity.UNKNOWN, message=message, line=line)


def isolated(name: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """Return the findings of `check`; if it raises, one that says why it could not be done."""
    try:
        return list(check())
    except Exception as error:
        # Drivers and libraries raise anything, and one of them must not hide what the other checks find.
        text = error.message if isinstance(error, OsoraError) else str(error)
        return [Check(name).unknown(" ".join(f"{text or type(error).__name__}".split())[:300])]


class PresetNeeds(Document):
    """What a preset of `osora generate` takes on this machine."""

    name: str
    video: str
    device: str
    dtype: str
    stage: str
    """The stage that takes most."""
    needed_bytes: int
    free_bytes: int
    offload: str
    """What waits outside the device, so that it needs no more."""
    has_weights: bool
    fits: bool
    """Whether as much memory is free."""


class EnvReport(Document):
    """What all checks found: a document of the schema `osora.env-check/1`."""

    SCHEMA: ClassVar[str | None] = "osora.env-check/1"

    osora: str
    platform: str
    fine: bool
    """Whether nothing stops a run."""
    findings: tuple[Finding, ...]
    presets: tuple[PresetNeeds, ...]
    environment: dict[str, str]
    """The relevant variables, without secrets."""
    is_bug_report: bool = Field(default=False, exclude=True)

    @classmethod
    def of(
        cls, findings: Sequence[Finding], *, presets: tuple[PresetNeeds, ...], environment: Mapping[str, str]
    ) -> Self:
        """Return the report of `findings` on this machine."""
        return cls(
            osora=opensora_cli.__version__,
            platform=platform.platform(),
            fine=all(finding.severity is not Severity.PROBLEM for finding in findings),
            findings=tuple(findings),
            presets=presets,
            environment=dict(environment),
        )

    def bug_report(self, redactor: Redactor) -> Self:
        """Return the same without names and paths, to be printed in short."""
        fields = {name: redactor.document(value) for name, value in self.model_dump(mode="json").items()}
        return type(self).model_validate({**fields, "is_bug_report": True})

    def raise_for_problems(self) -> None:
        """Raise HardwareError if something stops a run."""
        count = self._count(Severity.PROBLEM)
        if count:
            noun = "problem stops" if count == 1 else "problems stop"
            raise HardwareError(f"{count} {noun} a run", hint="each is marked problem, with its fix")

    def lines(self) -> list[str]:
        """Return it for people; a bug report has one line for each finding."""
        table = _table_lines(self.presets)
        table = ["", *table] if table else []
        if not self.is_bug_report:
            found = [line for finding in self.findings for line in finding.lines()]
            return [*found, *table, "", self._summary()]
        heads = [finding.lines()[0] for finding in self.findings]
        variables = [f"{name}={value}" for name, value in self.environment.items()]
        return [f"osora {self.osora}, {self.platform}", *heads, *table, *variables]

    def _count(self, severity: Severity) -> int:
        return sum(finding.severity is severity for finding in self.findings)

    def _summary(self) -> str:
        problems, warnings, unknown = map(self._count, (Severity.PROBLEM, Severity.WARNING, Severity.UNKNOWN))
        counted = [
            f"{count} {noun}{'' if count == 1 else 's'}"
            for count, noun in ((problems, "problem"), (warnings, "warning"))
            if count
        ]
        return ", ".join([*counted, *([f"{unknown} not checked"] if unknown else [])]) or "all fine"


def _table_lines(presets: Sequence[PresetNeeds]) -> list[str]:
    """Return the table for people."""
    if not presets:
        return []
    rows = [("preset", "video", "device", "needs", "free", "fits", "offload", "weights")]
    for preset in presets:
        rows.append(
            (
                preset.name,
                preset.video,
                f"{preset.device} {preset.dtype}",
                f"{_up(preset.needed_bytes)} GiB ({preset.stage})",
                f"{preset.free_bytes / GIB:.1f} GiB",
                "yes" if preset.fits else "no",
                preset.offload,
                "here" if preset.has_weights else "missing",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _up(count: int) -> str:
    """Return GiB, rounded so that no need looks smaller than it is."""
    return f"{ceil(count / GIB * 100) / 100:.2f}"
