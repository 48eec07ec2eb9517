"""Documents that `osora env-check` prints: findings of the checks with a report, and recommended settings with reasons.

What torch, NCCL and torchrun do by themselves is not recommended.
"""

import shlex
from collections.abc import Mapping
from enum import StrEnum
from typing import ClassVar, Self

from pydantic import Field

from opensora_cli.core.documents import Document
from opensora_cli.core.exceptions import HardwareError
from opensora_cli.core.redaction import Redactor
from opensora_cli.settings.tools import EnvProfile


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
    return Finding(severity=Severity.OK, message=message)


def note(message: str, *, why: str | None = None, fix: str | None = None) -> Finding:
    return Finding(severity=Severity.NOTE, message=message, why=why, fix=fix)


def warning(message: str, *, why: str, fix: str, variable: str | None = None) -> Finding:
    """Return a finding that costs time or memory."""
    return Finding(severity=Severity.WARNING, message=message, why=why, fix=fix, variable=variable)


def problem(message: str, *, why: str, fix: str, variable: str | None = None) -> Finding:
    """Return a finding that prevents a run."""
    return Finding(severity=Severity.PROBLEM, message=message, why=why, fix=fix, variable=variable)


class EnvReport(Document):
    """Findings of all checks, in the schema `osora.env-check/3`."""

    SCHEMA: ClassVar[str | None] = "osora.env-check/3"

    osora: str
    platform: str
    fine: bool
    """Whether no finding prevents a run."""
    findings: tuple[Finding, ...]
    environment: dict[str, str]
    """Relevant environment variables, without secrets."""
    is_bug_report: bool = Field(default=False, exclude=True)

    def bug_report(self, redactor: Redactor) -> Self:
        """Return the report without names and paths, to be printed in short."""
        fields = {name: redactor.document(value) for name, value in self.model_dump(mode="json").items()}
        return type(self).model_validate({**fields, "is_bug_report": True})

    def raise_for_problems(self) -> None:
        if count := self._count(Severity.PROBLEM):
            noun = "problem stops" if count == 1 else "problems stop"
            raise HardwareError(f"{count} {noun} a run", hint="each is marked problem, with its fix")

    def lines(self) -> list[str]:
        """Return the lines for people. A bug report has one line for each finding."""
        if not self.is_bug_report:
            found = [line for finding in self.findings for line in finding.lines()]
            return [*found, "", self._summary()]
        heads = [finding.lines()[0] for finding in self.findings]
        variables = [f"{name}={value}" for name, value in self.environment.items()]
        return [f"osora {self.osora}, {self.platform}", *heads, *variables]

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


class Recommendation(Document):
    """Recommended value of an environment variable, with its reason."""

    name: str
    value: str
    why: str


class Profile(Document):
    """Recommended variables for a kind of machine, in the schema `osora.env-profile/2`."""

    SCHEMA: ClassVar[str | None] = "osora.env-profile/2"

    profile: EnvProfile
    title: str
    variables: tuple[Recommendation, ...]
    notes: tuple[str, ...]
    """Advice that is no variable."""

    def lines(self) -> list[str]:
        """Return the lines for people."""
        lines = [self.title]
        for item in self.variables:
            lines += [f"  {item.name}={item.value}", f"      {item.why}"]
        return [*lines, *(f"  {note}" for note in self.notes)]

    def export_lines(self) -> list[str]:
        """Return shell lines for `eval`.

        Each ends in a semicolon and has no comment, so that `eval $(...)` works without quotes too.
        """
        return [f"export {item.name}={shlex.quote(item.value)};" for item in self.variables]


_EXPANDABLE = Recommendation(
    name="PYTORCH_ALLOC_CONF",
    value="expandable_segments:True",
    why="the next stage can use the memory that one frees, in pieces of any size",
)
# Without it, NCCL fails with no more than "unhandled system error".
_NCCL_WARNINGS = Recommendation(
    name="NCCL_DEBUG", value="WARN", why="NCCL reports what failed, and on which GPU; it is silent otherwise"
)
# CUDA counts the fastest GPU first, nvidia-smi by the bus: with two different GPUs, cuda:0 is another one in each.
_BUS_ORDER = Recommendation(
    name="CUDA_DEVICE_ORDER", value="PCI_BUS_ID", why="cuda:0 is then the GPU that nvidia-smi calls 0"
)
# Not for desktops, where a download should leave room for other things.
_FAST_DOWNLOAD = Recommendation(
    name="HF_XET_HIGH_PERFORMANCE",
    value="1",
    why="a rented machine downloads 34 GB of weights first, and may use all cores for it",
)

PROFILES: Mapping[EnvProfile, Profile] = {
    EnvProfile.LOCAL: Profile(
        profile=EnvProfile.LOCAL,
        title="local: a desktop with a GPU of 24 GB",
        variables=(_EXPANDABLE, _BUS_ORDER),
        notes=("close other programs that use the GPU: browsers and games hold up to 2 GB",),
    ),
    EnvProfile.CLOUD: Profile(
        profile=EnvProfile.CLOUD,
        title="cloud: a rented machine with GPUs of 80 GB",
        variables=(_EXPANDABLE, _NCCL_WARNINGS, _FAST_DOWNLOAD),
        notes=("start containers with --shm-size=8g: NCCL and data loading workers exchange through /dev/shm",),
    ),
    EnvProfile.CLUSTER: Profile(
        profile=EnvProfile.CLUSTER,
        title="cluster: several nodes",
        variables=(_EXPANDABLE, _NCCL_WARNINGS),
        notes=(
            "ulimit -l unlimited on every node: InfiniBand registers its buffers as locked memory",
            "NCCL_SOCKET_IFNAME only where nodes have several networks: the name of the one that joins them",
        ),
    ),
}
