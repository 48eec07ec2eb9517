"""Writing weights that are derived from other weights: the checks before, the metadata, and the result."""

import json
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field

import opensora_cli
from opensora_cli.checkpoint.contents import Checkpoint
from opensora_cli.checkpoint.lazy import LazyTensor
from opensora_cli.checkpoint.readable import listing_sha256, sha256_of
from opensora_cli.checkpoint.targets import check_target
from opensora_cli.checkpoint.writing import SHARD_BYTES, write_checkpoint
from opensora_cli.core.choices import Format, Selection
from opensora_cli.core.documents import Document
from opensora_cli.core.exceptions import RequestError
from opensora_cli.core.formatting import format_bytes
from opensora_cli.core.locks import lock_beside, sole_run
from opensora_cli.core.progress import BYTES, Reporter
from opensora_cli.engine.ckpt.layout import find_layout, is_implied_by_names
from opensora_cli.settings.ckpt import ConvertSettings, MergeLoraSettings

_SOURCE_SHA256 = "osora.source_sha256"


class Derived(Document):
    """Derived weights: the plan or, with files, the result."""

    source: Path
    source_format: Format
    selection: Selection | None
    target: Path
    format: Format
    tensors: int
    parameters: int
    bytes: int
    options: dict[str, Any]
    source_sha256: str | None
    """SHA-256 of the source's file. For several files: of the output of `sha256sum` in their folder, sorted by name."""
    files: tuple[Path, ...]
    summary: tuple[str, ...] = Field(exclude=True)

    def lines(self) -> list[str]:
        """Return the path of the written weights, or the plan."""
        return [str(self.target)] if self.files else list(self.summary)


DerivedT = TypeVar("DerivedT", bound=Derived)


def write_derived(
    kind: type[DerivedT],
    settings: ConvertSettings | MergeLoraSettings,
    source: Checkpoint,
    entries: Mapping[str, LazyTensor],
    metadata: Mapping[str, str],
    *,
    reporter: Reporter,
    dry_run: bool = False,
    more_sources: Sequence[Path] = (),
    **more: Any,
) -> DerivedT:
    """Write weights that are derived from `source`, whole or not at all, and return their document.

    All is checked before hours of reading. With `dry_run` nothing is written. `more` are the fields that `kind` adds.

    Raises:
        RequestError: the target would replace a source, or the format supports neither the name or dtype of a tensor
            nor the order of rotary pairs.
        CheckpointError: a source cannot be read.
        OutputError: the target exists already, cannot be written or is too large for the disk, or another process
            writes it.
    """
    target, format = Path(settings.target), settings.resolved_format
    nbytes = sum(entry.nbytes for entry in entries.values())
    sources = (source.path, *source.files, *more_sources)
    check_target(target, format=format, overwrite=settings.overwrite, sources=sources, needed=nbytes)
    layout = find_layout({name: entry.shape for name, entry in entries.items()}, metadata)
    if layout is not None and not format.has_metadata and not is_implied_by_names(*layout):
        qkv, rotary = layout
        raise RequestError(
            f"{format} cannot record that rotary pairs are {rotary}, which {qkv} q, k and v do not imply",
            hint="write another format, or change the layout with --qkv or --rotary",
        )
    form = f"{source.form}, {source.selection} weights" if source.selection else source.form
    given = {key: " ".join(value) if isinstance(value, list) else value for key, value in settings.options.items()}
    planned = kind(
        source=source.path,
        source_format=source.format,
        selection=source.selection,
        target=target,
        format=format,
        tensors=len(entries),
        parameters=sum(entry.numel for entry in entries.values()),
        bytes=nbytes,
        options=settings.options,
        source_sha256=None,
        files=(),
        summary=(
            f"source  {source.path} ({form})",
            f"target  {target} ({format})",
            f"size    {len(entries)} tensors, {format_bytes(nbytes)}",
            *([f"changes {', '.join(f'{name} {value}' for name, value in given.items())}"] if given else []),
        ),
        **more,
    )
    if dry_run:
        return planned
    problem, hint = f"another run writes {target}", "wait until it ends, or write to another name"
    with sole_run(lock_beside(target, target.name), problem=problem, hint=hint):
        for line in planned.summary:
            reporter.note(line)
        if source.caveat:
            reporter.warn(source.caveat)
        if not format.has_metadata:
            reporter.warn(f"{format} has no metadata: that of the weights is left out")
        sha256 = _hash_source(source, reporter=reporter) if settings.hashing else None
        noted = {
            **{key: text for key, text in metadata.items() if key != _SOURCE_SHA256},
            "osora.source": os.fspath(source.path),
            "osora.options": json.dumps(settings.options, ensure_ascii=False, sort_keys=True),
            "osora.version": opensora_cli.__version__,
            **({_SOURCE_SHA256: sha256} if sha256 else {}),
        }
        with reporter.stage("write", total=nbytes, unit=BYTES) as progress:
            files = write_checkpoint(
                entries,
                target,
                format=format,
                shard_bytes=settings.shard_size or SHARD_BYTES,
                metadata=noted,
                overwrite=settings.overwrite,
                hash_each=partial(_hash_each, stage="hash shards", reporter=reporter) if settings.hashing else None,
                advance=progress.advance,
            )
    return planned.model_copy(update={"source_sha256": sha256, "files": files})


def _hash_source(source: Checkpoint, *, reporter: Reporter) -> str:
    """Return `Derived.source_sha256`."""
    folder = source.path if source.path.is_dir() else source.path.parent
    files = sorted((Path(os.path.relpath(file, folder)).as_posix(), file) for file in source.files)
    hashes = _hash_each([path for _, path in files], stage="hash", reporter=reporter)
    if len(hashes) == 1:
        return hashes[0]
    return listing_sha256({name: digest for (name, _), digest in zip(files, hashes, strict=True)})


def _hash_each(files: Sequence[Path], *, stage: str, reporter: Reporter) -> list[str]:
    """Return the SHA-256 of each file, and report the progress under the name `stage`."""
    with reporter.stage(stage, total=sum(path.stat().st_size for path in files), unit=BYTES) as progress:
        return [sha256_of(path, advance=progress.advance) for path in files]
