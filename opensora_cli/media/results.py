"""A result and its JSON sidecar: they come and go together, and a sidecar alone is an unfinished result.

What is replaced gives up the name of its media first; then the new sidecar takes its name, and last the new media. So a
process that is killed between two of these steps leaves a sidecar alone, never one beside the media of another, and
never media without theirs. Needs no torch.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from opensora_cli.core.exceptions import OsoraError, OutputError
from opensora_cli.core.files import (
    atomic_path,
    flush,
    json_bytes,
    remove,
    take_name,
    temporary_beside,
    write_bytes_atomic,
)
from opensora_cli.core.left_overs import temporary_name
from opensora_cli.core.reading import read_text
from opensora_cli.core.signals import held_back

Describe = Callable[[int], Mapping[str, object] | None]
"""Returns the document of a sidecar, with `schema` and `bytes`, from the `result_bytes` of its media; None: there shall
be no sidecar."""


def sidecar_path(media: Path) -> Path:
    """Return where the sidecar of a result is."""
    return media.with_name(f"{media.name}.json")


def result_bytes(media: Path) -> int:
    """Return the bytes of a result: of a file, or of all files of a folder. Raises OSError if it is not there."""
    if media.is_dir():
        return sum(entry.stat().st_size for entry in media.iterdir())
    return media.stat().st_size


def read_sidecar(sidecar: Path) -> dict[str, Any]:
    """Return a sidecar, whose media need not be there; empty where there is none, or another file has its name."""
    try:
        document: Any = json.loads(read_text(sidecar))
    except (OsoraError, ValueError, RecursionError):
        return {}
    if not isinstance(document, dict) or "bytes" not in document:
        return {}
    return document if str(document.get("schema")).startswith("osora.") else {}


def in_the_way(media: Path, sidecar: Path | None) -> Path | None:
    """Return what a new result would replace: media, or another file in place of the sidecar; None if it is free.

    A sidecar without its media is an unfinished result, and in nobody's way. `sidecar` None: there will be none.
    Raises OutputError as `is_there`.
    """
    if is_there(media):
        return media
    return sidecar if sidecar is not None and is_there(sidecar) and not read_sidecar(sidecar) else None


def refuse_existing(media: Path, sidecar: Path | None) -> None:
    """Raise OutputError if something is `in_the_way`."""
    if (path := in_the_way(media, sidecar)) is not None:
        raise OutputError(f"{path} exists already", hint="use --overwrite, or another --out")


def is_there(path: Path) -> bool:
    """Return whether a file or a link has this name; an OutputError if none can have it."""
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    except NotADirectoryError as error:
        raise OutputError(f"cannot write {path}: a part of this path is a file", hint="choose another --out") from error
    except (OSError, ValueError) as error:
        cause = error.strerror if isinstance(error, OSError) else error
        raise OutputError(f"cannot write {path}: {cause}", hint="choose another --out") from error
    return True


@contextmanager
def published(media: Path, *, replace: bool, describe: Describe | None) -> Iterator[Path]:
    """Yield a temporary name beside `media`; on leaving, the file or folder there becomes `media`, with its sidecar.

    Both or neither: if one cannot be written, what was there before is there again. Where there shall be no sidecar, an
    old one goes. Without `replace`, what is in the way, or comes there meanwhile, is kept. Without `describe` this is a
    kind of result that never has a sidecar, and nothing but `atomic_path`.

    Raises:
        OutputError: one of them cannot be written, or must not be replaced.
    """
    if describe is None:
        with atomic_path(media, replace=replace) as temporary:
            yield temporary
        return
    sidecar = sidecar_path(media)
    with temporary_beside(media) as temporary:
        yield temporary
        flush(temporary)
        with temporary_beside(sidecar) as description:
            document = describe(result_bytes(temporary))
            if document is not None:
                description.write_bytes(json_bytes(document))
                flush(description)
            if not replace:
                refuse_existing(media, None if document is None else sidecar)
            with held_back():
                _take_names(temporary, media, description, sidecar, replace=replace)


def _take_names(temporary: Path, media: Path, description: Path, sidecar: Path, *, replace: bool) -> None:
    aside = media.with_name(temporary_name())
    before = sidecar.read_bytes() if sidecar.exists() else None
    is_replaced = replace and os.path.lexists(media)
    if is_replaced:
        if media.is_dir() != temporary.is_dir():
            raise OutputError(f"{media} exists already, and is no result of this format", hint="choose another --out")
        media.rename(aside)
    try:
        if description.exists():
            description.replace(sidecar)
        elif read_sidecar(sidecar):
            sidecar.unlink()
        take_name(temporary, media, replace=False)
    except BaseException:
        if before is None:
            sidecar.unlink(missing_ok=True)
        else:
            write_bytes_atomic(sidecar, before)
        if is_replaced:
            aside.rename(media)
        raise
    remove(aside)
