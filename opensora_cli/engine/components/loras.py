"""LoRA adapters (Hu et al. 2021): opened, compared with the transformer, and added beside its layers.

A generation computes adapters beside the layers. The weights of the layers stay as they are: mapped from their file,
shared by all ranks, in 8 bits, or offloaded to the host.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opensora_cli.checkpoint.files import sha256_of
from opensora_cli.checkpoint.formats.peft import adapter_files
from opensora_cli.checkpoint.formats.safetensors import open_safetensors
from opensora_cli.checkpoint.lazy import rounded
from opensora_cli.checkpoint.lora import DOTTED_PREFIXES, KOHYA_PREFIXES, Adapter, LowRank, open_adapter, require_fit
from opensora_cli.core.choices import QKV
from opensora_cli.core.exceptions import CheckpointError, RequestError
from opensora_cli.core.formatting import first_few, format_bytes, plain, shown
from opensora_cli.engine.components.architectures import transformer_on_meta
from opensora_cli.engine.components.weights import Stamp, stamp_of
from opensora_cli.models.linears import LowRankLinear, Split
from opensora_cli.models.mmdit.blocks import repeated_blocks
from opensora_cli.models.mmdit.layout import (
    ROTATED,
    HeadSizes,
    Named,
    Shape,
    Span,
    is_fused,
    linear_names,
    plan_layout,
    planned_shapes,
    reorder_heads,
)
from opensora_cli.models.mmdit.model import MMDiT
from opensora_cli.settings.components import LoraFile, ModelSettings

_IN_BLOCK = re.compile(r"(?P<stack>\w+_blocks)\.(?P<index>\d+)\.(?P<linear>.+)")

LoraRanks = tuple[tuple[str, int], ...]
"""Path of each changed linear layer of the transformer, with its rank, summed over all adapters."""
_WEIGHT = ".weight"
_INPUT = "img_in.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """Adapter that fits the transformer; its tensors have not been read."""

    path: Path
    scale: float
    sha256: str
    """SHA-256 of the lines that `sha256sum` prints for its files, PEFT's configuration first."""
    adapter: Adapter

    @property
    def ranks(self) -> list[int]:
        """Ranks of the layers, each once, in rising order."""
        return sorted({rank for _, rank in lora_ranks([self])})

    def line(self) -> str:
        """Return the adapter as a line of text."""
        rank = " to ".join(str(rank) for rank in dict.fromkeys((self.ranks[0], self.ranks[-1])))
        updates = self.adapter.updates
        size = sum(part.nbytes for each in updates.values() for update in each for part in (update.a, update.b))
        layers = f"rank {rank} in {len(updates)} layers"
        return f"{self.path} x {self.scale:g}: {layers}, {self.adapter.scales}, {format_bytes(size)}"


def lora_ranks(loras: Iterable[Lora]) -> LoraRanks:
    """Return the ranks of adapters that are added to one model."""
    ranks: dict[str, int] = {}
    for lora in loras:
        for name, updates in lora.adapter.updates.items():
            path = name.removesuffix(".weight")
            ranks[path] = ranks.get(path, 0) + sum(update.a.shape[0] for update in updates)
    return tuple(sorted(ranks.items()))


def in_first_block(path: str) -> str:
    """Return the path of the same layer in the first block of its stack; a path outside the blocks stays."""
    return _IN_BLOCK.sub(r"\g<stack>.0.\g<linear>", path)


def open_loras(files: Sequence[LoraFile], model: ModelSettings) -> tuple[Lora, ...]:
    """Open adapters and compare them with the transformer; this hashes their files, and reads them to find NaN."""
    if not files:
        return ()
    transformer = transformer_on_meta(model)
    return tuple(_open(file, transformer) for file in files)


def _open(file: LoraFile, transformer: nn.Module) -> Lora:
    path = Path(file.path)
    name, colon, scale = path.name.rpartition(":")
    if colon and name and not path.exists():
        raise RequestError(
            f"--lora {plain(str(path))}: {plain(repr(scale))} is not a scale, and there is no such file",
            hint="what follows the last colon must be a number, as in :0.8",
        )
    adapter = open_fitting(path, transformer)
    listing = "".join(f"{_examine(each, stamp_of(each))[0]}  {each.name}\n" for each in adapter.files)
    sha256 = hashlib.sha256(listing.encode("utf-8", "surrogateescape")).hexdigest()
    if file.sha256 is not None and file.sha256 != sha256:
        raise CheckpointError(
            f"{path} has changed since the run that is repeated: its SHA-256 is {sha256[:12]}..., not "
            f"{file.sha256[:12]}...",
            hint=f"name it again to use the changed file: --lora {path}:{file.scale:g}",
        )
    return Lora(path=path, scale=file.scale, sha256=sha256, adapter=adapter)


