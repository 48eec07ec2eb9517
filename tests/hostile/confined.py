"""What a process gives up before it runs a hostile command line: rights, memory, and all folders but its own."""

import ctypes
import os
import resource
import struct
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

NOBODY = 65534
NOT_POSSIBLE = 77
"""Exit code of a process that the system does not let confine itself."""

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # Linux's Landlock
_WRITES_OF_ABI = {
    1: 0x1FF2,  # write, remove, and make files and folders of all kinds
    2: 0x3FF2,  # and rename between folders
    3: 0x7FF2,  # and truncate
}
_SIGNALS, _SIGNALS_ABI = 2, 6
_SET_PDEATHSIG, _SET_CHILD_SUBREAPER, _SET_NO_NEW_PRIVS = 1, 36, 38
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/shm")

_NEW_MOUNTS, _BIND, _RECURSIVE, _PRIVATE, _DETACH = 0x20000, 0x1000, 0x4000, 0x40000, 2

_libc = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """Become the parent of what children leave running."""
    _libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent() -> None:
    _libc.prctl(_SET_PDEATHSIG, 9, 0, 0, 0)


def own_mounts() -> None:
    """Let this process and its children mount what nobody else sees. Needs root; OSError if it cannot be done."""
    _check(_libc.unshare(_NEW_MOUNTS))
    _mount("none", "/", _RECURSIVE | _PRIVATE)


def open_to_others(paths: Sequence[Path]) -> None:
    """Let users without rights reach `paths`, for this process and its children alone.

    Where a home that others may not enter holds one of them (a Python of root's own), an empty folder is mounted over
    that home, with `paths` in it: what else is there is out of sight. Needs `own_mounts`.
    Raises OSError if it cannot be done.
    """
    closed = {path: home for path in paths if (home := _closed_above(path)) is not None}
    if not closed:
        return
    kept = Path(tempfile.mkdtemp(dir="/tmp"))
    places = {path: kept / str(number) for number, path in enumerate(closed)}
    _mount("tmpfs", str(kept), 0, kind="tmpfs", options="mode=755")
    for path, place in places.items():
        place.mkdir()
        _mount(str(path), str(place), _BIND | _RECURSIVE)
    for home in set(closed.values()):
        _mount("tmpfs", str(home), 0, kind="tmpfs", options="mode=755")
    for path, place in places.items():
        path.mkdir(parents=True)
        _mount(str(place), str(path), _BIND | _RECURSIVE)
    _check(_libc.umount2(os.fsencode(kept), _DETACH))
    kept.rmdir()


def _closed_above(path: Path) -> Path | None:
    ways = [*reversed(path.parents), path]
    return next((each for each in ways if not each.stat().st_mode & 0o001), None)


def _mount(source: str, target: str, flags: int, *, kind: str = "none", options: str = "") -> None:
    words = (source, target, kind)
    _check(_libc.mount(*map(os.fsencode, words), flags, options.encode() or None))


def confine(folder: Path, *, uid: int | None, limits: Mapping[str, int]) -> None:
    """Become the user `uid` (needs root; None: stay), who writes in `folder` alone; OSError if it can write elsewhere.

    `limits` are names such as `RLIMIT_FSIZE` to numbers; that of `RLIMIT_DATA` is beside what the process has already.
    """
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    os.umask(0o022)
    die_with_parent()
    _close_other_folders(folder)
    # Last, since what comes before opens files.
    for name, limit in limits.items():
        if name == "RLIMIT_DATA":
            limit += _data_bytes()
        resource.setrlimit(getattr(resource, name), (limit, limit))
    if os.geteuid() == 0:
        raise PermissionError("the command would run as root")


def _data_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmData"))


def _close_other_folders(folder: Path) -> None:
    abi = _libc.syscall(_CREATE_RULESET, None, 0, 1)
    if abi < 1:  # a kernel without Landlock: permissions alone keep a user's files
        return
    writes = _WRITES_OF_ABI[min(abi, max(_WRITES_OF_ABI))]
    attributes = struct.pack("=QQQ", writes, 0, _SIGNALS) if abi >= _SIGNALS_ABI else struct.pack("=Q", writes)
    ruleset = _check(_libc.syscall(_CREATE_RULESET, attributes, len(attributes), 0))
    for place in (str(folder), *filter(os.path.exists, _DEVICES)):
        of_file = 0x4002 & writes
        opened = os.open(place, os.O_PATH | os.O_CLOEXEC)
        allowed = writes if os.path.isdir(place) else of_file
        _check(_libc.syscall(_ADD_RULE, ruleset, 1, struct.pack("=Qi", allowed, opened), 0))
        os.close(opened)
    _check(_libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _check(_libc.syscall(_RESTRICT_SELF, ruleset, 0))
    os.close(ruleset)


def _check(result: int) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result
