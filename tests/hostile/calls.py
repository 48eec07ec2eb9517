"""Commands of which one system call fails, or that end at it, and what the next run makes of that.

Every call counts that changes a file of the command: see `failing_calls.c` for what is seen.
"""

import os
import random
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from hostile import judge
from hostile.endings import ENDED, Commands, Ended, elsewhere
from hostile.failing_calls import BREAKAGES, Breakage
from hostile.inputs import Base, Inputs
from hostile.judge import Fault
from hostile.sandbox import Folder, Outcome, Sandbox, empty

_LOG = "calls.log"
_RUN_LOG = "/log.jsonl"
"""Log of a training, at the end of its path."""
_AGE_S = 600.0
_TEMPORARY = re.compile(r"\.osora-[\w-]+\.tmp")
_UNFINISHED = re.compile(r".*?((\.osora-|\.saving-)[^/]*|/\.lock$)")
_PROBE = re.compile(r"(?:open64|write) (tmp/[a-z0-9_]{8})")
"""Call with which Python tries the temporary folder while torch is imported. Its file stays if the call breaks."""
_HASH, _NUMBER = re.compile(r"[0-9a-f]{8,}"), re.compile(r"[0-9]+")


@dataclass
class Calls:
    """Breaks calls of commands, which a number chooses."""

    sandbox: Sandbox
    inputs: Inputs
    _whole: dict[str, Mapping[str, bytes]] = field(default_factory=dict)
    """Results of commands of which no call breaks."""
    _logs: dict[str, list[str]] = field(default_factory=dict)
    _folders: dict[str, Folder] = field(default_factory=dict)
    _next: dict[tuple[object, ...], list[Fault]] = field(default_factory=dict)
    """Faults of the next run, by what it found: many calls that break leave the same."""

    def faults(self, number: int) -> tuple[str, list[Fault]]:
        """Return which call was broken how, and what is wrong with what the command or the next run left."""
        rng = random.Random(number)
        ended = rng.choice(ENDED)
        return self.faults_of(ended, rng.choice(BREAKAGES), rng.choice(self.numbers(ended)))

    def numbers(self, ended: Ended) -> list[int]:
        """Return the numbers of the calls of a command that change files: of many writes to one file in a row, the
        first, the second and the last.
        """
        log = enumerate(self._log(ended), start=1)
        rows = [[number for number, _ in row] for _, row in groupby(log, lambda each: each[1])]
        return [number for row in rows for number in sorted({*row[:2], row[-1]})]

    def _log(self, ended: Ended) -> list[str]:
        if ended.base.name not in self._logs:
            outcome, log = self._run(ended, self._folder(ended), Breakage.COUNT, 0)
            assert outcome.code == 0, f"osora {' '.join(ended.base.argv)}: {outcome}\n{outcome.stderr}"
            self._logs[ended.base.name] = log
        return self._logs[ended.base.name]

    def faults_of(self, ended: Ended, breakage: Breakage, call: int) -> tuple[str, list[Fault]]:
        """Break one call of a command, and return what `faults` returns."""
        whole = self._results_of(ended)
        folder = self._folder(ended)
        before, old = judge.tree(folder), ended.results(folder.work)
        outcome, log = self._run(ended, folder, breakage, call)
        broken = [line[1:] for line in log if line.startswith("!")]
        what = broken[0] if broken else "not come to"
        if probe := _PROBE.fullmatch(what):
            (folder.root / probe[1]).unlink(missing_ok=True)
        title = f"{ended.base.name}, {breakage.name} at call {call} ({what})"
        if breakage is Breakage.KILL and outcome.signal == signal.SIGKILL:
            found = []
        else:
            found = judge.faults_of_outcome(outcome, codes=_codes(breakage) if broken else frozenset({0}))
        after = judge.tree(folder)
        kept = {path: content for path, content in after.items() if not judge.is_unfinished(path)}
        if breakage is Breakage.KILL:
            # The next run drops the line of a new log that a kill has cut.
            kept = {path: content for path, content in kept.items() if path in before or not path.endswith(_RUN_LOG)}
        found += judge.faults_of_files(before, kept, folder.root, may_change=ended.base.replaces)
        found = [fault for fault in found if not (fault.kind == judge.LEFT and fault.text.startswith("tmp/"))]
        found += _lost(old, ended.results(folder.work), whole)
        commands = _clean_up(ended.base, after) if outcome.code == 0 else ended.go_on(folder, ended.base)
        _age(folder)
        excuse = outcome.stderr if outcome.code == 0 else ""
        state = (ended.base.name, excuse, *commands, _state(folder))
        if state not in self._next:
            self._next[state] = self._faults_of_next(ended, folder, commands, excuse)
        found += self._next[state]
        if found:
            said = f"  which ended: {outcome}\n{outcome.stderr[-600:]}"
            found[-1] = Fault(found[-1].kind, f"{found[-1].text}\n{said}")
        return title, found

    def _faults_of_next(self, ended: Ended, folder: Folder, commands: Commands, excuse: str) -> list[Fault]:
        """Return what is wrong with commands that go on after one of which a call broke, and with all results."""
        found = []
        for argv in commands:
            resumed = self._osora(argv, folder)
            if resumed.code != 0:
                found.append(Fault(judge.ALARMS, f"osora {' '.join(argv)}: {resumed}\n{resumed.stderr[-2000:]}"))
        for log in folder.work.rglob(_RUN_LOG.strip("/")):
            if reason := judge.broken(log):
                found.append(Fault(judge.HALF, f"{log}: {reason}"))
        results, whole = _without_excused(excuse, ended.results(folder.work), self._results_of(ended))
        return found + _faults_of_results(judge.tree(folder), results, whole)

    def _results_of(self, ended: Ended) -> Mapping[str, bytes]:
        if ended.base.name not in self._whole:
            with self.sandbox.folder() as folder:
                self.inputs.put(ended.base, folder)
                outcome = self._osora(ended.base.argv, folder)
                assert outcome.code == 0, f"osora {' '.join(ended.base.argv)}: {outcome}\n{outcome.stderr}"
                self._whole[ended.base.name] = dict(ended.results(folder.work))
        return self._whole[ended.base.name]

    def _osora(self, argv: Sequence[str], folder: Folder, *, calls: Sequence[object] = ()) -> Outcome:
        self.sandbox.give_away(folder)
        return self.sandbox.run(argv, folder, calls=calls, grace_s=60.0, limit_s=300.0)

    def _folder(self, ended: Ended) -> Folder:
        if ended.base.name not in self._folders:
            self._folders[ended.base.name] = self.sandbox.new_folder()
        folder = self._folders[ended.base.name]
        empty(folder)
        self.inputs.put(ended.base, folder)
        return folder

    def _run(self, ended: Ended, folder: Folder, breakage: Breakage, call: int) -> tuple[Outcome, list[str]]:
        path = folder.root / _LOG
        path.touch()
        calls = (str(folder.root), str(path), breakage, call)
        outcome = self._osora(ended.base.argv, folder, calls=calls)
        log = path.read_text(errors="replace").replace(f"{folder.root}/", "").splitlines()
        path.unlink()
        return outcome, log