def open_fitting(path: Path, transformer: nn.Module) -> Adapter:
    """Open an adapter for the linear layers of a transformer, with the names of their weights.

    The folder of a training stands for the adapter that it wrote at its end.
    """
    if not adapter_files(path)[0].exists() and adapter_files(path / "lora")[0].exists():
        path = path / "lora"
    shapes = {name: tuple(weight.shape) for name, weight in transformer.named_parameters()}
    linears = {f"{name}{_WEIGHT}" for name, layer in transformer.named_modules() if isinstance(layer, nn.Linear)}
    adapter = fit_to_model(open_adapter(path), shapes)
    require_fit(
        adapter,
        {name: shape for name, shape in shapes.items() if name in linears},
        hint=f"osora ckpt inspect {adapter.files[-1]} lists its tensors; osora ckpt convert --drop removes some",
    )
    require_finite(adapter.files)
    return adapter


def require_finite(files: Iterable[Path]) -> None:
    """Raise CheckpointError if a tensor of an adapter has NaN or infinite numbers: every result would be black."""
    for path in files:
        if broken := _examine(path, stamp_of(path))[1]:
            raise CheckpointError(f"{path} has numbers that are not finite: {first_few(list(broken))}")


# One run is planned several times.
@lru_cache(maxsize=64)
def _examine(path: Path, stamp: Stamp) -> tuple[str, tuple[str, ...]]:
    """Return the SHA-256 of an adapter's file with this stamp, and the names of its tensors that are not finite."""
    entries = {} if path.suffix == ".json" else open_safetensors(path)[0]
    broken = [
        name
        for name, entry in entries.items()
        if entry.dtype.is_floating_point and not torch.isfinite(entry.read().float()).all()
    ]
    return sha256_of(path), tuple(broken)


def fit_to_model(adapter: Adapter, shapes: Mapping[str, Shape]) -> Adapter:
    """Return the adapter with the names of a model's weights, and with the layout of its q, k and v.

    `shapes` are those of the model's file. Names of the adapter can be the model's own, those of fused
    files or of diffusers, or their spelling in kohya. A layer that is not found keeps its name.
    """
    model = _Model(shapes)
    updates: dict[str, tuple[LowRank, ...]] = {}
    for name, found in adapter.updates.items():
        for update in found:
            placed = model.place(name.removesuffix(_WEIGHT), update, adapter)
            for weight, part in placed or [(name, update)]:
                updates[weight] = (*updates.get(weight, ()), part)
    return replace(adapter, updates=updates)


class _Model:
    """Linear layers of a model, with all their known names."""

    def __init__(self, shapes: Mapping[str, Shape]) -> None:
        self.shapes = shapes
        self.sizes = HeadSizes.of_shapes(shapes)
        self.prefix, self.layout = "", QKV.FUSED if is_fused(shapes) else QKV.SPLIT
        if self.sizes is None:
            paths = [name.removesuffix(_WEIGHT) for name in shapes if name.endswith(_WEIGHT)]
            self.names = {path: Named((), self.layout) for path in paths}
        else:
            prefix = min((name for name in shapes if name.endswith(_INPUT)), key=len).removesuffix(_INPUT)
            split = planned_shapes(plan_layout(shapes, self.sizes, qkv=QKV.SPLIT, reorder=False), shapes)
            rows = {
                name.removeprefix(prefix).removesuffix(_WEIGHT): shape[0]
                for name, shape in split.items()
                if name.startswith(prefix) and name.endswith(_WEIGHT) and len(shape) == 2
            }
            self.prefix = prefix
            self.names = linear_names(rows, self.sizes.hidden_size)
        self.spellings: dict[str, list[str]] = {}
        """Names by their spelling with underscores."""
        for name in self.names:
            self.spellings.setdefault(name.replace(".", "_"), []).append(name)
        fused = [(name, span) for name, named in self.names.items() if named.is_fused for span in named.spans]
        self.fused = {span.layer: (name, span.source) for name, span in fused}
        """Layer of the split model -> fused layer that has its rows, and the first of these rows."""

    def place(self, module: str, update: LowRank, adapter: Adapter) -> list[tuple[str, LowRank]]:
        """Return the model's weights that an update changes, with its part for each; empty for an unknown layer."""
        name = self._known(module, adapter.path)
        if name is None:
            return []
        named = self.names[name]
        reorders = named.layout is not self.layout and any(_is_rotated(span) for span in named.spans)
        weight = f"{self.prefix}{name}{_WEIGHT}"
        if weight in self.shapes and not reorders:
            return [(weight, update)]
        if update.b.shape[0] != named.rows:
            raise CheckpointError(
                f"{adapter.path} does not fit the model: {shown(module)} has {named.rows} rows there "
                f"(adapter: {update.described})"
            )
        return [self._part(span, update, reorders=reorders and _is_rotated(span)) for span in named.spans]

    def _known(self, module: str, path: Path) -> str | None:
        """Return the known name of a layer in a file, or None."""
        name = module.removeprefix(self.prefix)
        while name not in self.names and (prefix := _first_of(DOTTED_PREFIXES, name)):
            name = name.removeprefix(prefix)
        if name in self.names:
            return name
        spelled = self.spellings.get(module.removeprefix(_first_of(KOHYA_PREFIXES, module)), [])
        if len(spelled) > 1:
            raise CheckpointError(f"{path}: {shown(module)} can mean {' or '.join(spelled)}")
        return spelled[0] if spelled else None

    def _part(self, span: Span, update: LowRank, *, reorders: bool) -> tuple[str, LowRank]:
        """Return the weight that has the rows of `span`, and the part of an update for it."""
        assert self.sizes is not None, "layers of other models have only their own names"
        first, head_dim, layout = span.source, self.sizes.head_dim, self.layout
        b = update.b.map(lambda whole: whole[first : first + span.count])
        if reorders:
            b = b.map(lambda rows: reorder_heads(rows, head_dim=head_dim, qkv=layout))
        layer, start = span.layer, span.start
        if f"{self.prefix}{layer}{_WEIGHT}" not in self.shapes:
            layer, offset = self.fused[layer]
            start += offset
        weight = f"{self.prefix}{layer}{_WEIGHT}"
        if (rows := self.shapes[weight][0]) != span.count:
            b = b.map(partial(_padded, start=start, rows=rows))
        return weight, replace(update, b=b)


