"""Weights that are made from other weights: `osora ckpt convert` and `osora ckpt merge-lora`."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from pydantic import Field

import opensora_cli
from opensora_cli.checkpoint.files import check_target
from opensora_cli.checkpoint.lazy import LazyTensor
from opensora_cli.checkpoint.lora import merge, open_adapter
from opensora_cli.checkpoint.opening import Checkpoint, open_checkpoint
from opensora_cli.checkpoint.transforms import FP8_DTYPES, cast, dequantize, drop, rename
from opensora_cli.checkpoint.writing import SHARD_BYTES, write_checkpoint
from opensora_cli.core.choices import QKV, Format, Selection
from opensora_cli.core.documents import Document
from opensora_cli.core.exceptions import CheckpointError, RequestError
from opensora_cli.core.formatting import first_few, format_bytes
from opensora_cli.core.progress import BYTES, Reporter, SilentReporter
from opensora_cli.engine.components.loras import fit_to_model, require_finite
from opensora_cli.models.mmdit.layout import (
    HeadSizes,
    Piece,
    is_fused,
    left_over,
    plan_layout,
    reorder_heads,
)
from opensora_cli.settings.tools import ConvertSettings, MergeLoraSettings, WeightDType

_DTYPES = {
    WeightDType.FP32: torch.float32,
    WeightDType.BF16: torch.bfloat16,
    WeightDType.FP16: torch.float16,
}


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
    files: tuple[Path, ...] = ()
    summary: tuple[str, ...] = Field(exclude=True)

    def lines(self) -> list[str]:
        """Return the path of the written weights, or the plan."""
        return [str(self.target)] if self.files else list(self.summary)


class Conversion(Derived):
    """Plan or result of a conversion."""

    SCHEMA: ClassVar[str | None] = "osora.ckpt.convert/3"


class Merge(Derived):
    """Weights with an adapter added."""

    SCHEMA: ClassVar[str | None] = "osora.ckpt.merge-lora/3"


DerivedT = TypeVar("DerivedT", bound=Derived)


def convert(settings: ConvertSettings, *, dry_run: bool = False, reporter: Reporter | None = None) -> Conversion:
    """Convert a checkpoint of any size, tensor by tensor. With `dry_run`, do only the checks that read no weights.

    The names in `drop` are those of the source. `rename`, the layout and the dtype are applied after it.

    Raises:
        RequestError: the request contradicts itself or the source.
        CheckpointError: the source is missing or broken.
        OutputError: the target exists already, is too large for the disk, or cannot be written.
    """
    source = open_checkpoint(Path(settings.source), select=settings.select)
    entries = _converted(source, settings)
    if not entries:
        raise RequestError(f"nothing of {source.path} is left to write")
    return _write(Conversion, settings, source, entries, reporter or SilentReporter(), dry_run=dry_run)


def _converted(source: Checkpoint, settings: ConvertSettings) -> dict[str, LazyTensor]:
    entries = dict(source.entries)
    dtype = None if settings.dtype is None else _DTYPES[settings.dtype]
    is_changed = bool(settings.drop or settings.rename or settings.qkv)
    if dtype is not None:
        # The first step, while every scale still has its name.
        entries = dequantize(entries, dtype)
    elif is_changed and any(entry.dtype in FP8_DTYPES for entry in entries.values()):
        raise RequestError(
            f"{source.path} has 8-bit weights, which only change together with their scales", hint="add --dtype bf16"
        )
    entries = rename(drop(entries, settings.drop), settings.rename)
    if settings.qkv is not None:
        entries = change_layout(entries, settings.qkv)
    return entries if dtype is None else cast(entries, dtype)


def change_layout(entries: Mapping[str, LazyTensor], qkv: QKV) -> dict[str, LazyTensor]:
    """Convert an MMDiT to a layout, in which it computes the same function.

    The tensors have the names of the published models with an optional prefix. Raises RequestError if the tensors
    belong to another model, and CheckpointError if the sizes of q, k and v do not fit the other tensors.
    """
    shapes = {key: entry.shape for key, entry in entries.items()}
    sizes = HeadSizes.of_shapes(shapes)
    if sizes is None:
        raise RequestError(
            f"--qkv={qkv} is for an MMDiT, and this checkpoint is none: "
            "it lacks a matching img_in.weight and norm.query_norm.scale",
            hint="osora ckpt inspect shows its tensors; --rename gives them the names of the published models",
        )
    reorder = is_fused(shapes) is not (qkv is QKV.FUSED)
    plan = plan_layout(shapes, sizes, qkv=qkv, reorder=reorder)
    wrong = left_over(plan, qkv=qkv, reorder=reorder)
    if wrong:
        raise CheckpointError(
            f"{len(wrong)} tensors of q, k and v do not fit the model's hidden_size={sizes.hidden_size} and "
            f"head_dim={sizes.head_dim}: {first_few(wrong)}"
        )
    return {
        name: _joined(name, [_taken(piece, entries[piece.key], sizes, qkv) for piece in pieces])
        for name, pieces in plan.items()
    }


def _taken(piece: Piece, entry: LazyTensor, sizes: HeadSizes, qkv: QKV) -> LazyTensor:
    part = entry if piece.stop is None else entry.map(lambda whole: whole[piece.start : piece.stop])
    if not piece.reordered:
        return part
    return part.map(lambda rows: reorder_heads(rows, head_dim=sizes.head_dim, qkv=qkv))


def _joined(name: str, parts: Sequence[LazyTensor]) -> LazyTensor:
    if len(parts) == 1:
        return parts[0]
    dtypes = {part.dtype for part in parts}
    if len(dtypes) > 1:
        raise CheckpointError(
            f"q, k and v have different dtypes and cannot become {name}: {', '.join(sorted(map(str, dtypes)))}",
            hint="give them one with --dtype",
        )
    shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    return LazyTensor(shape, parts[0].dtype, lambda: torch.cat([part.read() for part in parts]))


def merge_lora(settings: MergeLoraSettings, *, reporter: Reporter | None = None) -> Merge:
    """Write the base model with the adapter added.

    Raises:
        RequestError: the adapter is of a kind that cannot be merged, or paths contradict each other.
        CheckpointError: base or adapter are missing or broken, or don't fit each other.
        OutputError: the target exists already, is too large for the disk or cannot be written.
    """
    reporter = reporter or SilentReporter()
    base = open_checkpoint(Path(settings.base))
    shapes = {name: entry.shape for name, entry in base.entries.items()}
    adapter = fit_to_model(open_adapter(Path(settings.adapter)), shapes)
    require_finite(adapter.files)
    reporter.note(f"adapter {adapter.path}: {adapter.scales}, times --scale {settings.scale:g}")
    entries = merge(base.entries, adapter, scale=settings.scale)
    return _write(Merge, settings, base, entries, reporter, more_sources=[adapter.path])


def _write(
    kind: type[DerivedT],
    settings: ConvertSettings | MergeLoraSettings,
    source: Checkpoint,
    entries: Mapping[str, LazyTensor],
    reporter: Reporter,
    *,
    dry_run: bool = False,
    more_sources: Sequence[Path] = (),
) -> DerivedT:
    """Write weights that are derived from `source`, whole or not at all, and return their document.

    All is checked before hours of reading. With `dry_run` nothing is written.
    """
    target, format = Path(settings.target), settings.resolved_format
    nbytes = sum(entry.nbytes for entry in entries.values())
    sources = (source.path, *source.files, *more_sources)
    check_target(target, format=format, overwrite=settings.overwrite, sources=sources, needed=nbytes)
    form = f"{source.format}, {source.selection} weights" if source.selection else source.format
    summary = [
        f"source  {source.path} ({form})",
        f"target  {target} ({format})",
        f"size    {len(entries)} tensors, {format_bytes(nbytes)}",
    ]
    if settings.options:
        given = {key: " ".join(value) if isinstance(value, list) else value for key, value in settings.options.items()}
        summary.append(f"changes {', '.join(f'{name} {value}' for name, value in given.items())}")
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
        summary=tuple(summary),
    )
    if dry_run:
        return planned
    for line in summary:
        reporter.note(line)
    if source.metadata.keys() - {"format"} and not format.has_metadata:
        reporter.warn(f"{format} has no metadata: the metadata of the weights is dropped")
    noted = {
        **source.metadata,
        "osora.source": os.fspath(source.path),
        "osora.options": json.dumps(settings.options, ensure_ascii=False, sort_keys=True),
        "osora.version": opensora_cli.__version__,
    }
    with reporter.stage("write", total=nbytes, unit=BYTES) as progress:
        files = write_checkpoint(
            entries,
            target,
            format=format,
            shard_bytes=settings.shard_size or SHARD_BYTES,
            metadata=noted,
            overwrite=settings.overwrite,
            advance=progress.advance,
        )
    return planned.model_copy(update={"files": files})
