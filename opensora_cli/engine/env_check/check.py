"""Checks of `osora env-check`, in the order in which they are printed."""

import os
import platform
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import TypeVar

import torch

import opensora_cli
from opensora_cli.core import device_facts
from opensora_cli.core.device_facts import GpuFacts, LinkFacts, LinkKind
from opensora_cli.core.exceptions import OsoraError
from opensora_cli.core.progress import Reporter, SilentReporter
from opensora_cli.core.redaction import Redactor, is_relevant, shown_variables
from opensora_cli.engine.env_check import host, machine
from opensora_cli.engine.env_check.all_reduce import check_all_reduce
from opensora_cli.engine.env_check.host import HostFacts
from opensora_cli.engine.env_check.report import EnvReport, Finding, PresetNeeds, Severity, ok
from opensora_cli.engine.env_check.variables import Surroundings, lint_file, lint_variables, refused_by_torch
from opensora_cli.settings.tools import EnvCheckSettings

FactT = TypeVar("FactT")


def env_check(
    settings: EnvCheckSettings,
    *,
    environment: Mapping[str, str] | None = None,
    reporter: Reporter | None = None,
) -> EnvReport:
    """Check this machine, its environment variables and the given files.

    Raises FileProblem if a file cannot be read.
    """
    environment = os.environ if environment is None else environment
    # First, so that a misspelled name is refused at once.
    in_files = [finding for name in settings.files for finding in lint_file(Path(name))]
    checks = _Checks(environment, settings, reporter or SilentReporter())
    findings = [finding for name, check in checks.by_name().items() for finding in _findings(name, check)]
    report = EnvReport(
        osora=opensora_cli.__version__,
        platform=platform.platform(),
        fine=all(finding.severity is not Severity.PROBLEM for finding in (*findings, *in_files)),
        findings=(*findings, *in_files),
        presets=checks.presets,
        environment=shown_variables(environment),
    )
    if not settings.bug_report:
        return report
    folders = [environment.get(name, "") for name in ("OSORA_WEIGHTS", "OSORA_RUNTIME__WEIGHTS")]
    folders += [str(Path(name).parent) for name in settings.files]
    return report.bug_report(Redactor.of_this_machine(folders=folders))


def _findings(name: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """Return the findings of `check` under its name. An exception becomes a finding with its text."""
    try:
        found = list(check())
    except Exception as error:
        # Drivers and libraries raise anything, and one failure must not hide the findings of the other checks.
        text = (error.message if isinstance(error, OsoraError) else str(error)) or type(error).__name__
        reason = " ".join(text.split())[:300]
        found = [Finding(severity=Severity.UNKNOWN, message=f"could not be checked: {reason}")]
    return [finding.model_copy(update={"check": name}) for finding in found]


class _Checks:
    """Checks of this machine. Each kind of fact is read once, when a check first needs it."""

    def __init__(self, environment: Mapping[str, str], settings: EnvCheckSettings, reporter: Reporter) -> None:
        self._environment, self._settings, self._reporter = environment, settings, reporter
        self._torch, self._driver = cache(device_facts.read_torch), cache(device_facts.read_driver)
        self._gpus, self._host = cache(device_facts.read_gpus), cache(host.read_host)
        self._links = cache(lambda: device_facts.read_links(self._gpus()))
        self._weights = cache(lambda: host.read_weights(environment))
        self.presets: tuple[PresetNeeds, ...] = ()
        """Needs of the presets, after their check."""

    def by_name(self) -> dict[str, Callable[[], Iterable[Finding]]]:
        """Return the checks by the name under which their findings are printed."""
        checks: dict[str, Callable[[], Iterable[Finding]]] = {
            "python": lambda: machine.check_python(sys.version_info[:3], machine.unmet_requirements()),
            "torch": lambda: machine.check_torch(self._torch(), self._driver()),
            "cards": lambda: machine.check_gpus(self._torch(), self._gpus()),
            "links": lambda: machine.check_links(self._links()),
            "libraries": lambda: machine.check_libraries(self._torch(), self._gpus()),
            "attention": host.check_attention,
            "video": host.check_encoder,
            "memory": lambda: host.check_memory(self._host(), self._weights(), has_gpus=bool(self._gpus())),
            "disk": lambda: host.check_disk(self._weights()),
            "limits": lambda: host.check_limits(self._host()),
            "environment": self._check_variables,
            "presets": self._check_presets,
        }
        return {**checks, "all-reduce": self._check_all_reduce} if self._settings.all_reduce else checks

    def _check_variables(self) -> Iterable[Finding]:
        here = _or_else(self._host, HostFacts())
        uses_cuda = _or_else(lambda: self._torch().cuda is not None, False)
        own = Path(torch.__file__).parents[1]
        surroundings = Surroundings(
            uses_cuda=uses_cuda,
            num_gpus=self._num_gpus(),
            cores=here.cores,
            has_nvlink=any(link.kind is LinkKind.NVLINK for link in _or_else(self._links, tuple[LinkFacts, ...]())),
            interfaces=here.interfaces,
            infiniband=here.infiniband,
            shadowing=machine.shadowing_libraries(self._environment, own=own) if uses_cuda else (),
        )
        count = sum(map(is_relevant, self._environment))
        findings = lint_variables(self._environment, surroundings)
        return findings or [ok(f"nothing wrong with {count} variables that matter here")]

    def _check_presets(self) -> Iterable[Finding]:
        with self._reporter.stage("presets"):
            self.presets, unplanned = host.read_presets(self._environment, num_gpus=self._num_gpus())
        return host.check_presets(self.presets, unplanned=unplanned)

    def _check_all_reduce(self) -> Iterable[Finding]:
        refused = refused_by_torch(self._environment)
        usable = {name: value for name, value in self._environment.items() if name not in refused}
        seconds = self._settings.all_reduce_seconds
        with self._reporter.stage("all-reduce"):
            return list(check_all_reduce(num_gpus=self._num_gpus(), seconds=seconds, environment=usable))

    def _num_gpus(self) -> int:
        return len(_or_else(self._gpus, tuple[GpuFacts, ...]()))


def _or_else(read: Callable[[], FactT], default: FactT) -> FactT:
    """Return a fact, or `default` where it cannot be read: its own check reports the reason."""
    try:
        return read()
    except Exception:
        return default
