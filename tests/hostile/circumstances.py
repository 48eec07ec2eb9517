"""Valid commands where something around them is wrong: disks, folders, users, streams, limits."""

import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hostile import judge
from hostile.inputs import BASES, Inputs
from hostile.sandbox import Folder
from hostile.trial import Case

_NAMELESS = 54321
_KIB = 1024
_MIB = 2**20


@dataclass(frozen=True)
class _Circumstance:
    """How a case differs from one in which nothing is wrong."""

    close: Callable[[Folder], object] = lambda folder: None
    environment: Mapping[str, str] = field(default_factory=dict)
    limits: Callable[[random.Random], Mapping[str, int]] = lambda rng: {}
    uid: int | None = None
    stdout: str = ""
    may_crash: bool = False
    harms: bool = True
    """Whether the command may be refused for it."""


def _closed(name: str, mode: int) -> Callable[[Folder], object]:
    return lambda folder: (folder.root / name).chmod(mode)


def _of_others(mode: int) -> Callable[[Folder], object]:
    """Let another user own all that is there, with the rights `mode` for its folders."""

    def close(folder: Folder) -> None:
        for path, _, files in os.walk(folder.work, topdown=False):
            for each in [*(os.path.join(path, name) for name in files), path]:
                os.chmod(each, 0o644)
                if os.geteuid() == 0:
                    os.chown(each, 0, 0, follow_symlinks=False)
            os.chmod(path, mode)

    return close


def _only_inside(mode: int) -> Callable[[Folder], object]:

    def close(folder: Folder) -> None:
        for path in sorted(folder.work.rglob("*"), reverse=True):
            if path.is_dir():
                path.chmod(mode)

    return close


def _one_of(name: str, limits: Sequence[int]) -> Callable[[random.Random], Mapping[str, int]]:
    return lambda rng: {name: rng.choice(limits)}


CIRCUMSTANCES: Mapping[str, _Circumstance] = {
    "short files": _Circumstance(
        limits=lambda rng: {"RLIMIT_FSIZE": 4 * _KIB + rng.choice((0, rng.randrange(64 * _KIB), rng.randrange(_MIB)))},
        stdout="/dev/null",
    ),
    "a read-only folder": _Circumstance(close=_closed("work", 0o500)),
    "read-only folders in it": _Circumstance(close=_only_inside(0o500)),
    "closed folders in it": _Circumstance(close=_only_inside(0)),
    "files of others": _Circumstance(close=_of_others(0o755)),
    "files of others in a shared folder": _Circumstance(close=_of_others(0o1777)),
    "a full device for output": _Circumstance(stdout="/dev/full"),
    "few descriptors": _Circumstance(limits=_one_of("RLIMIT_NOFILE", (8, 16, 24, 40))),
    "little memory": _Circumstance(
        limits=_one_of("RLIMIT_DATA", [each * _MIB for each in (16, 64, 128, 256)]), may_crash=True
    ),
    "no processes": _Circumstance(limits=_one_of("RLIMIT_NPROC", (1,))),
    "a pipe that nobody reads": _Circumstance(stdout="pipe", harms=False),
    "a closed home": _Circumstance(close=_closed("home", 0), harms=False),
    "a read-only home": _Circumstance(close=_closed("home", 0o500), harms=False),
    "no home": _Circumstance(environment={"HOME": "/nonexistent"}, harms=False),
    "no place for temporary files": _Circumstance(environment={"TMPDIR": "/nonexistent"}, harms=False),
    "a read-only place for temporary files": _Circumstance(close=_closed("tmp", 0o500), harms=False),
    "a user without a name": _Circumstance(uid=_NAMELESS, close=_of_others(0o777), harms=False),
    "another language": _Circumstance(environment={"LANG": "tr_TR.UTF-8", "LC_ALL": "C"}, harms=False),
    "a terminal of one column": _Circumstance(environment={"COLUMNS": "1", "LINES": "1"}, harms=False),
}


def circumstance(number: int, inputs: Inputs) -> Case:
    """Return the case of a number: every command in every circumstance, and again with other sizes."""
    rng = random.Random(number)
    names = sorted(CIRCUMSTANCES)
    # Neighbours differ in both, so that a small part of the numbers has something of all.
    name = names[number % len(names)]
    base = BASES[(number // len(names) + number * 7) % len(BASES)]
    about = CIRCUMSTANCES[name]
    return Case(
        f"circumstance {number} ({name})",
        base.argv,
        prepare=inputs.putting(base),
        close=about.close,
        codes=judge.DOCUMENTED if about.harms else frozenset({base.code}),
        may_change=base.replaces,
        environment=about.environment,
        limits=about.limits(rng),
        uid=about.uid,
        stdout=about.stdout,
        may_crash=about.may_crash,
    )
