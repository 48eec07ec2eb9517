"""`osora ckpt inspect`: list the content of a checkpoint of any size."""

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import torch
from pydantic import Field

from opensora_cli.checkpoint.fp8 import without_scales
from opensora_cli.checkpoint.lazy import LazyTensor
from opensora_cli.checkpoint.lora import open_adapter
from opensora_cli.checkpoint.opening import open_checkpoint
from opensora_cli.checkpoint.transforms import only
from opensora_cli.core.choices import Format, Selection
from opensora_cli.core.documents import Document
from opensora_cli.core.exceptions import CheckpointError, RequestError
from opensora_cli.core.formatting import aligned_rows, first_few, format_bytes, plain
from opensora_cli.core.progress import Reporter, SilentReporter
from opensora_cli.engine.ckpt.identify import Identity, identify
from opensora_cli.engine.ckpt.layout import find_layout
from opensora_cli.settings.ckpt import InspectSettings


class DtypeTotal(Document):
    """Totals of the tensors of one dtype."""

    tensors: int
    parameters: int
    bytes: int


class InspectedTensor(Document):
    """Tensor of a checkpoint."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


class Inspection(Document):
    """Content of a checkpoint."""

    SCHEMA: ClassVar[str | None] = "osora.ckpt.inspect/3"

    path: Path
    format: Format
    selection: Selection | None
    selections: tuple[Selection, ...]
    files: tuple[Path, ...]
    model: str | None
    description: str | None
    qkv: str | None
    rotary: str | None
    parameters: int
    bytes: int
    dtypes: dict[str, DtypeTotal]
    metadata: dict[str, str]
    tensors: tuple[InspectedTensor, ...]
    """Selected tensors."""
    form: str = Field(exclude=True)
    identity: Identity | None = Field(exclude=True)
    adapter: str | None = Field(exclude=True)
    """Scales of an adapter, or the reason why it cannot be added; None for other weights."""
    lists_tensors: bool = Field(exclude=True)

    def lines(self) -> list[str]:
        """Return the content for people: a summary, and the tensors in a table if they are asked for."""
        if not self.lists_tensors:
            return self.summary()
        rows = [
            (plain(tensor.name), tensor.dtype, str(list(tensor.shape)), format_bytes(tensor.bytes))
            for tensor in self.tensors
        ]
        return [*self.summary(), "", *aligned_rows(rows)]

    def summary(self) -> list[str]:
        """Return a line for each fact about the checkpoint as a whole."""
        files = f"{len(self.files)} files" if len(self.files) > 1 else "1 file"
        lines = [f"format      {self.form}, {files}, {format_bytes(self.bytes)}"]
        if self.selections:
            lines.append(f"weights     {self.selection} (there are: {', '.join(self.selections)})")
        lines.append(f"model       {self.description or 'none that is known here'}")
        if self.adapter:
            lines.append(f"adapter     {self.adapter}")
        if self.identity and self.identity.prefix:
            lines.append(f"prefix      {plain(self.identity.prefix)}")
        if self.rotary:
            lines.append(f"rotary      {self.rotary}")
        names = f": {first_few([tensor.name for tensor in self.tensors])}" if self.tensors else ""
        lines.append(f"tensors     {len(self.tensors):,}{names}")
        lines.append(f"parameters  {self.parameters:,}")
        lines += [
            f"{name:<11} {total.tensors:,} tensors, {total.parameters:,} parameters, {format_bytes(total.bytes)}"
            for name, total in self.dtypes.items()
        ]
        lines += [f"metadata    {plain(key)}: {plain(text)}" for key, text in self.metadata.items()]
        return lines


def inspect(settings: InspectSettings, *, reporter: Reporter | None = None) -> Inspection:
    """Inspect a checkpoint. Only names and shapes are read.

    Raises:
        RequestError: a pattern matches no tensor, or the selected weights are missing.
        CheckpointError: the checkpoint is missing or broken.
    """
    reporter = reporter or SilentReporter()
    checkpoint = open_checkpoint(Path(settings.path), select=settings.select)
    if checkpoint.caveat:
        reporter.warn(checkpoint.caveat)
    entries = only(checkpoint.entries, settings.only) if settings.only else dict(checkpoint.entries)
    shapes = {name: entry.shape for name, entry in without_scales(checkpoint.entries).items()}
    layout = find_layout(shapes, checkpoint.metadata)
    identity = identify(shapes)
    return Inspection(
        path=checkpoint.path,
        format=checkpoint.format,
        selection=checkpoint.selection,
        selections=checkpoint.selections,
        files=checkpoint.files,
        model=identity.name if identity else None,
        description=identity.title if identity else None,
        qkv=layout[0].value if layout else None,
        rotary=layout[1].value if layout else None,
        parameters=sum(entry.numel for entry in entries.values()),
        bytes=sum(entry.nbytes for entry in entries.values()),
        dtypes=_totals(entries),
        metadata=dict(checkpoint.metadata),
        tensors=tuple(
            InspectedTensor(name=name, dtype=dtype_name(entry.dtype), shape=entry.shape, bytes=entry.nbytes)
            for name, entry in entries.items()
        ),
        form=checkpoint.form,
        identity=identity,
        adapter=_describe_adapter(checkpoint.path) if identity and identity.is_adapter else None,
        lists_tensors=settings.all or bool(settings.only),
    )


def _describe_adapter(path: Path) -> str:
    """Return the scales of an adapter, or the reason why it cannot be added to weights."""
    try:
        return open_adapter(path).scales
    except (CheckpointError, RequestError) as error:
        return error.message


def _totals(entries: Mapping[str, LazyTensor]) -> dict[str, DtypeTotal]:
    of_dtype: dict[str, list[LazyTensor]] = {}
    for entry in entries.values():
        of_dtype.setdefault(dtype_name(entry.dtype), []).append(entry)
    return {
        name: DtypeTotal(tensors=len(own), parameters=sum(e.numel for e in own), bytes=sum(e.nbytes for e in own))
        for name, own in of_dtype.items()
    }


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype, such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")