def _padded(own: Tensor, *, start: int, rows: int) -> Tensor:
    """Return a tensor of `rows` rows, zero except for those of `own`, which begin at `start`."""
    whole = own.new_zeros(rows, *own.shape[1:])
    whole[start : start + len(own)] = own
    return whole


def _first_of(prefixes: tuple[str, ...], name: str) -> str:
    return next((prefix for prefix in prefixes if name.startswith(prefix)), "")


def _is_rotated(span: Span) -> bool:
    return span.layer.rpartition(".")[2] in ROTATED


def add_loras(
    transformer: MMDiT, loras: Sequence[Lora], *, dtype: torch.dtype, group: dist.ProcessGroup | None = None
) -> None:
    """Add all adapters beside the transformer's layers, which may be sharded over `group` or in 8 bits, in place."""
    sharded = {
        f"{stack.module_path}.{index}.{linear.path}": linear
        for stack in repeated_blocks(transformer.config)
        for index in range(stack.count)
        for linear in stack.linears
    }
    for path, _ in lora_ranks(loras):
        updates = [
            (update, update.scale * lora.scale)
            for lora in loras
            for update in lora.adapter.updates.get(f"{path}.weight", ())
        ]
        # The factors of all adapters, below and beside each other, in fp32.
        a_RI = torch.cat([update.a.read().float() for update, _ in updates])
        b_OR = torch.cat([update.b.read().float() * scale for update, scale in updates], dim=1)
        if group is not None and path in sharded:
            from opensora_cli.parallel.tensor import FeatureCut

            cut, rank = FeatureCut.of_weight(sharded[path], dist.get_world_size(group)), dist.get_rank(group)
            if sharded[path].split is Split.COLUMN:
                b_OR = cut.cut(b_OR, rank)
            else:
                a_RI = cut.cut(a_RI, rank)
            # The layer inside the wrapper that exchanges features with other ranks.
            path = f"{path}.linear"
        base = transformer.get_submodule(path)
        device = next(base.parameters()).device
        factors: list[Tensor] = [
            rounded(factor.reshape(-1), dtype, name=f"the adapter of {path}").view(factor.shape).to(device)
            for factor in (a_RI, b_OR)
        ]
        transformer.set_submodule(path, LowRankLinear(base, *factors))


def add_fake_loras(transformer: nn.Module, ranks: Iterable[tuple[str, int]]) -> None:
    """Add adapters without weights beside the layers of a transformer on the meta device, in place."""
    for path, rank in ranks:
        base = transformer.get_submodule(path)
        assert isinstance(base, nn.Linear)
        weight = base.weight
        factors = weight.new_empty(rank, base.in_features), weight.new_empty(base.out_features, rank)
        transformer.set_submodule(path, LowRankLinear(base, *factors))
