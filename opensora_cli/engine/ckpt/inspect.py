"""`osora ckpt inspect`: list the content of a checkpoint of any size."""

from math import prod
from pathlib import Path
from typing import ClassVar

import torch
from pydantic import Field

from opensora_cli.checkpoint.fp8 import without_scales
from opensora_cli.checkpoint.lora import open_adapter
from opensora_cli.checkpoint.opening import open_checkpoint
from opensora_cli.checkpoint.transforms import only
from opensora_cli.core.choices import Format, Selection
from opensora_cli.core.documents import Document
from opensora_cli.core.exceptions import CheckpointError, RequestError
from opensora_cli.core.formatting import aligned_rows, first_few, format_bytes, plain
from opensora_cli.core.progress import Reporter
from opensora_cli.engine.ckpt.identify import find_layout, identify
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
    summary: tuple[str, ...] = Field(exclude=True)
    """Line for each fact about the checkpoint as a whole."""
    lists_tensors: bool = Field(exclude=True)

    def lines(self) -> list[str]:
        """Return the content for people: a summary, and the tensors in a table if they are asked for."""
        rows = [
            (plain(tensor.name), tensor.dtype, str(list(tensor.shape)), format_bytes(tensor.bytes))
            for tensor in self.tensors
        ]
        return [*self.summary, "", *aligned_rows(rows)] if self.lists_tensors else [*self.summary]


def inspect(settings: InspectSettings, *, reporter: Reporter | None = None) -> Inspection:
    """Inspect a checkpoint. Only names and shapes are read.

    Raises:
        RequestError: a pattern matches no tensor, or the selected weights are missing.
        CheckpointError: the checkpoint is missing or broken.
    """
    checkpoint = open_checkpoint(Path(settings.path), select=settings.select)
    if checkpoint.caveat and reporter is not None:
        reporter.warn(checkpoint.caveat)
    entries = only(checkpoint.entries, settings.only) if settings.only else checkpoint.entries
    shapes = {name: entry.shape for name, entry in without_scales(checkpoint.entries).items()}
    layout, identity = find_layout(shapes, checkpoint.metadata), identify(shapes)
    parameters, nbytes = (sum(getattr(entry, name) for entry in entries.values()) for name in ("numel", "nbytes"))
    tensors = tuple(
        InspectedTensor(name=name, dtype=dtype_name(entry.dtype), shape=entry.shape, bytes=entry.nbytes)
        for name, entry in entries.items()
    )
    dtypes = {
        name: DtypeTotal(
            tensors=len(own), parameters=sum(prod(each.shape) for each in own), bytes=sum(each.bytes for each in own)
        )
        for name in dict.fromkeys(tensor.dtype for tensor in tensors)
        if (own := [tensor for tensor in tensors if tensor.dtype == name])
    }
    files = f"{len(checkpoint.files)} files" if len(checkpoint.files) > 1 else "1 file"
    summary = [f"format      {checkpoint.form}, {files}, {format_bytes(nbytes)}"]
    if checkpoint.selections:
        summary.append(f"weights     {checkpoint.selection} (there are: {', '.join(checkpoint.selections)})")
    summary.append(f"model       {identity.title if identity else 'none that is known here'}")
    if identity and identity.is_adapter:
        summary.append(f"adapter     {_describe_adapter(checkpoint.path)}")
    if identity and identity.prefix:
        summary.append(f"prefix      {plain(identity.prefix)}")
    if layout:
        summary.append(f"rotary      {layout[1]}")
    names = f": {first_few(list(entries))}" if entries else ""
    summary += [f"tensors     {len(tensors):,}{names}", f"parameters  {parameters:,}"]
    summary += [
        f"{name:<11} {total.tensors:,} tensors, {total.parameters:,} parameters, {format_bytes(total.bytes)}"
        for name, total in dtypes.items()
    ]
    summary += [f"metadata    {plain(key)}: {plain(text)}" for key, text in checkpoint.metadata.items()]
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
        parameters=parameters,
        bytes=nbytes,
        dtypes=dtypes,
        metadata=dict(checkpoint.metadata),
        tensors=tensors,
        summary=tuple(summary),
        lists_tensors=settings.all or bool(settings.only),
    )


def _describe_adapter(path: Path) -> str:
    """Return the scales of an adapter, or the reason why it cannot be added to weights."""
    try:
        return open_adapter(path).scales
    except (CheckpointError, RequestError) as error:
        return error.message


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype, such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")
