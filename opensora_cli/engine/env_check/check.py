"""All checks together: `env_check(settings)`."""

import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import opensora_cli
from opensora_cli.core import gpus
from opensora_cli.core.exceptions import HardwareError
from opensora_cli.core.gpus import DriverFacts, GpuFacts, LinkFacts, LinkKind, TorchFacts
from opensora_cli.core.progress import Reporter, SilentReporter
from opensora_cli.core.redaction import Redactor, is_relevant, shown_variables
from opensora_cli.engine.env_check import facts
from opensora_cli.engine.env_check.all_reduce import check_all_reduce, run_all_reduce
from opensora_cli.engine.env_check.environment import Surroundings, lint_variables
from opensora_cli.engine.env_check.facts import HostFacts, WeightFacts
from opensora_cli.engine.env_check.files import lint_file
from opensora_cli.engine.env_check.findings import Check, Finding, Severity, isolated
from opensora_cli.engine.env_check.host import check_attention, check_disk, check_encoder, check_limits, check_memory
from opensora_cli.engine.env_check.machine import (
    check_gpus,
    check_libraries,
    check_links,
    check_precision,
    check_python,
    check_torch,
)
from opensora_cli.engine.env_check.presets import PresetNeeds, check_presets, read_presets, table_lines
from opensora_cli.settings.env_check import EnvCheckSettings

SCHEMA = "osora.env-check/1"

FactT = TypeVar("FactT")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvReport:
    """What all checks found."""

    findings: tuple[Finding, ...]
    presets: tuple[PresetNeeds, ...]
    environment: Mapping[str, str]
    """The relevant variables, secrets hidden."""
    redactor: Redactor | None = None
    """Hides names and paths in what is printed; None: nothing is to be hidden."""

    @property
    def num_problems(self) -> int:
        """How many findings stop a run."""
        return sum(finding.severity is Severity.PROBLEM for finding in self.findings)

    def require_fine(self) -> None:
        """Raise HardwareError if something stops a run."""
        if self.num_problems:
            noun = "problem stops" if self.num_problems == 1 else "problems stop"
            raise HardwareError(f"{self.num_problems} {noun} a run", hint="each is marked problem, with its mend")

    def to_json(self) -> dict[str, Any]:
        """Return it as a document of the schema `osora.env-check/1`."""
        document = {
            "schema": SCHEMA,
            "osora": opensora_cli.__version__,
            "platform": platform.platform(),
            "fine": self.num_problems == 0,
            "findings": [finding.to_json() for finding in self.findings],
            "presets": [preset.to_json() for preset in self.presets],
            "environment": dict(self.environment),
        }
        if self.redactor is None:
            return document
        return {key: self.redactor.document(value) for key, value in document.items()}

    def lines(self) -> list[str]:
        """Return it for people; as a bug report, without what is fine and needs no words."""
        if self.redactor is None:
            lines = [line for finding in self.findings for line in finding.lines()]
            return [*lines, *self._table(), "", self._summary()]
        system = f"osora {opensora_cli.__version__}, {platform.platform()}"
        heads = [finding.lines()[0] for finding in self.findings]
        variables = [f"{name}={value}" for name, value in self.environment.items()]
        return [self.redactor.text(line) for line in [system, *heads, *self._table(), *variables]]

    def _table(self) -> list[str]:
        table = table_lines(self.presets)
        return ["", *table] if table else []

    def _summary(self) -> str:
        counts = {severity: sum(finding.severity is severity for finding in self.findings) for severity in Severity}
        told = [
            f"{counts[severity]} {name}{'' if counts[severity] == 1 else 's'}"
            for severity, name in ((Severity.PROBLEM, "problem"), (Severity.WARNING, "warning"))
            if counts[severity]
        ]
        unchecked = [f"{counts[Severity.UNKNOWN]} not checked"] if counts[Severity.UNKNOWN] else []
        return ", ".join([*told, *unchecked]) or "all fine"


