"""Reading what a user named: the one place that knows what can go wrong there, and with which exit code it ends.

The set is closed: what the system refuses, names that no file can have, text that is not UTF-8, what is nested too
deeply or does not fit into memory. Everything else that happens while a file is read is a bug, and keeps its traceback.
"""

import errno
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from opensora_cli.core.exceptions import FileProblem, HardwareError, OsoraError
from opensora_cli.core.formatting import shown_path
from opensora_cli.core.strict_json import parse_object, shown

MAX_TEXT_BYTES = 10_000_000
"""Of a file of settings, a sidecar or a caption: 10 MB. Written by hand or by osora, none is near it."""

_OF_MACHINE = frozenset({errno.ENOMEM, errno.EMFILE, errno.ENFILE})
_OF_SYSTEM = _OF_MACHINE | {
    getattr(errno, name)
    for name in ("EACCES", "EPERM", "ENAMETOOLONG", "ELOOP", "EIO", "ESTALE", "EROFS", "ENOSPC", "EDQUOT", "EFBIG")
    if hasattr(errno, name)
}

_NO_MEMORY = (
    *("annot allocate memory", "can't allocate memory", "std::bad_alloc"),
    *("failed to map segment", "can't start new thread"),
)
"""In the messages of torch, of the loader of shared libraries and of Python's threads."""
_NO_KERNEL = "could not create a primitive"
"""What oneDNN says where it gets no memory for the code of a kernel; one that it lacks is a "primitive descriptor"."""


