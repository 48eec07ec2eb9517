"""What a check says."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum

from opensora_cli.core.exceptions import OsoraError


class Severity(StrEnum):
    """How much a finding matters, worst last."""

    OK = "ok"
    NOTE = "note"
    """Worth knowing; nothing to mend."""
    UNKNOWN = "unknown"
    """It could not be checked."""
    WARNING = "warning"
    """Runs work, but slower or with less than the machine could give."""
    PROBLEM = "problem"
    """It stops a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was found out."""

    check: str
    """The subject, in a word: `cards`, `environment`."""
    severity: Severity
    message: str
    why: str | None = None
    """What comes of it."""
    mend: str | None = None
    """What to do."""
    variable: str | None = None
    """The environment variable that it is about."""
    file: str | None = None
    """The file that it is in; None: this machine."""
    line: int | None = None

    def to_json(self) -> dict[str, object]:
        """Return it as a JSON object."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return it for people."""
        place = f"{self.file}:{self.line}: " if self.file and self.line else f"{self.file}: " if self.file else ""
        head = f"{self.check:<12}{self.severity:<9}{place}{self.message}"
        return [head, *(f"{'':21}{text}" for text in (self.why, self.mend and f"-> {self.mend}") if text)]


@dataclass(frozen=True, slots=True)
class Check:
    """Makes the findings of one check; all have its name."""

    name: str

    def ok(self, message: str) -> Finding:
        """All is well."""
        return Finding(check=self.name, severity=Severity.OK, message=message)

    def note(
        self, message: str, *, why: str | None = None, mend: str | None = None, variable: str | None = None
    ) -> Finding:
        """Something to know."""
        return Finding(check=self.name, severity=Severity.NOTE, message=message, why=why, mend=mend, variable=variable)

    def warning(self, message: str, *, why: str, mend: str, variable: str | None = None) -> Finding:
        """Something that costs time or memory."""
        return Finding(
            check=self.name, severity=Severity.WARNING, message=message, why=why, mend=mend, variable=variable
        )

    def problem(self, message: str, *, why: str, mend: str, variable: str | None = None) -> Finding:
        """Something that stops a run."""
        return Finding(
            check=self.name, severity=Severity.PROBLEM, message=message, why=why, mend=mend, variable=variable
        )

    def unknown(self, reason: str) -> Finding:
        """Something that could not be checked."""
        return Finding(check=self.name, severity=Severity.UNKNOWN, message=f"could not be checked: {reason}")


def isolated(name: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """Return the findings of `check`; if it raises, the one that it could not be done."""
    try:
        return list(check())
    except Exception as error:
        # Drivers and libraries raise whatever they like, and one of them must not hide what the others say.
        return [Check(name).unknown(reason_of(error))]


def reason_of(error: Exception) -> str:
    """Return what an exception says, in one line that is not too long."""
    text = error.message if isinstance(error, OsoraError) else str(error)
    return " ".join(f"{text or type(error).__name__}".split())[:300]
