"""`osora ckpt inspect`: what is in a checkpoint, of whatever size."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from opensora_cli.checkpoint.contents import Checkpoint, Selection
from opensora_cli.checkpoint.fp8 import without_scales
from opensora_cli.checkpoint.opening import open_checkpoint
from opensora_cli.checkpoint.stream import Entry
from opensora_cli.checkpoint.transforms import only
from opensora_cli.core.formatting import format_bytes, plain
from opensora_cli.core.progress import BYTES, Reporter, SilentReporter
from opensora_cli.engine.ckpt.identify import Identity, identify
from opensora_cli.engine.ckpt.layout import find_layout
from opensora_cli.engine.ckpt.statistics import TensorStatistics
from opensora_cli.settings.ckpt import InspectSettings

SCHEMA = "osora.ckpt.inspect/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """A checkpoint, and what is to be told of its tensors."""

    checkpoint: Checkpoint
    entries: Mapping[str, Entry]
    """The tensors that were asked for."""
    statistics: Mapping[str, TensorStatistics]
    """Of these, if their data was read."""
    identity: Identity | None
    layout: tuple[str, str] | None
    """Of q, k and v and of rotary pairs, for an MMDiT."""

    @property
    def parameters(self) -> int:
        """How many numbers the tensors have."""
        return sum(entry.numel for entry in self.entries.values())

    @property
    def nbytes(self) -> int:
        """Size of the tensors."""
        return sum(entry.nbytes for entry in self.entries.values())

    @property
    def by_dtype(self) -> dict[str, tuple[int, int, int]]:
        """Tensors, numbers and bytes of each dtype."""
        totals: dict[str, tuple[int, int, int]] = {}
        for entry in self.entries.values():
            tensors, numbers, nbytes = totals.get(name := dtype_name(entry.dtype), (0, 0, 0))
            totals[name] = (tensors + 1, numbers + entry.numel, nbytes + entry.nbytes)
        return totals

    def to_json(self) -> dict[str, object]:
        """Return it as a document of the schema `osora.ckpt.inspect/1`."""
        checkpoint = self.checkpoint
        return {
            "schema": SCHEMA,
            "path": str(checkpoint.path),
            "format": checkpoint.format.value,
            "selection": checkpoint.selection.value if checkpoint.selection else None,
            "selections": [selection.value for selection in checkpoint.selections],
            "files": [str(file) for file in checkpoint.files],
            "model": self.identity.name if self.identity else None,
            "description": self.identity.title if self.identity else None,
            "qkv": self.layout[0] if self.layout else None,
            "rotary": self.layout[1] if self.layout else None,
            "parameters": self.parameters,
            "bytes": self.nbytes,
            "dtypes": {
                name: {"tensors": tensors, "parameters": numbers, "bytes": nbytes}
                for name, (tensors, numbers, nbytes) in self.by_dtype.items()
            },
            "metadata": dict(checkpoint.metadata),
            "tensors": [self._tensor_to_json(name, entry) for name, entry in self.entries.items()],
        }

    def lines(self) -> list[str]:
        """Return it for people: the tensors in a table, then what they are together."""
        return [*self._table(), "", *self._summary(), *self._findings()]

    def _tensor_to_json(self, name: str, entry: Entry) -> dict[str, object]:
        statistics = self.statistics.get(name)
        return {
            "name": name,
            "dtype": dtype_name(entry.dtype),
            "shape": list(entry.shape),
            "bytes": entry.nbytes,
            **({"statistics": statistics.to_json()} if statistics else {}),
        }

    def _table(self) -> list[str]:
        rows = [
            [plain(name), dtype_name(entry.dtype), str(list(entry.shape)), format_bytes(entry.nbytes)]
            + ([_figures(self.statistics[name])] if name in self.statistics else [])
            for name, entry in self.entries.items()
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]

    def _summary(self) -> list[str]:
        checkpoint = self.checkpoint
        files = f"{len(checkpoint.files)} files" if len(checkpoint.files) > 1 else "1 file"
        lines = [f"format      {checkpoint.form}, {files}"]
        if checkpoint.selections:
            lines.append(f"weights     {checkpoint.selection} (there are: {', '.join(checkpoint.selections)})")
        lines.append(f"model       {self.identity.title if self.identity else 'none that is known here'}")
        if self.identity and self.identity.prefix:
            lines.append(f"prefix      {plain(self.identity.prefix)}")
        if self.layout:
            lines.append(f"rotary      {self.layout[1]}")
        lines.append(f"tensors     {len(self.entries):,}")
        lines.append(f"parameters  {self.parameters:,}")
        lines += [
            f"{name:<11} {tensors:,} tensors, {numbers:,} parameters, {format_bytes(nbytes)}"
            for name, (tensors, numbers, nbytes) in self.by_dtype.items()
        ]
        lines += [f"metadata    {plain(key)}: {plain(text)}" for key, text in checkpoint.metadata.items()]
        return lines

    def _findings(self) -> list[str]:
        found = [
            *(f"not finite  {plain(name)}" for name, each in self.statistics.items() if not each.is_finite),
            *(f"all zero    {plain(name)}" for name, each in self.statistics.items() if each.is_all_zero),
        ]
        return found if found or not self.statistics else ["not finite  none", "all zero    none"]


def inspect(settings: InspectSettings, *, reporter: Reporter | None = None) -> Inspection:
    """Look into a checkpoint. Nothing but names and shapes is read, unless statistics are asked for.

    Raises:
        RequestError: a pattern matches no tensor, or there are no such weights to select.
        CheckpointError: the checkpoint is missing or broken.
    """
    reporter = reporter or SilentReporter()
    selection = None if settings.select is None else Selection(settings.select)
    checkpoint = open_checkpoint(Path(settings.path), select=selection)
    if checkpoint.caveat:
        reporter.warn(checkpoint.caveat)
    entries = only(checkpoint.entries, settings.only) if settings.only else dict(checkpoint.entries)
    statistics = {}
    if settings.stats:
        total = sum(entry.nbytes for entry in entries.values())
        with reporter.stage("read", total=total, unit=BYTES) as progress:
            statistics = {name: TensorStatistics.of(entry, advance=progress.advance) for name, entry in entries.items()}
    shapes = {name: entry.shape for name, entry in without_scales(checkpoint.entries).items()}
    layout = find_layout(shapes, checkpoint.metadata)
    return Inspection(
        checkpoint=checkpoint,
        entries=entries,
        statistics=statistics,
        identity=identify(shapes),
        layout=None if layout is None else (layout[0].value, layout[1].value),
    )


def dtype_name(dtype: torch.dtype) -> str:
    """Return what torch calls a dtype: `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def _figures(statistics: TensorStatistics) -> str:
    parts = []
    if statistics.smallest is not None:
        parts.append(f"{statistics.smallest:.4g} to {statistics.largest:.4g}, mean {statistics.mean:.4g}")
    if statistics.nan:
        parts.append(f"{statistics.nan:,} NaN")
    if statistics.infinite:
        parts.append(f"{statistics.infinite:,} infinite")
    return ", ".join(parts)
