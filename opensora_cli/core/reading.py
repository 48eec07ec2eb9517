"""Reading of a user's files: translates expected errors to errors with an exit code, and reads JSON strictly.

Expected errors are refusals of the system, invalid file names, text that is not UTF-8, nesting that is too deep and a
lack of memory. Every other error while reading a file is a bug, and keeps its traceback.
"""

import errno
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from opensora_cli.core.exceptions import FileProblem, HardwareError, OsoraError
from opensora_cli.core.formatting import is_unicode, shown, shown_path
from opensora_cli.core.locks import kind_of_file

MAX_TEXT_BYTES = 10_000_000
"""Largest size of settings, a sidecar, a caption or an index: 10 MB, far above real files."""

_MAX_SEPARATORS = 1_000_000
"""Largest number of separators. Values take up to 100 bytes of memory each; a tensor in a header has about 15."""

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
"""Texts in error messages of torch, of the loader of shared libraries and of Python's threads."""
_LOST = "returned NULL without setting an exception"
"""Message of Python's SystemError if a call fails and its error is lost, as a MemoryError can be."""
_NO_NAME = "does not exist: no file can have this name"
_NO_KERNEL = "could not create a primitive"
"""Message of oneDNN if it gets no memory for a kernel's code. A missing kernel is a "primitive descriptor"."""


