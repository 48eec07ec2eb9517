"""Files of pictures and videos, without torch: whether they can be read, their tags, and results with their sidecar.

A result, its JSON sidecar and its extras are written together. A sidecar alone is an unfinished result.
"""

import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from opensora_cli.core.exceptions import FileProblem, MediaError, OsoraError, OutputError
from opensora_cli.core.files import (
    atomic_path,
    flush,
    json_bytes,
    remove,
    take_name,
    temporary_beside,
    writing,
)
from opensora_cli.core.formatting import shown_path
from opensora_cli.core.reading import read_text, reading, require_file
from opensora_cli.core.signals import held_back

_MUXER_KEYS = {"major_brand", "minor_version", "compatible_brands", "encoder"}

Describe = Callable[[int], Mapping[str, object] | None]
"""Function from the `result_bytes` of media to its sidecar, with `schema` and `bytes`; None means no sidecar."""


class Extra(NamedTuple):
    """Small file beside a result."""

    path: Path
    content: bytes
    replace: bool
    """Whether an existing file of this name is replaced. Otherwise OutputError is raised."""


def media_path(path: str | os.PathLike[str], *, format: str, num_frames: int) -> Path:
    """Return the path of a result: `path`, or the folder of a PNG sequence."""
    target = Path(path)
    if format != "png" or num_frames == 1:
        return target
    return target.with_suffix("") if target.suffix.lower() == ".png" else target


def sidecar_path(media: Path) -> Path:
    """Return the file of the sidecar of a result."""
    return media.with_name(f"{media.name}.json")


def result_bytes(media: Path) -> int:
    """Return the bytes of a file, or of all files of a folder. Raises OSError if it does not exist."""
    if media.is_dir():
        return sum(entry.stat().st_size for entry in media.iterdir())
    return media.stat().st_size


def read_sidecar(sidecar: Path) -> dict[str, Any]:
    """Return a sidecar, with or without its media; empty if there is none, or another file has its name."""
    try:
        document: Any = json.loads(read_text(sidecar))
    except (OsoraError, ValueError, RecursionError):
        return {}
    if not isinstance(document, dict) or "bytes" not in document:
        return {}
    return document if str(document.get("schema")).startswith("osora.") else {}


def conflicting_file(media: Path, sidecar: Path | None) -> Path | None:
    """Return the file that a new result would replace: the media, or another file in place of the sidecar, else None.

    A sidecar without its media is an unfinished result, and does not count. Raises OutputError like `is_there`.
    """
    if is_there(media):
        return media
    return sidecar if sidecar is not None and is_there(sidecar) and not read_sidecar(sidecar) else None


def refuse_existing(media: Path, sidecar: Path | None) -> None:
    """Raise OutputError if there is a `conflicting_file`."""
    if (path := conflicting_file(media, sidecar)) is not None:
        raise OutputError(f"{path} exists already", hint="use --overwrite, or another --out")


def is_there(path: Path) -> bool:
    """Return whether a file or a link has this name. Raises OutputError if no file can have it."""
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
    """Yield a temporary name beside `media`; at the end, the file or folder there becomes `media`, with its sidecar.

    All or nothing: if one file cannot be written, the old files stay. If `describe` returns None, an old sidecar is
    removed. Without `replace`, existing files stay, even those that appear meanwhile. Without `describe`, the result
    has no sidecar and no extras. `extras` is called after `describe`.

    Raises:
        OutputError: A file cannot be written, or must not be replaced.
    """
    if describe is None:
        with atomic_path(media, replace=replace) as temporary:
            yield temporary
        return
    with temporary_beside(media) as temporary:
        yield temporary
        flush(temporary)
        num_bytes = result_bytes(temporary)
        document, sidecar = describe(num_bytes), sidecar_path(media)
        if not replace:
            refuse_existing(media, None if document is None else sidecar)
        old = read_sidecar(sidecar)
        is_replaced = replace and os.path.lexists(media)
        if is_replaced and media.is_dir() != temporary.is_dir():
            raise OutputError(f"{media} exists already, and is no result of this format", hint="choose another --out")
        # A process may be killed between two names. So the last one makes the result whole, and until then no file
        # looks like a whole result:
        # - Nothing is replaced: sidecar, extras, media. A sidecar alone is an unfinished result, which the same command
        #   finishes.
        # - Media are replaced: media, extras, sidecar. An old sidecar does not fit the new media, since it has another
        #   size. If it has the same size, that number is removed first.
        with ExitStack() as written:
            beside = partial(_written_beside, written)
            names = [(temporary, media, is_replaced)]
            names += [(beside(extra.path, extra.content), extra.path, extra.replace) for extra in extras()]
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


def _written_beside(written: ExitStack, path: Path, content: bytes) -> Path:
    unnamed = written.enter_context(temporary_beside(path))
    with writing(path):
        unnamed.write_bytes(content)
        flush(unnamed)
    return unnamed


@contextmanager
def _undone_on_error() -> Iterator[Callable[[Path, Path, bool], None]]:
    """Yield a function that gives a file its name. If the block fails, the old names return as far as possible."""
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
                elif os.path.lexists(unnamed):  # The old file, unless the system cannot swap names.
                    take_name(unnamed, target, replace=True)
        raise


def readable_file(path: str | os.PathLike[str]) -> Path:
    """Return `path`. Raises MediaError unless it is a readable file that is not empty."""
    hint = "osora reads files: download it first" if "://" in str(path) else None
    file = Path(path)
    require_file(path, problem=MediaError, hint=hint)
    with reading(path, problem=MediaError, hint=hint), file.open("rb") as stream:
        if not stream.read(1):
            raise MediaError(f"{file} is empty")
    return file


def read_tags(path: Path) -> dict[str, str]:
    """Return the tags of a result, with those of its first picture for a folder. Raises FileProblem if it is broken."""
    import av
    from PIL import Image, UnidentifiedImageError

    try:
        file = min(path.glob("frame_*.png")) if path.is_dir() else path
        try:
            with Image.open(file, formats=("PNG", "GIF")) as picture:
                if picture.format == "PNG":
                    return {key: str(value) for key, value in getattr(picture, "text", {}).items()}
                return _parsed(picture.info.get("comment", b"").decode("utf-8", "replace"))
        except UnidentifiedImageError:
            with av.open(str(file), metadata_errors="replace") as container:
                return {key: value for key, value in container.metadata.items() if key not in _MUXER_KEYS}
    except (OSError, ValueError, SyntaxError, EOFError, struct.error) as error:
        raise FileProblem(f"{shown_path(path)} cannot be read: {error}") from error


def _parsed(text: str) -> dict[str, str]:
    """Return the tags in the comment of a GIF. That of another program becomes one tag."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        document = None
    if isinstance(document, dict):
        return {str(name): str(value) for name, value in document.items()}
    return {"comment": text} if text else {}
