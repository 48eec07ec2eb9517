"""Private folders of this account for compiled code, which later runs load and execute.

By default, torch uses a folder with a predictable name among the temporary files. Another account can create and fill
that folder first.
"""

import atexit
import os
import stat
import sys
from collections.abc import MutableMapping
from contextlib import ExitStack
from functools import cache
from pathlib import Path

from opensora_cli.core.exceptions import OutputError
from opensora_cli.core.files import nearest_existing, temporary_folder, user_cache

INDUCTOR_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
EAGER_VARIABLE = "QUACK_CACHE_DIR"
"""Variable that kernels read which torch compiles in eager mode if nvidia-cutlass-dsl is installed."""
_FOLDERS = {INDUCTOR_VARIABLE: "inductor", "TRITON_CACHE_DIR": "triton"}
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def name_eager_cache(environment: MutableMapping[str, str]) -> None:
    """Set the folder for kernels that torch compiles in eager mode to one in the user's cache, unless it is set."""
    folder = user_cache("kernels")
    if folder is not None:
        environment.setdefault(EAGER_VARIABLE, str(folder))


def use_private_caches(environment: MutableMapping[str, str]) -> Path:
    """Set the unset variables for compiled code in `environment`, and return the folder of torch's compiler.

    Without a user's cache, the folders are temporary. Raises OutputError if another account may write to one of them.
    """
    for variable, name in _FOLDERS.items():
        chosen = environment.get(variable)
        environment[variable] = str(private_folder(Path(chosen) if chosen else _own_folder() / name, setting=variable))
    return Path(environment[INDUCTOR_VARIABLE])


def private_folder(path: Path, *, setting: str) -> Path:
    """Return `path` without links, as a folder that only this account may write to; else raise OutputError.

    A missing folder is created. `setting` is the variable that chooses another folder.
    """
    folder = Path(os.path.realpath(path))
    hint = f"set {setting} to a folder of your own that nobody else may write to"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = folder.stat()
    except OSError as error:
        raise OutputError(f"cannot make the folder of compiled code {folder}: {error.strerror}", hint=hint) from error
    if sys.platform != "win32":
        if state.st_uid != os.geteuid():
            raise OutputError(
                f"the folder of compiled code {folder} belongs to another user (id {state.st_uid})", hint=hint
            )
        if state.st_mode & _WRITABLE_BY_OTHERS:
            raise OutputError(
                f"the folder of compiled code {folder} may be written by others (mode {state.st_mode & 0o777:o})",
                hint=f"empty it and run: chmod go-w {folder}; or {hint}",
            )
    return folder


def _own_folder() -> Path:
    folder = user_cache("compiled")
    if folder is not None and (folder.exists() or os.access(nearest_existing(folder), os.W_OK)):
        return private_folder(folder, setting=INDUCTOR_VARIABLE)
    return _temporary_folder()


@cache
def _temporary_folder() -> Path:
    stack = ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(temporary_folder())