def is_lack_of_memory(error: BaseException) -> bool:
    """Return whether an error of any kind means a lack of memory (as under `ulimit -v`)."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    text = str(error)
    if isinstance(error, SystemError):
        return _LOST in text and _is_address_space_limited()
    return isinstance(error, RuntimeError | ImportError) and (
        text == _NO_KERNEL or any(each in text for each in _NO_MEMORY)
    )


def _is_address_space_limited() -> bool:
    try:
        import resource
    except ImportError:  # not on Windows
        return False
    return resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY


@contextmanager
def reading(
    path: str | os.PathLike[str], *, problem: type[FileProblem] = FileProblem, hint: str | None = None
) -> Iterator[None]:
    """Translate expected errors of the block, which reads the user's file `path`, to errors that name it.

    Raises FileProblem, or the subclass `problem`, with `hint`, which names a file inside `path` if the system does, and
    HardwareError if the file does not fit in memory, or too many files are open.
    """
    try:
        yield
    except (OSError, ValueError, RuntimeError, MemoryError) as error:
        found = _explained(error, path, problem=problem, hint=hint)
        if found is None:
            raise
        raise found from error


def lack_of_machine(error: Exception, path: str | os.PathLike[str]) -> HardwareError | None:
    """Return the error if reading `path` failed for lack of memory or file descriptors, else None."""
    if is_lack_of_memory(error):
        return HardwareError(f"there is not enough memory to read {shown_path(path)}")
    if isinstance(error, OSError) and error.errno in _OF_MACHINE:
        return HardwareError(f"{shown_path(path)} cannot be read: {error.strerror}")
    return None


def refused_by_system(error: OSError) -> OsoraError | None:
    """Return the error for a file that the system denies, cannot reach or has no room for.

    None for every other error, and if the system names no file: errors outside of `reading` blocks are bugs.
    """
    if "No usable temporary directory" in str(error):  # of Python's tempfile
        return HardwareError("no folder for temporary files can be written", hint="set TMPDIR to one that can")
    if error.errno not in _OF_SYSTEM:
        return None
    kind = HardwareError if error.errno in _OF_MACHINE else FileProblem
    if isinstance(error.filename, str | bytes | os.PathLike):
        return kind(f"{shown_path(os.fsdecode(error.filename))} cannot be used: {error.strerror}")
    return HardwareError(f"this machine cannot do it: {error.strerror}") if kind is HardwareError else None


def require_file(
    path: str | os.PathLike[str], *, problem: type[FileProblem] = FileProblem, hint: str | None = None
) -> os.stat_result:
    """Return the status of a regular file. Folders, and pipes and devices, which may never end, raise `problem`."""
    with reading(path, problem=problem, hint=hint):
        status = os.stat(path)
    if kind := kind_of_file(status.st_mode):
        raise problem(f"{shown_path(path)} is not a file: it is a {kind}", hint=hint)
    return status


def require_there(*paths: str) -> None:
    """Raise FileProblem if a file or folder is missing or access is denied, as before slow imports."""
    for path in paths:
        with reading(path):
            os.stat(path)


def read_bytes(
    path: str | os.PathLike[str],
    *,
    max_bytes: int = MAX_TEXT_BYTES,
    problem: type[FileProblem] = FileProblem,
    hint: str | None = None,
) -> bytes:
    """Return the contents of a regular file of at most `max_bytes`. Raises like `reading` and `require_file`."""
    require_file(path, problem=problem, hint=hint)
    with reading(path, problem=problem, hint=hint), open(path, "rb") as file:
        # Read to find the size because files that the kernel generates, as in /proc, have no known size.
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        excess = f"has more than {max_bytes:,} bytes, too many for what it should be"
        raise problem(f"{shown_path(path)} {excess}", hint=hint)
    return content


def read_text(path: str | os.PathLike[str], *, max_bytes: int = MAX_TEXT_BYTES, hint: str | None = None) -> str:
    """Return the text of a UTF-8 file with or without a byte order mark. Raises like `read_bytes`."""
    content = read_bytes(path, max_bytes=max_bytes, hint=hint)
    with reading(path, hint=hint):
        return content.decode("utf-8-sig")


def parse_object(content: bytes) -> dict[str, Any]:
    """Return the object in `content`, which is UTF-8 JSON. Raises ValueError if it is not, or is too large."""
    if len(content) > MAX_TEXT_BYTES or sum(map(content.count, (b"[", b"{", b",", b":"))) > _MAX_SEPARATORS:
        raise ValueError("JSON with more values than any model needs")
    try:
        document = json.loads(content.decode("utf-8"), object_pairs_hook=_checked_object, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("JSON that is nested too deep") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"no UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON: {error}") from None
    if not isinstance(document, dict):
        raise ValueError("JSON that is no object")
    return document


def read_json_object(
    path: str | os.PathLike[str], *, problem: type[FileProblem] = FileProblem, hint: str | None = None
) -> dict[str, Any]:
    """Return the object in a JSON file, read strictly. Raises like `read_bytes`, and if it is no object."""
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
    """Raise FileProblem, or the subclass `problem`, unless `document` has the schema `known`."""
    if (schema := document.get("schema")) != known:
        there = f"{shown_path(path)} has the schema {shown(str(schema))}"
        raise problem(f"{there}, and this version of osora reads {known!r}", hint=hint)


def stays_inside(name: object) -> bool:
    """Return whether a name in a document lies in its folder or below, on every operating system."""
    if not isinstance(name, str) or not name.isprintable():
        return False
    parts = (*PurePosixPath(name).parts, *PureWindowsPath(name).parts)
    is_rooted = PurePosixPath(name).is_absolute() or PureWindowsPath(name).drive or PureWindowsPath(name).root
    return bool(parts) and ".." not in parts and not is_rooted


def _explained(
    error: Exception, path: str | os.PathLike[str], *, problem: type[FileProblem], hint: str | None
) -> OsoraError | None:
    """Return the error to raise for an error of a `reading` block; None if it is a bug."""
    if isinstance(error, OSError):
        path = _inside(error.filename, path)
    if lack := lack_of_machine(error, path):
        return lack
    match error:
        case FileNotFoundError():
            reason = "does not exist"
        case OSError():
            reason = f"cannot be read: {error.strerror or error}"
        case UnicodeEncodeError():
            reason = _NO_NAME
        case UnicodeError():
            reason = "is not text in UTF-8"
        case ValueError() if str(error).startswith("embedded null"):
            reason = _NO_NAME
        case RecursionError():
            reason = "is nested too deeply"
        case _:
            return None
    return problem(f"{shown_path(path)} {reason}", hint=hint)


def _inside(filename: object, path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Return the file named in the system's error if it lies in `path`, else `path`."""
    if isinstance(filename, str | bytes | os.PathLike):
        named = Path(os.fsdecode(filename))
        if Path(path) in named.parents:
            return named
    return path


def _checked_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {shown(key)} is there twice")
        for text in (key, value):
            if isinstance(text, str) and not is_unicode(text):
                raise ValueError(f"{shown(text)} has half a character")
        found[key] = value
    return found


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
