"""A result, its JSON sidecar and its extras: they come together, and a sidecar alone is an unfinished result.

Needs no torch.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from opensora_cli.core.exceptions import OsoraError, OutputError
from opensora_cli.core.files import (
    atomic_path,
    flush,
    json_bytes,
    remove,
    take_name,
    temporary_beside,
    writing,
)
from opensora_cli.core.reading import read_text
from opensora_cli.core.signals import held_back

Describe = Callable[[int], Mapping[str, object] | None]
"""Returns the document of a sidecar, with `schema` and `bytes`, from the `result_bytes` of its media; None: there shall
be no sidecar."""


class Extra(NamedTuple):
    """A small file that is kept beside a result."""

    path: Path
    content: bytes
    replace: bool
    """Whether a file that has its name is replaced; else that is an OutputError."""


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
def published(
    media: Path, *, replace: bool, describe: Describe | None, extras: Callable[[], Sequence[Extra]] = tuple
) -> Iterator[Path]:
    """Yield a temporary name beside `media`; on leaving, the file or folder there becomes `media`, with its sidecar.

    All or nothing: if one file cannot be written, what was there before is there again. Where there shall be no
    sidecar, an old one goes. Without `replace`, what is in the way, or comes there meanwhile, is kept. Without
    `describe` this is a kind of result that never has a sidecar, and nothing but `atomic_path`. `extras` is called
    after `describe`.

    Raises:
        OutputError: one of them cannot be written, or must not be replaced.
    """
    if describe is None:
        with atomic_path(media, replace=replace) as temporary:
            yield temporary
        return
    with temporary_beside(media) as temporary:
        yield temporary
        flush(temporary)
        num_bytes = result_bytes(temporary)
        document = describe(num_bytes)
        if not replace:
            refuse_existing(media, None if document is None else sidecar_path(media))
        with ExitStack() as written:
            _publish(temporary, media, num_bytes, document, extras(), written, replace=replace)


def _publish(
    temporary: Path,
    media: Path,
    num_bytes: int,
    document: Mapping[str, object] | None,
    extras: Sequence[Extra],
    written: ExitStack,
    *,
    replace: bool,
) -> None:
    """Give all files their names.

    A process may be killed between two of them, so the last one makes the result whole, and until then nothing that is
    there looks like a whole result that it is not:

    - Nothing is replaced: sidecar, extras, media. A sidecar alone is an unfinished result, and the same command
      finishes it.
    - Media are replaced: media, extras, sidecar. The old result is whole until the new media are. An old sidecar does
      not fit the new media, since it gives another size; where it gives the same one, it loses that number first.
    """

    def beside(path: Path, content: bytes) -> Path:
        unnamed = written.enter_context(temporary_beside(path))
        with writing(path):
            unnamed.write_bytes(content)
            flush(unnamed)
        return unnamed

    sidecar = sidecar_path(media)
    old = read_sidecar(sidecar)
    is_replaced = replace and os.path.lexists(media)
    if is_replaced and media.is_dir() != temporary.is_dir():
        raise OutputError(f"{media} exists already, and is no result of this format", hint="choose another --out")
    names = [(temporary, media, is_replaced)]
    names += [(beside(extra.path, extra.content), extra.path, extra.replace) for extra in extras]
    if document is not None:
        names.append((beside(sidecar, json_bytes(document)), sidecar, True))
    if not is_replaced:
        names.reverse()
    if old.get("bytes") == num_bytes and (is_replaced or document is None):
        names.insert(0, (beside(sidecar, json_bytes({**old, "bytes": None})), sidecar, True))
    with held_back(), _undone_on_error() as take:
        for unnamed, target, may_replace in names:
            take(unnamed, target, may_replace)
        if old and document is None:
            with writing(sidecar):
                sidecar.unlink()


@contextmanager
def _undone_on_error() -> Iterator[Callable[[Path, Path, bool], None]]:
    """Yield what gives a file its name; if the block fails, all names are as before, where the system allows it."""
    taken: list[tuple[Path, Path, bool]] = []

    def take(unnamed: Path, target: Path, replace: bool) -> None:
        was_there = os.path.lexists(target)
        with writing(target):
            take_name(unnamed, target, replace=replace, swap=True)
        taken.append((unnamed, target, was_there))

    try:
        yield take
    except BaseException:
        for unnamed, target, was_there in reversed(taken):
            with suppress(OSError):
                if not was_there:
                    remove(target)
                elif os.path.lexists(unnamed):  # now the name of the old one; where names cannot be swapped it is gone
                    take_name(unnamed, target, replace=True)
        raise
