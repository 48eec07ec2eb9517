"""One hostile case after the other: run, judged and counted."""

import shlex
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pytest
from hostile import judge
from hostile.judge import Fault
from hostile.sandbox import TIME_LIMIT_S, Folder, NotPossibleError, Outcome, Sandbox, Signal

TRIED = "tried"
_LONGEST_REPORT = 6000


def _nothing(folder: Folder) -> None:
    """Prepare nothing."""


def _no_faults(folder: Folder, outcome: Outcome) -> Iterable[Fault]:
    """Find nothing."""
    return ()


@dataclass(frozen=True)
class Case:
    """A command line, what it finds, and what it may do.

    `codes` are the exit codes that it may end with: `{0}` for one in which nothing is wrong, which counts as a false
    alarm if it is refused. `may_change` are files and folders, as `work/runs`, that it was asked to replace,
    and `may_keep` where it keeps what is of use to the next run.
    `prepare` puts files into its folder, which the user without rights then owns; `close` comes after that, as root
    where the tests run as root, and takes rights away.
    """

    name: str
    argv: tuple[str, ...]
    prepare: Callable[[Folder], object] = _nothing
    close: Callable[[Folder], object] = _nothing
    codes: frozenset[int] = judge.DOCUMENTED
    may_change: tuple[str, ...] = ()
    may_keep: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)
    signals: Sequence[Signal] = ()
    limit_s: float = TIME_LIMIT_S
    uid: int | None = None
    stdout: str = ""
    free_bytes: int | None = None
    """What is left on the disk that it runs on."""
    check: Callable[[Folder, Outcome], Iterable[Fault]] = _no_faults
    """Finds further faults in what it leaves."""
    patch: str | None = None
    may_crash: bool = False
    """Whether kernels of torch may end the process: without memory, those of oneDNN read what they did not get."""


@dataclass
class Trials:
    """Runs cases, and keeps count of them and of their faults; `record` takes the counts of each `run_all`."""

    sandbox: Sandbox
    record: Callable[[Mapping[str, int]], object] = lambda counts: None

    def run_all(self, cases: Iterable[Case]) -> None:
        """Run and count cases, and fail the test at the end with all faults. What needs root is left out without it."""
        self.count((f"{case.name}: osora {shlex.join(case.argv)}", faults) for case, faults in self._possible(cases))

    def count(self, tried: Iterable[tuple[str, Sequence[Fault]]]) -> None:
        """Count what was tried, each with its name and its faults, and fail the test at the end with all of them."""
        counts: Counter[str] = Counter()
        reports: list[str] = []
        for name, faults in tried:
            counts[TRIED] += 1
            counts.update(fault.kind for fault in faults)
            reports += [f"{name}\n  {fault}"[:_LONGEST_REPORT] for fault in faults]
        self.record(counts)
        if reports:
            pytest.fail("\n\n".join(reports), pytrace=False)

    def _possible(self, cases: Iterable[Case]) -> Iterator[tuple[Case, Sequence[Fault]]]:
        for case in cases:
            try:
                _, faults = self.run(case)
            except NotPossibleError:
                continue
            yield case, faults

    def run(self, case: Case) -> tuple[Outcome, list[Fault]]:
        """Run a case and judge it."""
        has_disk = case.free_bytes is not None
        with self.sandbox.folder(has_disk=has_disk) as folder:
            case.prepare(folder)
            before = judge.tree(folder)
            self.sandbox.give_away(folder)
            if case.free_bytes is not None:
                self.sandbox.resize_disk(folder, free=case.free_bytes)
            case.close(folder)
            outcome = self.sandbox.run(
                case.argv,
                folder,
                environment=case.environment,
                limits=case.limits,
                signals=case.signals,
                limit_s=case.limit_s,
                patch=case.patch,
                uid=case.uid,
                stdout=case.stdout,
            )
            if case.may_crash and outcome.signal == signal.SIGSEGV:
                return outcome, []
            faults = judge.faults_of_outcome(outcome, codes=case.codes)
            after = judge.tree(folder)
            faults += judge.faults_of_files(
                before, after, folder.root, may_change=case.may_change, may_keep=case.may_keep
            )
            faults += case.check(folder, outcome)
        return outcome, faults


def summary(counts: Mapping[str, int]) -> str:
    """Return the line of all counts, under `TRIED` and the kinds of faults."""
    return ", ".join([f"hostile: {counts[TRIED]} cases tried", *(f"{kind} {counts[kind]}" for kind in judge.KINDS)])
