"""`osora ckpt inspect`: list the content of a checkpoint of any size, and identify its model and its layout.

A model is identified by the tensor names and shapes of the published models.
"""

import importlib.resources
import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from pydantic import Field

from opensora_cli.checkpoint.load import Shape, differences
from opensora_cli.checkpoint.lora import describe_adapter, open_adapter
from opensora_cli.checkpoint.opening import open_checkpoint
from opensora_cli.checkpoint.transforms import without_scales
from opensora_cli.core.choices import QKV, Format, Selection
from opensora_cli.core.documents import Document
from opensora_cli.core.exceptions import CheckpointError, RequestError
from opensora_cli.core.formatting import aligned_rows, first_few, format_bytes, nearest, plain
from opensora_cli.models.mmdit.layout import HeadSizes, is_fused, plan_layout, planned_shapes
from opensora_cli.settings.tools import InspectSettings


class InspectedTensor(Document):
    """Tensor of a checkpoint."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


class Inspection(Document):
    """Content of a checkpoint."""

    SCHEMA: ClassVar[str | None] = "osora.ckpt.inspect/4"

    path: Path
    format: Format
    selection: Selection | None
    selections: tuple[Selection, ...]
    files: tuple[Path, ...]
    model: str | None
    description: str | None
    qkv: QKV | None
    parameters: int
    bytes: int
    dtypes: dict[str, int]
    """Number of parameters of each dtype."""
    metadata: dict[str, str]
    tensors: tuple[InspectedTensor, ...]
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


def inspect(settings: InspectSettings) -> Inspection:
    """Inspect a checkpoint. Only names and shapes are read.

    Raises:
        RequestError: the selected weights are missing.
        CheckpointError: the checkpoint is missing or broken.
    """
    checkpoint = open_checkpoint(Path(settings.path), select=settings.select)
    entries = checkpoint.entries
    shapes = {name: entry.shape for name, entry in without_scales(entries).items()}
    identity = identify(shapes)
    parameters, nbytes = (sum(getattr(entry, name) for entry in entries.values()) for name in ("numel", "nbytes"))
    tensors = tuple(
        InspectedTensor(name=name, dtype=dtype_name(entry.dtype), shape=entry.shape, bytes=entry.nbytes)
        for name, entry in entries.items()
    )
    dtypes: Counter[str] = Counter()
    for entry in entries.values():
        dtypes[dtype_name(entry.dtype)] += entry.numel
    files = f"{len(checkpoint.files)} files" if len(checkpoint.files) > 1 else "1 file"
    summary = [f"format      {checkpoint.format}, {files}, {format_bytes(nbytes)}"]
    if checkpoint.selections:
        summary.append(f"weights     {checkpoint.selection} (there are: {', '.join(checkpoint.selections)})")
    summary.append(f"model       {identity.title if identity else 'none that is known here'}")
    if identity and identity.is_adapter:
        summary.append(f"adapter     {_describe_adapter(checkpoint.path)}")
    if identity and identity.prefix:
        summary.append(f"prefix      {plain(identity.prefix)}")
    names = f": {first_few(list(entries))}" if entries else ""
    summary += [f"tensors     {len(tensors):,}{names}", f"parameters  {parameters:,}"]
    summary += [f"{name:<11} {count:,} parameters" for name, count in dtypes.items()]
    summary += [f"metadata    {plain(key)}: {plain(text)}" for key, text in checkpoint.metadata.items()]
    return Inspection(
        path=checkpoint.path,
        format=checkpoint.format,
        selection=checkpoint.selection,
        selections=checkpoint.selections,
        files=checkpoint.files,
        model=identity.name if identity else None,
        description=identity.title if identity else None,
        qkv=None if HeadSizes.of_shapes(shapes) is None else _qkv(shapes),
        parameters=parameters,
        bytes=nbytes,
        dtypes=dict(dtypes),
        metadata=dict(checkpoint.metadata),
        tensors=tensors,
        summary=tuple(summary),
        lists_tensors=settings.all,
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


# A tensor that identifies a kind of model, and the kind. The first match decides.
_HALLMARKS = {
    "img_in.weight": "MMDiT",
    "encoder.conv_in.conv.weight": "causal video autoencoder of the Hunyuan kind",
    "encoder.project_in.conv.weight": "video autoencoder of the DC-AE kind",
    "encoder.down.0.block.0.conv1.weight": "image autoencoder of the Flux kind",
    "encoder.block.0.layer.0.SelfAttention.q.weight": "T5 text encoder",
    "embeddings.token_embedding.weight": "CLIP text encoder",
}


@dataclass(frozen=True, slots=True)
class Released:
    """Published model: its name in options, its title, and its tensors in the file's order."""

    name: str
    title: str
    shapes: Mapping[str, Shape]