def _codes(breakage: Breakage) -> frozenset[int]:
    return frozenset({0, 130} if breakage >= Breakage.SEND_INT else {0, 3, 4, 5})


def _state(folder: Folder) -> frozenset[tuple[str, str]]:
    """Return what the next run reads: all files, but process numbers, seconds, and states of random numbers. What is
    unfinished is not read, but removed by its name.
    """
    found = set()
    for path, content in judge.tree(folder).items():
        if unfinished := _UNFINISHED.match(path):
            path, content = unfinished[0], ""
        elif path.endswith((".json", ".jsonl")):
            content = _without_numbers((folder.root / path).read_text(errors="replace"))
        elif "/random_states/" in path:
            content = str((folder.root / path).stat().st_size)
        found.add((_HASH.sub("~", _TEMPORARY.sub("a.tmp", path)), content))
    return frozenset(found)


def _without_numbers(text: str) -> str:
    return _NUMBER.sub("#", _HASH.sub("~", text))


def _clean_up(base: Base, after: judge.Tree) -> Commands:
    if not any(map(judge.is_unfinished, after)):
        return ()
    if any(path.startswith("work/out/") for path in after):
        return [elsewhere(base)]
    replaces = "--overwrite" in base.argv or base.name.startswith("cache")
    return [base.argv if replaces else (*base.argv, "--overwrite")]


def _without_excused(
    stderr: str, results: Mapping[str, bytes], whole: Mapping[str, bytes]
) -> tuple[Mapping[str, bytes], Mapping[str, bytes]]:
    """Return results without those that the command warned of, and made do without: a preview, or one checkpoint of
    several, but never the last.
    """
    if "there are no more previews" in stderr:
        excused = {name for name in whole if ".preview." in name}
    elif " is not saved: " in stderr:
        last = max(name.split("/")[1] for name in whole)
        excused = {name for name in results.keys() | whole.keys() if name.split("/")[1] != last}
    else:
        return results, whole
    return (
        {name: results[name] for name in results.keys() - excused},
        {name: whole[name] for name in whole.keys() - excused},
    )


def _lost(old: Mapping[str, bytes], now: Mapping[str, bytes], whole: Mapping[str, bytes]) -> list[Fault]:
    return [
        Fault(judge.LOST, f"{name} is {'changed' if name in now else 'gone'}")
        for name, content in old.items()
        if now.get(name) not in (content, whole.get(name))
    ]


def _age(folder: Folder) -> None:
    """Let time pass for what is left under temporary names."""
    for path in folder.root.rglob("*"):
        if re.search(r"\.osora-.*\.tmp", str(path)):
            status = path.lstat()
            os.utime(path, (status.st_atime - _AGE_S, status.st_mtime - _AGE_S), follow_symlinks=False)


def _faults_of_results(after: judge.Tree, results: Mapping[str, bytes], whole: Mapping[str, bytes]) -> list[Fault]:
    """Return what is wrong with what the next run leaves: left-overs, or results unlike the `whole` ones."""
    found = [Fault(judge.LEFT, path) for path in after if judge.is_unfinished(path) or path.startswith("tmp/")]
    for name in sorted(results.keys() | whole.keys()):
        if name not in results:
            found.append(Fault(judge.LOST, f"{name} is not there"))
        elif name not in whole:
            found.append(Fault(judge.LEFT, f"{name}, which an uninterrupted run does not make"))
        elif results[name] != whole[name]:
            found.append(Fault(judge.LOST, f"{name} has other bytes than of an uninterrupted run"))
    return found
