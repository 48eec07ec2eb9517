"""Safe opening of files with predictable names in folders that others may write to.

Another account, or the archive of a folder, may contain something else under such a name: a link to a file of the
user, a pipe that blocks forever, or a device.
"""

import errno
import os
import stat
from contextlib import suppress

_REFUSALS = (errno.ELOOP, errno.EPERM, errno.EISDIR)


def open_regular(path: str | os.PathLike[str], flags: int) -> int:
    """Open a regular file and return its descriptor. It can serve in `open(path, mode, opener=open_regular)`.

    A file that is opened for writing must have no other name. It must belong to this user or to the owner of its
    folder, who can replace it anyway: some network disks give all files to one owner. The file is truncated only after
    it has passed these checks. The path may contain links to folders.

    Raises OSError if the system refuses, or with the reason if the file is not regular.
    """
    truncates, flags = bool(flags & os.O_TRUNC), flags & ~os.O_TRUNC
    is_written = bool(flags & (os.O_WRONLY | os.O_RDWR))
    with suppress(FileNotFoundError):  # Opening has effects on some devices, so check first.
        _check_kind(path, os.lstat(path))
    # The file may be replaced between the two calls: O_NONBLOCK prevents blocking on a pipe.
    for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY"):
        flags |= getattr(os, name, 0)
    descriptor = os.open(path, flags, 0o666)
    try:
        status = os.fstat(descriptor)
        _check_kind(path, status)
        if is_written:
            _check_owner(path, status)
        if truncates:
            os.ftruncate(descriptor, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def hint_for(error: OSError) -> str | None:
    """Return the hint for a refusal of `open_regular`; None for another error."""
    return "move it away, or choose another folder" if error.errno in _REFUSALS else None


def _check_kind(path: str | os.PathLike[str], status: os.stat_result) -> None:
    if stat.S_ISLNK(status.st_mode):
        raise OSError(errno.ELOOP, "it is a link", path)
    if stat.S_ISDIR(status.st_mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if not stat.S_ISREG(status.st_mode):
        kinds = {stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket"}
        raise OSError(errno.EPERM, f"it is a {kinds.get(stat.S_IFMT(status.st_mode), 'device')}", path)


def _check_owner(path: str | os.PathLike[str], status: os.stat_result) -> None:
    if status.st_nlink > 1:
        raise OSError(errno.EPERM, "it is one of several hard links to a file", path)
    if hasattr(os, "geteuid") and status.st_uid != os.geteuid():
        folder = os.stat(os.path.dirname(os.path.abspath(path)))
        if status.st_uid != folder.st_uid:
            raise OSError(errno.EPERM, f"it belongs to another user (uid {status.st_uid})", path)
