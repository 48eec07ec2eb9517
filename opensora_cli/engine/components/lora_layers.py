"""An adapter's layers found in a model: by the names of other trainers, with q, k and v fused or split."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch

from opensora_cli.checkpoint.formats.lora_file import DOTTED_PREFIXES, KOHYA_PREFIXES
from opensora_cli.checkpoint.formats.safetensors import open_safetensors
from opensora_cli.checkpoint.lora import Adapter, LowRank
from opensora_cli.checkpoint.stream import Entry
from opensora_cli.checkpoint.views import PaddedEntry, ReorderedEntry, RowsEntry
from opensora_cli.core.dtypes import ROTARY_METADATA
from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.core.formatting import first_few
from opensora_cli.core.strict_json import shown
from opensora_cli.models.mmdit.layout import (
    QKV,
    ROTATED,
    HeadSizes,
    Rotary,
    Shape,
    find_rotary,
    head_order,
    plan_layout,
    planned_shapes,
)
from opensora_cli.models.mmdit.names import Named, Span, linear_names

_WEIGHT = ".weight"
_INPUT = "img_in.weight"


def fit_to_model(adapter: Adapter, shapes: Mapping[str, Shape], metadata: Mapping[str, str]) -> Adapter:
    """Return an adapter whose updates have the names of a model's weights, and the layout of its q, k and v.

    `shapes` are those of the model's tensors, `metadata` of its file. Names of layers are compared with those that the
    model's have here, in fused files and in diffusers, and with the same in kohya's spelling; none is taken apart.
    What is not found keeps the name that it has in its file.

    Raises:
        CheckpointError: an update has not as many rows as the layers that it is for, or its name means several.
    """
    model = _Model.of(shapes, metadata)
    updates: dict[str, tuple[LowRank, ...]] = {}
    for name, found in adapter.updates.items():
        for update in found:
            placed = model.place(name.removesuffix(_WEIGHT), update, adapter)
            for weight, part in placed or [(name, update)]:
                updates[weight] = (*updates.get(weight, ()), part)
    return replace(adapter, updates=updates)


def require_finite(files: Iterable[Path]) -> None:
    """Raise CheckpointError if a tensor of an adapter has NaN or infinite numbers: all that is made would be black."""
    for path in files:
        if path.suffix == ".json":
            continue
        status = path.stat()
        if broken := _not_finite(path, status.st_size, status.st_mtime_ns):
            raise CheckpointError(f"{path} has numbers that are not finite: {first_few(list(broken))}")


@lru_cache(maxsize=64)
def _not_finite(path: Path, size: int, changed_ns: int) -> tuple[str, ...]:
    # Plans are made several times for one run.
    entries, _ = open_safetensors(path)
    return tuple(name for name, entry in entries.items() if not _is_finite(entry))


def _is_finite(entry: Entry) -> bool:
    if not entry.dtype.is_floating_point or entry.dtype.itemsize == 1:
        return True
    return all(bool(torch.isfinite(piece).all()) for piece in entry.pieces())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    """A model's linear layers, and the names by which they are known."""

    shapes: Mapping[str, Shape]
    prefix: str
    sizes: HeadSizes | None
    rotary: Rotary
    names: Mapping[str, Named]
    spellings: Mapping[str, tuple[str, ...]]
    """Names, by what they are in underscores."""
    fused: Mapping[str, tuple[str, int]]
    """Layers of the split model -> the fused one that has their rows, and the first of these."""

    @classmethod
    def of(cls, shapes: Mapping[str, Shape], metadata: Mapping[str, str]) -> "_Model":
        sizes = HeadSizes.of_shapes(shapes)
        prefix, names, rotary = "", {}, Rotary.HALF
        if sizes is None:
            paths = [name.removesuffix(_WEIGHT) for name in shapes if name.endswith(_WEIGHT)]
            names = {path: Named((), rotary) for path in paths}
        else:
            prefix = min((name for name in shapes if name.endswith(_INPUT)), key=len).removesuffix(_INPUT)
            split = planned_shapes(plan_layout(shapes, sizes, qkv=QKV.SPLIT, reorder=False), shapes)
            rows = {
                name.removeprefix(prefix).removesuffix(_WEIGHT): shape[0]
                for name, shape in split.items()
                if name.startswith(prefix) and name.endswith(_WEIGHT) and len(shape) == 2
            }
            names, rotary = linear_names(rows, sizes.hidden_size), find_rotary(shapes, metadata)
        spellings: dict[str, tuple[str, ...]] = {}
        for name in names:
            key = name.replace(".", "_")
            spellings[key] = (*spellings.get(key, ()), name)
        fused = {
            span.layer: (name, span.source) for name, named in names.items() if named.is_fused for span in named.spans
        }
        return cls(
            shapes=shapes, prefix=prefix, sizes=sizes, rotary=rotary, names=names, spellings=spellings, fused=fused
        )

    def place(self, module: str, update: LowRank, adapter: Adapter) -> list[tuple[str, LowRank]]:
        """Return what a layer's update is to the model's weights; nothing if there is no layer of this name."""
        name = self._known(module, adapter.path)
        if name is None:
            return []
        named = self.names[name]
        stated = ROTARY_METADATA in adapter.metadata
        rotary = find_rotary((), adapter.metadata) if stated else named.rotary
        reorders = rotary is not self.rotary and any(_is_rotated(span) for span in named.spans)
        weight = f"{self.prefix}{name}{_WEIGHT}"
        if weight in self.shapes and not reorders:
            return [(weight, update)]
        if update.b.shape[0] != named.rows or update.transposed:
            raise CheckpointError(
                f"{adapter.path} does not fit the model: {shown(module)} has {named.rows} rows there "
                f"(adapter: {update.described})"
            )
        return [self._part(span, update, reorders=reorders and _is_rotated(span)) for span in named.spans]

    def _known(self, module: str, path: Path) -> str | None:
        """Return which of the names a layer in a file has."""
        name = module.removeprefix(self.prefix)
        while name not in self.names and (prefix := _first_of(DOTTED_PREFIXES, name)):
            name = name.removeprefix(prefix)
        if name in self.names:
            return name
        spelled = self.spellings.get(module.removeprefix(_first_of(KOHYA_PREFIXES, module)), ())
        if len(spelled) > 1:
            raise CheckpointError(f"{path}: {shown(module)} can mean {' or '.join(spelled)}")
        return spelled[0] if spelled else None

    def _part(self, span: Span, update: LowRank, *, reorders: bool) -> tuple[str, LowRank]:
        """Return what an update is to the weight that has the rows of `span`."""
        assert self.sizes is not None, "layers of other models have no names but their own"
        b: Entry = RowsEntry(update.b, span.source, span.source + span.count)
        if reorders:
            b = ReorderedEntry(b, head_order(self.sizes.head_dim, self.rotary))
        layer, start = span.layer, span.start
        if f"{self.prefix}{layer}{_WEIGHT}" not in self.shapes:
            layer, offset = self.fused[layer]
            start += offset
        weight = f"{self.prefix}{layer}{_WEIGHT}"
        if (rows := self.shapes[weight][0]) != span.count:
            b = PaddedEntry(b, start=start, rows=rows)
        return weight, replace(update, b=b)


def _first_of(prefixes: tuple[str, ...], name: str) -> str:
    return next((prefix for prefix in prefixes if name.startswith(prefix)), "")


def _is_rotated(span: Span) -> bool:
    return span.layer.rpartition(".")[2] in ROTATED