def is_lack_of_memory(error: BaseException) -> bool:
    """Return whether this process got no memory (as under `ulimit -v`), whatever kind of error that became."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    text = str(error)
    return isinstance(error, RuntimeError | ImportError) and (
        text == _NO_KERNEL or any(each in text for each in _NO_MEMORY)
    )


@contextmanager
def reading(
    path: str | os.PathLike[str], *, problem: type[FileProblem] = FileProblem, hint: str | None = None
) -> Iterator[None]:
    """Turn what goes wrong in the block, which reads what a user named `path`, into the error of that file.

    Raises:
        FileProblem, or the subclass `problem`: the system refuses it, no file can have its name, its text is not UTF-8
            or nested too deeply; with `hint`, or the file inside `path` that the system names.
        HardwareError: it does not fit into memory, or too many files are open.
    """
    try:
        yield
    except (OSError, ValueError, RuntimeError, MemoryError) as error:
        found = _explained(error, path, problem=problem, hint=hint)
        if found is None:
            raise
        raise found from error


def lack_of_machine(error: Exception, path: str | os.PathLike[str]) -> HardwareError | None:
    """Return the error of a machine that has no memory or no descriptors left for reading `path`; None: it has."""
    if is_lack_of_memory(error):
        return HardwareError(f"there is not enough memory to read {shown_path(path)}")
    if isinstance(error, OSError) and error.errno in _OF_MACHINE:
        return HardwareError(f"{shown_path(path)} cannot be read: {error.strerror}")
    return None


def refused_by_system(error: OSError) -> OsoraError | None:
    """Return the error of a file that the system denies, cannot reach or has no room for, wherever that was noticed.

    None for every other error, and where the system names no file: those that no `reading` block expects are bugs.
    """
    if error.errno not in _OF_SYSTEM:
        return None
    kind = HardwareError if error.errno in _OF_MACHINE else FileProblem
    if isinstance(error.filename, str | bytes | os.PathLike):
        return kind(f"{shown_path(os.fsdecode(error.filename))} cannot be used: {error.strerror}")
    return HardwareError(f"this machine cannot do it: {error.strerror}") if kind is HardwareError else None


def require_file(
    path: str | os.PathLike[str], *, problem: type[FileProblem] = FileProblem, hint: str | None = None
) -> os.stat_result:
    """Return the status of a regular file. Pipes and devices, which may never end, are refused like folders.

    Raises FileProblem, or the subclass `problem`, unless it is one that can be looked at.
    """
    with reading(path, problem=problem, hint=hint):
        status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise problem(f"{shown_path(path)} is not a file: it is a {_kind(status.st_mode)}", hint=hint)
    return status


def read_bytes(
    path: str | os.PathLike[str],
    *,
    max_bytes: int = MAX_TEXT_BYTES,
    problem: type[FileProblem] = FileProblem,
    hint: str | None = None,
) -> bytes:
    """Return what is in a regular file of at most `max_bytes`. Raises as `reading` and `require_file`."""
    require_file(path, problem=problem, hint=hint)
    with reading(path, problem=problem, hint=hint), open(path, "rb") as file:
        # By reading, since the size of what a kernel makes up, as in /proc, is not known.
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise problem(
            f"{shown_path(path)} has more than {max_bytes:,} bytes, too many for what it should be", hint=hint
        )
    return content


def read_text(
    path: str | os.PathLike[str],
    *,
    max_bytes: int = MAX_TEXT_BYTES,
    problem: type[FileProblem] = FileProblem,
    hint: str | None = None,
) -> str:
    """Return the text in a file, in UTF-8 with or without a byte order mark. Raises as `read_bytes`."""
    content = read_bytes(path, max_bytes=max_bytes, problem=problem, hint=hint)
    with reading(path, problem=problem, hint=hint):
        return content.decode("utf-8-sig")


def read_json_object(
    path: str | os.PathLike[str], *, problem: type[FileProblem] = FileProblem, hint: str | None = None
) -> dict[str, Any]:
    """Return the object in a JSON file, read strictly. Raises as `read_bytes`, and if it holds something else."""
    content = read_bytes(path, problem=problem, hint=hint)
    try:
        return parse_object(content)
    except ValueError as error:
        raise problem(f"{shown_path(path)} is broken: {error}", hint=hint) from error


def require_schema(
    document: Mapping[str, object],
    known: str,
    path: str | os.PathLike[str],
    *,
    problem: type[FileProblem] = FileProblem,
    hint: str | None = None,
) -> None:
    """Raise FileProblem, or the subclass `problem`, unless `document` has the one schema that is read here."""
    schema = document.get("schema")
    if schema != known:
        raise problem(
            f"{shown_path(path)} has the schema {shown(str(schema))}, and this version of osora reads {known!r}",
            hint=hint,
        )


def stays_inside(name: object) -> bool:
    """Return whether a document names a file of its own folder, or of one below, on whatever system."""
    if not isinstance(name, str) or not name.isprintable():
        return False
    parts = (*PurePosixPath(name).parts, *PureWindowsPath(name).parts)
    is_rooted = PurePosixPath(name).is_absolute() or PureWindowsPath(name).drive or PureWindowsPath(name).root
    return bool(parts) and ".." not in parts and not is_rooted


def _explained(
    error: Exception, path: str | os.PathLike[str], *, problem: type[FileProblem], hint: str | None
) -> OsoraError | None:
    """Return what an error of a `reading` block means; None where it is a bug."""
    if isinstance(error, OSError):
        path = _inside(error.filename, path)
    if lack := lack_of_machine(error, path):
        return lack
    name = shown_path(path)
    match error:
        case OSError():
            if isinstance(error, FileNotFoundError):
                return problem(f"{name} does not exist", hint=hint)
            return problem(f"{name} cannot be read: {error.strerror or error}", hint=hint)
        case UnicodeEncodeError():
            return problem(f"{name} does not exist: no file can have this name", hint=hint)
        case UnicodeError():
            return problem(f"{name} is not text in UTF-8", hint=hint)
        case ValueError() if str(error).startswith("embedded null"):
            return problem(f"{name} does not exist: no file can have this name", hint=hint)
        case RecursionError():
            return problem(f"{name} is nested too deeply", hint=hint)
        case _:
            return None


def _inside(filename: object, path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Return the file that the system names if it lies in `path`, else `path`."""
    if isinstance(filename, str | bytes | os.PathLike):
        named = Path(os.fsdecode(filename))
        if Path(path) in named.parents:
            return named
    return path


def _kind(mode: int) -> str:
    if stat.S_ISDIR(mode):
        return "folder"
    return "pipe" if stat.S_ISFIFO(mode) else "socket" if stat.S_ISSOCK(mode) else "device"