class Machine:
    """This machine, each kind of fact read once, when it is first asked for."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = environment

    @cached_property
    def torch(self) -> TorchFacts:
        """How torch was built."""
        return gpus.read_torch()

    @cached_property
    def driver(self) -> DriverFacts:
        """What the driver says."""
        return gpus.read_driver()

    @cached_property
    def gpus(self) -> tuple[GpuFacts, ...]:
        """The devices that torch can use."""
        return gpus.read_gpus()

    @cached_property
    def links(self) -> tuple[LinkFacts, ...]:
        """The ways between them."""
        return gpus.read_links(self.gpus)

    @cached_property
    def host(self) -> HostFacts:
        """The computer around them."""
        return facts.read_host()

    @cached_property
    def weights(self) -> WeightFacts:
        """The released model's weights."""
        return facts.read_weights(self.environment)

    @cached_property
    def presets(self) -> tuple[PresetNeeds, ...]:
        """What presets need here."""
        return read_presets(self.environment)

    def surroundings(self) -> Surroundings:
        """Return what the rules for variables must know; what cannot be read is taken for absent."""
        host = _or_else(lambda: self.host, HostFacts(cores=1, total_bytes=0, available_bytes=0))
        links = _or_else(lambda: self.links, tuple[LinkFacts, ...]())
        uses_cuda = _or_else(lambda: self.torch.cuda is not None, False)
        return Surroundings(
            uses_cuda=uses_cuda,
            num_cards=len(_or_else(lambda: self.gpus, tuple[GpuFacts, ...]())),
            cores=host.cores,
            has_nvlink=any(link.kind is LinkKind.NVLINK for link in links),
            interfaces=host.interfaces,
            infiniband=host.infiniband,
            shadowing=facts.read_shadowing(self.environment) if uses_cuda else (),
        )


def _or_else(read: Callable[[], FactT], default: FactT) -> FactT:
    """Return a fact, or `default` where it cannot be read: its own check says why."""
    try:
        return read()
    except Exception:
        return default


def env_check(
    settings: EnvCheckSettings,
    *,
    environment: Mapping[str, str] | None = None,
    reporter: Reporter | None = None,
) -> EnvReport:
    """Check this machine, its environment variables, and the files that are named.

    Args:
        settings: what to check.
        environment: the variables; None: those of this process.
        reporter: is told what takes long.

    Raises:
        FileProblem: a file cannot be read.
    """
    environment = os.environ if environment is None else environment
    # Before anything else: a misspelt name should not take seconds to be told.
    of_files = [finding for name in settings.files for finding in lint_file(Path(name))]
    machine = Machine(environment)
    reporter = reporter or SilentReporter()
    findings = [*_check_machine(machine, reporter), *_check_together(machine, settings, reporter), *of_files]
    return EnvReport(
        findings=tuple(findings),
        presets=_or_else(lambda: machine.presets, ()),
        environment=shown_variables(environment),
        redactor=Redactor.of_this_machine(folders=_folders(settings, environment)) if settings.bug_report else None,
    )


def _folders(settings: EnvCheckSettings, environment: Mapping[str, str]) -> list[str]:
    """Return folders that findings may name."""
    named = [environment.get("OSORA_WEIGHTS", ""), environment.get("OSORA_RUNTIME__WEIGHTS", "")]
    return [*named, *(str(Path(name).parent) for name in settings.files)]


def _check_machine(machine: Machine, reporter: Reporter) -> Iterable[Finding]:
    checks = {
        "python": lambda: check_python(facts.read_python()),
        "torch": lambda: check_torch(machine.torch, machine.driver),
        "cards": lambda: check_gpus(machine.torch, machine.gpus),
        "links": lambda: check_links(machine.links),
        "libraries": lambda: check_libraries(machine.torch, machine.gpus),
        "precision": lambda: check_precision(machine.torch, machine.gpus),
        "attention": lambda: check_attention(facts.read_backends(), machine.gpus),
        "video": lambda: check_encoder(facts.read_encoder()),
        "memory": lambda: check_memory(machine.host, machine.weights, has_gpus=bool(machine.gpus)),
        "disk": lambda: check_disk(machine.weights),
        "limits": lambda: check_limits(machine.host),
        "environment": lambda: _check_environment(machine),
        "presets": lambda: _check_presets(machine, reporter),
    }
    for name, check in checks.items():
        yield from isolated(name, check)


def _check_presets(machine: Machine, reporter: Reporter) -> Iterable[Finding]:
    with reporter.stage("presets"):
        presets = machine.presets
    return check_presets(presets)


def _check_environment(machine: Machine) -> Sequence[Finding]:
    findings = lint_variables(machine.environment, machine.surroundings())
    count = sum(map(is_relevant, machine.environment))
    return findings or [Check("environment").ok(f"nothing wrong with {count} variables that matter here")]


def _check_together(machine: Machine, settings: EnvCheckSettings, reporter: Reporter) -> list[Finding]:
    if not settings.all_reduce:
        return []

    def check() -> Iterable[Finding]:
        with reporter.stage("all-reduce"):
            return check_all_reduce(
                run_all_reduce(
                    num_cards=len(_or_else(lambda: machine.gpus, tuple[GpuFacts, ...]())),
                    seconds=settings.all_reduce_seconds,
                    environment=machine.environment,
                )
            )

    return isolated("all-reduce", check)
