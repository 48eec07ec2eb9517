"""One hostile case after the other: run, judged and counted."""

import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import pytest
from hostile import judge
from hostile.judge import Fault
from hostile.sandbox import TIME_LIMIT_S, Folder, Outcome, Sandbox, Signal

TRIED = "tried"
_LONGEST_REPORT = 6000


def _nothing(folder: Folder) -> None:
    """Prepare nothing."""


@dataclass(frozen=True)
class Case:
    """A command line, what it finds, and what it may do.

    `codes` are the exit codes that it may end with: `{0}` for one in which nothing is wrong, which counts as a false
    alarm if it is refused. `may_change` are files and folders, as `work/runs`, that it was asked to replace.
    `prepare` puts files into its folder, which the user without rights then owns; `close` comes after that, as root
    where the tests run as root, and takes rights away.
    """

    name: str
    argv: tuple[str, ...]
    prepare: Callable[[Folder], object] = _nothing
    close: Callable[[Folder], object] = _nothing
    codes: frozenset[int] = judge.DOCUMENTED
    may_change: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)
    signals: Sequence[Signal] = ()
    limit_s: float = TIME_LIMIT_S
    patch: str | None = None


@dataclass
class Trials:
    """Runs cases, and keeps count of them and of their faults; `record` takes the counts of each `run_all`."""

    sandbox: Sandbox
    record: Callable[[Mapping[str, int]], object] = lambda counts: None

    def run_all(self, cases: Iterable[Case]) -> None:
        """Run and count cases, and fail the test at the end with all faults."""
        counts: Counter[str] = Counter()
        reports: list[str] = []
        for case in cases:
            _, faults = self.run(case)
            counts[TRIED] += 1
            counts.update(fault.kind for fault in faults)
            reports += [f"{case.name}: osora {shlex.join(case.argv)}\n  {fault}"[:_LONGEST_REPORT] for fault in faults]
        self.record(counts)
        if reports:
            pytest.fail("\n\n".join(reports), pytrace=False)

    def run(self, case: Case) -> tuple[Outcome, list[Fault]]:
        """Run a case and judge it."""
        with self.sandbox.folder() as folder:
            case.prepare(folder)
            before = judge.tree(folder)
            self.sandbox.give_away(folder)
            case.close(folder)
            outcome = self.sandbox.run(
                case.argv,
                folder,
                environment=case.environment,
                limits=case.limits,
                signals=case.signals,
                limit_s=case.limit_s,
                patch=case.patch,
            )
            faults = judge.faults_of_outcome(outcome, codes=case.codes)
            faults += judge.faults_of_files(before, judge.tree(folder), folder.root, may_change=case.may_change)
        return outcome, faults


def summary(counts: Mapping[str, int]) -> str:
    """Return the line of all counts, under `TRIED` and the kinds of faults."""
    return ", ".join([f"hostile: {counts[TRIED]} cases tried", *(f"{kind} {counts[kind]}" for kind in judge.KINDS)])