def released_names() -> list[str]:
    """Return the names of all published models."""
    return sorted(path.stem for path in _released_folder().glob("*.json"))


def read_released(name: str) -> Released:
    """Return a published model.

    Raises:
        RequestError: no model has this name; the hint suggests the nearest name.
    """
    names = released_names()
    if name not in names:
        close = nearest(name, names)
        hint = f"did you mean {close}?" if close else None
        raise RequestError(f"preset={name} is not one of {', '.join(names)}", hint=hint)
    table = json.loads((_released_folder() / f"{name}.json").read_text(encoding="utf-8"))
    return Released(name, table["title"], {key: tuple(shape) for key, shape in table["tensors"].items()})


def _released_folder() -> Path:
    return Path(str(importlib.resources.files("opensora_cli") / "assets" / "released"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Identity of a checkpoint."""

    name: str | None
    """Name of the published model with these tensors, in either layout of q, k and v; None for other models."""
    title: str
    prefix: str
    """Prefix of the tensor names before the names of the published model."""
    is_adapter: bool = False


def identify(shapes: Mapping[str, Shape]) -> Identity | None:
    """Return the model with these tensor names and shapes; None for an unknown model."""
    for hallmark, kind in _HALLMARKS.items():
        holders = [key for key in shapes if key == hallmark or key.endswith(f".{hallmark}")]
        if not holders:
            continue
        prefix = min(holders, key=len).removesuffix(hallmark)
        own = {key.removeprefix(prefix): shape for key, shape in shapes.items() if key.startswith(prefix)}
        sizes = HeadSizes.of_shapes(own)
        for released in map(read_released, released_names()):
            if not differences(own, _in_layout_of(own, released.shapes)):
                title = released.title if sizes is None else f"{released.title}, {_qkv(own)} q/k/v"
                return Identity(name=released.name, title=title, prefix=prefix)
        return Identity(name=None, title=kind if sizes is None else _describe(own, sizes), prefix=prefix)
    adapter = describe_adapter(shapes)
    return Identity(name=None, title=adapter, prefix="", is_adapter=True) if adapter else None


def check(shapes: Mapping[str, Shape], released: Released) -> list[str]:
    """Return the differences of a checkpoint from a published model; both may have q, k and v fused or split."""
    problems = differences(shapes, _in_layout_of(shapes, released.shapes))
    identity = identify(shapes) if problems else None
    if identity is not None and identity.prefix:
        prefix = plain(identity.prefix)
        problems.insert(0, f"names begin with {prefix}: take it off with --rename {prefix}=")
    return problems


def _in_layout_of(shapes: Mapping[str, Shape], released: Mapping[str, Shape]) -> Mapping[str, Shape]:
    """Return the shapes of a published model in the layout of `shapes`, with q, k and v fused or split."""
    sizes = HeadSizes.of_shapes(released)
    if sizes is None:
        return released
    return planned_shapes(plan_layout(released, sizes, qkv=_qkv(shapes), reorder=False), released)


def _qkv(shapes: Mapping[str, Shape]) -> QKV:
    return QKV.FUSED if is_fused(shapes) else QKV.SPLIT


def _describe(shapes: Mapping[str, Shape], sizes: HeadSizes) -> str:
    double, single = (
        len({match[1] for key in shapes if (match := re.match(rf"{stack}_blocks\.(\d+)\.", key))})
        for stack in ("double", "single")
    )
    channels, heads = shapes["img_in.weight"][1], sizes.hidden_size // sizes.head_dim
    return (
        f"MMDiT of {double} double-stream and {single} single-stream blocks, hidden size {sizes.hidden_size}, "
        f"{heads} heads, {channels} input channels, {_qkv(shapes)} q/k/v"
    )
