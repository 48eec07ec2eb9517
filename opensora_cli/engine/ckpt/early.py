"""Checks of a request to write weights, before torch is imported."""

import os
from collections.abc import Sequence
from pathlib import Path

from opensora_cli.checkpoint.contents import Format
from opensora_cli.checkpoint.targets import check_target
from opensora_cli.core.exceptions import OutputError, RequestError
from opensora_cli.core.files import require_there
from opensora_cli.core.reading import reading
from opensora_cli.settings.ckpt import WriteSettings


def refuse_early(sources: Sequence[str], settings: WriteSettings) -> None:
    """Refuse invalid paths of a request. Later checks repeat this with more information.

    Raises:
        FileProblem: a source is missing.
        RequestError: the target is a source, inside of one, or around one.
        OutputError: the target exists already, or cannot be written.
    """
    require_there(*sources)
    check_paths([Path(source) for source in sources], settings)
    check_target(Path(settings.target), format=Format(settings.resolved_format), needed=0, overwrite=settings.overwrite)


def check_paths(sources: Sequence[Path], settings: WriteSettings) -> None:
    """Refuse a target that would replace a source, or be written into one.

    Raises:
        RequestError: the target is a source, inside of one, or around one.
        OutputError: the target is no valid file name.
    """
    target = Path(settings.target)
    for source in sources:
        _check_path(target, source)


def _check_path(target: Path, source: Path) -> None:
    with reading(target, problem=OutputError):
        here, there = Path(os.path.realpath(target)), Path(os.path.realpath(source))
        is_source = here == there or (os.path.exists(target) and os.path.samefile(target, source))
    if is_source:
        raise RequestError(f"{target} is what is read", hint="write to another name")
    if there in here.parents:
        raise RequestError(f"{target} is inside of {source}, which is read", hint="write to another folder")
    if here in there.parents:
        raise RequestError(f"{target} holds {source}, which is read", hint="write to another folder")
