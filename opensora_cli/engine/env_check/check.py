"""All checks of `osora env-check`, in the order in which they are printed."""

import os
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from opensora_cli.core import gpus
from opensora_cli.core.gpus import DriverFacts, GpuFacts, LinkFacts, LinkKind, TorchFacts
from opensora_cli.core.progress import Reporter, SilentReporter
from opensora_cli.core.redaction import Redactor, is_relevant, shown_variables
from opensora_cli.engine.env_check import facts
from opensora_cli.engine.env_check.all_reduce import check_all_reduce, run_all_reduce
from opensora_cli.engine.env_check.facts import HostFacts, MakePlan, WeightFacts
from opensora_cli.engine.env_check.host import (
    check_attention,
    check_disk,
    check_encoder,
    check_limits,
    check_memory,
    check_presets,
)
from opensora_cli.engine.env_check.machine import (
    check_gpus,
    check_libraries,
    check_links,
    check_precision,
    check_python,
    check_torch,
)
from opensora_cli.engine.env_check.report import Check, EnvReport, Finding, PresetNeeds, isolated
from opensora_cli.engine.env_check.shell_files import lint_file
from opensora_cli.engine.env_check.torch_variables import refused_by_torch
from opensora_cli.engine.env_check.variables import Surroundings, lint_variables
from opensora_cli.settings.tools import EnvCheckSettings

FactT = TypeVar("FactT")


class _Machine:
    """This machine, each kind of fact read once, when it is first asked for."""

    def __init__(self, environment: Mapping[str, str], make_plan: MakePlan) -> None:
        self.environment = environment
        self._make_plan = make_plan
        self.presets: tuple[PresetNeeds, ...] = ()
        """Those that are planned, once they are."""

    @cached_property
    def torch(self) -> TorchFacts:
        return gpus.read_torch()

    @cached_property
    def driver(self) -> DriverFacts:
        return gpus.read_driver()

    @cached_property
    def gpus(self) -> tuple[GpuFacts, ...]:
        return gpus.read_gpus()

    @cached_property
    def links(self) -> tuple[LinkFacts, ...]:
        return gpus.read_links(self.gpus)

    @cached_property
    def host(self) -> HostFacts:
        return facts.read_host()

    @cached_property
    def weights(self) -> WeightFacts:
        return facts.read_weights(self.environment)

    @property
    def num_gpus(self) -> int:
        """How many devices torch can use; 0 if they cannot be read."""
        return len(_or_else(lambda: self.gpus, tuple[GpuFacts, ...]()))

    def plan_presets(self) -> tuple[str, ...]:
        """Fill in `presets`, and return the names of those that no device here is planned for."""
        unplanned = facts.unplanned_presets(num_gpus=self.num_gpus)
        self.presets = facts.read_presets(self.environment, self._make_plan, unplanned=unplanned)
        return unplanned

    def surroundings(self) -> Surroundings:
        """Return what the rules for variables must know; what cannot be read counts as absent."""
        host = _or_else(lambda: self.host, HostFacts(cores=1, total_bytes=0, available_bytes=0))
        links = _or_else(lambda: self.links, tuple[LinkFacts, ...]())
        uses_cuda = _or_else(lambda: self.torch.cuda is not None, False)
        return Surroundings(
            uses_cuda=uses_cuda,
            num_gpus=self.num_gpus,
            cores=host.cores,
            has_nvlink=any(link.kind is LinkKind.NVLINK for link in links),
            interfaces=host.interfaces,
            infiniband=host.infiniband,
            shadowing=facts.read_shadowing(self.environment) if uses_cuda else (),
        )


def _or_else(read: Callable[[], FactT], default: FactT) -> FactT:
    """Return a fact, or `default` where it cannot be read: its own check reports why."""
    try:
        return read()
    except Exception:
        return default


def env_check(
    settings: EnvCheckSettings,
    *,
    make_plan: MakePlan,
    environment: Mapping[str, str] | None = None,
    reporter: Reporter | None = None,
) -> EnvReport:
    """Check this machine, its environment variables, and the files that are named.

    `make_plan` plans a generation (`engine.generate.plan.make_plan`), for the table of presets. Raises FileProblem if a
    file cannot be read.
    """
    environment = os.environ if environment is None else environment
    # First, since a misspelt name should be refused at once.
    of_files = [finding for name in settings.files for finding in lint_file(Path(name))]
    machine = _Machine(environment, make_plan)
    checks = _checks(machine, settings, reporter or SilentReporter())
    report = EnvReport.of(
        [*(finding for name, check in checks.items() for finding in isolated(name, check)), *of_files],
        presets=machine.presets,
        environment=shown_variables(environment),
    )
    if not settings.bug_report:
        return report
    folders = [environment.get(name, "") for name in ("OSORA_WEIGHTS", "OSORA_RUNTIME__WEIGHTS")]
    folders += [str(Path(name).parent) for name in settings.files]
    return report.bug_report(Redactor.of_this_machine(folders=folders))


def _checks(
    machine: _Machine, settings: EnvCheckSettings, reporter: Reporter
) -> dict[str, Callable[[], Iterable[Finding]]]:
    def variables() -> Iterable[Finding]:
        findings = lint_variables(machine.environment, machine.surroundings())
        count = sum(map(is_relevant, machine.environment))
        return findings or [Check("environment").ok(f"nothing wrong with {count} variables that matter here")]

    def presets() -> Iterable[Finding]:
        with reporter.stage("presets"):
            unplanned = machine.plan_presets()
        return check_presets(machine.presets, unplanned=unplanned)

    def all_reduce() -> Iterable[Finding]:
        refused = refused_by_torch(machine.environment)
        usable = {name: value for name, value in machine.environment.items() if name not in refused}
        with reporter.stage("all-reduce"):
            result = run_all_reduce(num_gpus=machine.num_gpus, seconds=settings.all_reduce_seconds, environment=usable)
        return check_all_reduce(result)

    checks: dict[str, Callable[[], Iterable[Finding]]] = {
        "python": lambda: check_python(facts.read_python()),
        "torch": lambda: check_torch(machine.torch, machine.driver),
        "cards": lambda: check_gpus(machine.torch, machine.gpus),
        "links": lambda: check_links(machine.links),
        "libraries": lambda: check_libraries(machine.torch, machine.gpus),
        "precision": lambda: check_precision(machine.torch, machine.gpus),
        "attention": lambda: check_attention(facts.read_attention()),
        "video": lambda: check_encoder(facts.read_encoder()),
        "memory": lambda: check_memory(machine.host, machine.weights, has_gpus=bool(machine.gpus)),
        "disk": lambda: check_disk(machine.weights),
        "limits": lambda: check_limits(machine.host),
        "environment": variables,
        "presets": presets,
    }
    return {**checks, "all-reduce": all_reduce} if settings.all_reduce else checks
