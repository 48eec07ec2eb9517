"""One hostile case after the other: run and judged."""

import os
import shlex
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import pytest
from hostile import judge
from hostile.judge import Fault
from hostile.sandbox import TIME_LIMIT_S, Folder, Outcome, Sandbox

_TIMES = int(os.environ.get("HOSTILE_TIMES", "1"))
_LONGEST_REPORT = 6000


def _nothing(folder: Folder) -> None: ...


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
    signals: Sequence[tuple[float, int]] = ()
    limit_s: float = TIME_LIMIT_S
    uid: int | None = None
    stdout: str = ""
    may_crash: bool = False
    """Whether kernels of torch may end the process: without memory, those of oneDNN read what they did not get."""


@dataclass
class Trials:
    sandbox: Sandbox

    def run_all(self, cases: Iterable[Case]) -> None:
        self.report((f"{case.name}: osora {shlex.join(case.argv)}", self.run(case)[1]) for case in cases)

    def report(self, tried: Iterable[tuple[str, Sequence[Fault]]]) -> None:
        """Fail the test at the end with all faults of what was tried, each with its name."""
        reports = [f"{name}\n  {fault}"[:_LONGEST_REPORT] for name, faults in tried for fault in faults]
        if reports:
            pytest.fail("\n\n".join(reports), pytrace=False)

    def run(self, case: Case) -> tuple[Outcome, list[Fault]]:
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
        return outcome, faults


def batches(count: int, *, size: int = 25) -> pytest.MarkDecorator:
    """Try the cases from 0 to `count`, or HOSTILE_TIMES as many, in batches.

    Cases of one batch run in one test, so that setting up and reporting a test takes no time of them.
    """
    count *= _TIMES
    of_each = [range(start, min(start + size, count)) for start in range(0, count, size)]
    ids = [f"{numbers[0]}-{numbers[-1]}" for numbers in of_each]
    return pytest.mark.parametrize("numbers", of_each, ids=ids)
