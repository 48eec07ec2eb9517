"""Writing weights that are derived from other weights: the checks before, the metadata, and the result."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

from pydantic import Field

import opensora_cli
from opensora_cli.checkpoint.contents import Checkpoint
from opensora_cli.checkpoint.lazy import LazyTensor
from opensora_cli.checkpoint.readable import listing_sha256, sha256_of
from opensora_cli.checkpoint.targets import check_target
from opensora_cli.checkpoint.writing import SHARD_BYTES, write_checkpoint
from opensora_cli.core.documents import Document
from opensora_cli.core.exceptions import RequestError
from opensora_cli.core.folder_lock import lock_beside, sole_run
from opensora_cli.core.formatting import format_bytes
from opensora_cli.core.progress import BYTES, Reporter
from opensora_cli.core.weight_choices import Format, Selection
from opensora_cli.engine.ckpt.layout import find_layout, is_implied_by_names
from opensora_cli.settings.ckpt import ConvertSettings, MergeLoraSettings

_SOURCE_SHA256 = "osora.source_sha256"


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """Weights to write. None of them has been read."""

    source: Checkpoint
    """Checkpoint from which the weights are derived."""
    entries: Mapping[str, LazyTensor]
    metadata: Mapping[str, str]
    settings: ConvertSettings | MergeLoraSettings

    @property
    def nbytes(self) -> int:
        """Size of the weights in bytes."""
        return sum(entry.nbytes for entry in self.entries.values())

    def lines(self) -> list[str]:
        """Return a description for people."""
        source, settings = self.source, self.settings
        kind = f"{source.form}, {source.selection} weights" if source.selection else source.form
        given = {key: " ".join(value) if isinstance(value, list) else value for key, value in settings.options.items()}
        done = ", ".join(f"{name} {value}" for name, value in given.items())
        return [
            f"source  {source.path} ({kind})",
            f"target  {settings.target} ({settings.resolved_format})",
            f"size    {len(self.entries)} tensors, {format_bytes(self.nbytes)}",
            *([f"changes {done}"] if done else []),
        ]


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

    @classmethod
    def of(cls, product: Product, *, sha256: str | None = None, files: Sequence[Path] = (), **more: Any) -> Self:
        """Describe a product; `more` are the fields that a subclass adds."""
        return cls(
            source=product.source.path,
            source_format=product.source.format,
            selection=product.source.selection,
            target=Path(product.settings.target),
            format=product.settings.resolved_format,
            tensors=len(product.entries),
            parameters=sum(entry.numel for entry in product.entries.values()),
            bytes=product.nbytes,
            options=product.settings.options,
            source_sha256=sha256,
            files=tuple(files),
            summary=tuple(product.lines()),
            **more,
        )

    def lines(self) -> list[str]:
        """Return the path of the written weights, or the plan."""
        return [str(self.target)] if self.files else list(self.summary)


def check_product(product: Product, *, sources: Sequence[Path]) -> None:
    """Check, before hours of reading, that weights can be written, and that readers will understand them.

    Raises:
        RequestError: the target would replace one of the `sources`; or the format cannot record the order of rotary
            pairs, and the names imply another.
        OutputError: the target exists already, or is too large for the disk.
    """
    settings, format = product.settings, product.settings.resolved_format
    target = Path(settings.target)
    check_target(target, format=format, overwrite=settings.overwrite, sources=sources, needed=product.nbytes)
    layout = find_layout({name: entry.shape for name, entry in product.entries.items()}, product.metadata)
    if layout is not None and not format.has_metadata and not is_implied_by_names(*layout):
        qkv, rotary = layout
        raise RequestError(
            f"{format} cannot record that rotary pairs are {rotary}, which {qkv} q, k and v do not imply",
            hint="write another format, or change the layout with --qkv or --rotary",
        )


def write(product: Product, *, reporter: Reporter) -> tuple[str | None, tuple[Path, ...]]:
    """Write a product, whole or not at all. Return the SHA-256 of the source, if it was computed, and the files.

    Raises:
        RequestError: the format does not support the name or dtype of a tensor.
        CheckpointError: a source cannot be read.
        OutputError: the target cannot be written, or another process writes it.
    """
    settings, source = product.settings, product.source
    target, format = Path(settings.target), settings.resolved_format
    problem, hint = f"another run writes {target}", "wait until it ends, or write to another name"
    with sole_run(lock_beside(target, target.name), problem=problem, hint=hint):
        for line in product.lines():
            reporter.note(line)
        if source.caveat:
            reporter.warn(source.caveat)
        if not format.has_metadata:
            reporter.warn(f"{format} has no metadata: that of the weights is left out")
        sha256 = _hash_files(source, reporter=reporter) if settings.hashing else None
        metadata = {
            **{key: text for key, text in product.metadata.items() if key != _SOURCE_SHA256},
            "osora.source": os.fspath(source.path),
            "osora.options": json.dumps(settings.options, ensure_ascii=False, sort_keys=True),
            "osora.version": opensora_cli.__version__,
            **({_SOURCE_SHA256: sha256} if sha256 else {}),
        }
        with reporter.stage("write", total=product.nbytes, unit=BYTES) as progress:
            files = write_checkpoint(
                product.entries,
                target,
                format=format,
                shard_bytes=settings.shard_size or SHARD_BYTES,
                metadata=metadata,
                overwrite=settings.overwrite,
                hash_each=partial(_hash_each, stage="hash shards", reporter=reporter) if settings.hashing else None,
                advance=progress.advance,
            )
    return sha256, files


def _hash_files(source: Checkpoint, *, reporter: Reporter) -> str:
    """Return the SHA-256 of a checkpoint's file. For several files, return the SHA-256 of the output of `sha256sum` in
    their folder, sorted by name.
    """
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
