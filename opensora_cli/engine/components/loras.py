"""Adapters (Hu et al. 2021, LoRA) that are added to the transformer while videos are made.

They are computed beside the layers, whose weights stay what they are: mapped from their file, shared by all ranks, in
8 bits, or offloaded to the host's memory.
"""

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opensora_cli.checkpoint.formats.lora_file import open_adapter
from opensora_cli.checkpoint.formats.peft import adapter_files
from opensora_cli.checkpoint.lora import Adapter, LowRank
from opensora_cli.checkpoint.shards import sha256_of
from opensora_cli.checkpoint.views import rounded
from opensora_cli.core.exceptions import CheckpointError, RequestError
from opensora_cli.core.formatting import first_few, format_bytes, plain
from opensora_cli.engine.components.configs import transformer_on_meta
from opensora_cli.engine.components.lora_layers import fit_to_model, require_finite
from opensora_cli.models.linears import LowRankLinear, ShardedLinear, Split
from opensora_cli.models.mmdit import MMDiT
from opensora_cli.models.mmdit.blocks import repeated_blocks
from opensora_cli.parallel.tensor import FeatureCut
from opensora_cli.settings.components import LoraFile, ModelSettings

_IN_BLOCK = re.compile(r"(?P<stack>\w+_blocks)\.(?P<index>\d+)\.(?P<linear>.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """An adapter that fits the transformer; its tensors have not been read."""

    path: Path
    scale: float
    sha256: str
    """Of what `sha256sum` prints of its files, PEFT's configuration first."""
    updates: Mapping[str, tuple[LowRank, ...]]
    """By the paths of the linear layers."""

    @property
    def ranks(self) -> list[int]:
        """The ranks of its layers, each once, in rising order."""
        return sorted({_rank(updates) for updates in self.updates.values()})

    def line(self) -> str:
        """Return it for people."""
        rank = " to ".join(str(rank) for rank in dict.fromkeys((self.ranks[0], self.ranks[-1])))
        size = sum(part.nbytes for updates in self.updates.values() for each in updates for part in (each.a, each.b))
        return f"{self.path} x {self.scale:g}: rank {rank} in {len(self.updates)} layers, {format_bytes(size)}"


@dataclass(frozen=True, slots=True)
class LoraRanks:
    """How many rows the small matrices of each layer have, summed over all adapters."""

    by_layer: tuple[tuple[str, int], ...] = ()
    """Path of a linear layer of the transformer -> rank."""

    @classmethod
    def of(cls, loras: Iterable[Lora]) -> "LoraRanks":
        """Return those of adapters that are added to one model."""
        ranks: dict[str, int] = {}
        for lora in loras:
            for path, updates in lora.updates.items():
                ranks[path] = ranks.get(path, 0) + _rank(updates)
        return cls(tuple(sorted(ranks.items())))

    def of_one_block(self) -> "LoraRanks":
        """Return the same for a model of which the first block of each stack stands for all: the largest of each."""
        ranks: dict[str, int] = {}
        for path, rank in self.by_layer:
            first = _IN_BLOCK.sub(r"\g<stack>.0.\g<linear>", path)
            ranks[first] = max(ranks.get(first, 0), rank)
        return LoraRanks(tuple(sorted(ranks.items())))

    def in_block(self, stack: str, index: int) -> "LoraRanks":
        """Return those of one block, with paths inside it."""
        start = f"{stack}.{index}."
        inside = ((path.removeprefix(start), rank) for path, rank in self.by_layer if path.startswith(start))
        return LoraRanks(tuple(inside))

    def without(self, layers: Collection[str]) -> "LoraRanks":
        """Return those of all but some layers."""
        return LoraRanks(tuple((path, rank) for path, rank in self.by_layer if path not in layers))

    def outside_blocks(self) -> "LoraRanks":
        """Return those of layers that are in no block."""
        return LoraRanks(tuple((path, rank) for path, rank in self.by_layer if not _IN_BLOCK.fullmatch(path)))


def open_loras(files: Sequence[LoraFile], model: ModelSettings) -> tuple[Lora, ...]:
    """Open adapters and compare them with the transformer; their files are hashed, and read for NaN.

    Raises:
        CheckpointError: a file is missing or broken, is not for this transformer, or is another one than in the run
            that is repeated.
        RequestError: it is an adapter of another kind, or a name has a scale that is no number.
    """
    if not files:
        return ()
    transformer = transformer_on_meta(model)
    return tuple(_open(file, transformer) for file in files)


def open_fitting(path: Path, transformer: nn.Module) -> Adapter:
    """Open an adapter for the linear layers of a transformer, under the names of their weights.

    It raises what `open_loras` raises of one.
    """
    if not adapter_files(path)[0].exists() and adapter_files(path / "lora")[0].exists():
        raise CheckpointError(f"{path} is the folder of a run", hint=f"its adapter is below it: {path / 'lora'}")
    shapes = {name: tuple(weight.shape) for name, weight in transformer.named_parameters()}
    adapter = fit_to_model(open_adapter(path), shapes, {})
    _require_fit(
        adapter, {path: module for path, module in transformer.named_modules() if isinstance(module, nn.Linear)}
    )
    require_finite(adapter.files)
    return adapter


def _open(file: LoraFile, transformer: nn.Module) -> Lora:
    path = Path(file.path)
    _refuse_bad_scale(path)
    adapter = open_fitting(path, transformer)
    sha256 = _hash_files(adapter.files)
    if file.sha256 is not None and file.sha256 != sha256:
        raise CheckpointError(
            f"{path} has changed since the run that is repeated: its SHA-256 is {sha256[:12]}..., not "
            f"{file.sha256[:12]}...",
            hint=f"name it again to take it as it is: --lora {path}:{file.scale:g}",
        )
    updates = {name.removesuffix(".weight"): each for name, each in adapter.updates.items()}
    return Lora(path=path, scale=file.scale, sha256=sha256, updates=updates)


def _refuse_bad_scale(path: Path) -> None:
    """Refuse what looks like a scale that is no number."""
    file, colon, scale = path.name.rpartition(":")
    if colon and file and not path.exists():
        raise RequestError(
            f"--lora {plain(str(path))}: {plain(repr(scale))} is not a scale, and there is no such file",
            hint="what follows the last colon must be a number, as in :0.8",
        )


def _hash_files(files: Sequence[Path]) -> str:
    """Return the SHA-256 of what `sha256sum` prints of files in their folder."""
    lines = []
    for file in files:
        status = file.stat()
        lines.append(f"{_hash(file, status.st_size, status.st_mtime_ns)}  {file.name}\n")
    return hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


@lru_cache(maxsize=64)
def _hash(path: Path, size: int, changed_ns: int) -> str:
    # Plans are made several times for one run.
    return sha256_of(path)


def _require_fit(adapter: Adapter, layers: Mapping[str, nn.Linear]) -> None:
    if adapter.replacements:
        raise CheckpointError(
            f"{adapter.path} replaces {first_few(list(adapter.replacements))}, and is no adapter alone",
            hint=f"merge it into a file instead: osora ckpt merge-lora BASE {adapter.path} MERGED",
        )
    unknown = [path for name in adapter.updates if (path := name.removesuffix(".weight")) not in layers]
    if unknown:
        raise CheckpointError(
            f"{adapter.path} is for {len(unknown)} layers that the transformer lacks: {first_few(unknown)}",
            hint=f"osora ckpt inspect {adapter.files[-1]} lists its tensors",
        )
    misfits = []
    for name, updates in adapter.updates.items():
        layer = layers[name.removesuffix(".weight")]
        for update in updates:
            if update.transposed or not update.fits((layer.out_features, layer.in_features)):
                misfits.append(f"{name} {[layer.out_features, layer.in_features]} (adapter: {update.described})")
    if misfits:
        raise CheckpointError(f"{adapter.path} does not fit the transformer: {first_few(misfits)}")
    unfit = [name for name, updates in adapter.updates.items() if not all(map(_can_be_scaled, updates))]
    if unfit:
        raise CheckpointError(f"{adapter.path} has factors that are not of 16 bits or more: {first_few(unfit)}")


def _rank(updates: Iterable[LowRank]) -> int:
    return sum(update.a.shape[0] for update in updates)


def _can_be_scaled(update: LowRank) -> bool:
    return all(part.dtype.is_floating_point and part.dtype.itemsize > 1 for part in (update.a, update.b))


def add_loras(
    transformer: MMDiT, loras: Sequence[Lora], *, dtype: torch.dtype, group: dist.ProcessGroup | None = None
) -> None:
    """Put all adapters beside the transformer's layers, in place, where the layers' weights are.

    The transformer computes in `dtype`; its blocks may be sharded (by `shard_transformer`, over `group`), or in 8 bits.

    Raises:
        CheckpointError: a file cannot be read, or has numbers that are too large for `dtype`.
    """
    plans = _sharded_linears(transformer) if group is not None else {}
    for path, _ in LoraRanks.of(loras).by_layer:
        a_RI, b_OR = _factors([(lora, update) for lora in loras for update in lora.updates.get(path, ())])
        if group is not None and path in plans:
            cut, rank = FeatureCut.of_weight(plans[path], dist.get_world_size(group)), dist.get_rank(group)
            if plans[path].split is Split.COLUMN:
                b_OR = cut.cut(b_OR, rank)
            else:
                a_RI = cut.cut(a_RI, rank)
            # Inside what exchanges features with the others.
            path = f"{path}.linear"
        base = transformer.get_submodule(path)
        device = next(base.parameters()).device
        a_RI, b_OR = (
            rounded(factor.reshape(-1), dtype, name=f"the adapter of {path}").view(factor.shape).to(device)
            for factor in (a_RI, b_OR)
        )
        transformer.set_submodule(path, LowRankLinear(base, a_RI, b_OR))


def add_fake_loras(transformer: nn.Module, ranks: LoraRanks) -> None:
    """Put adapters without weights beside the layers of a transformer on the meta device, in place."""
    for path, rank in ranks.by_layer:
        base = transformer.get_submodule(path)
        assert isinstance(base, nn.Linear)
        weight = base.weight
        factors = weight.new_empty(rank, base.in_features), weight.new_empty(base.out_features, rank)
        transformer.set_submodule(path, LowRankLinear(base, *factors))


def factor_sizes(
    ranks: LoraRanks, block: nn.Module, linears: Sequence[ShardedLinear] = (), *, tensor: int = 1
) -> list[int]:
    """Return how many numbers each small matrix has on one of `tensor` ranks.

    `ranks` has paths inside `block`, which is of whole size; `linears` are its sharded layers.
    """
    splits = {linear.path: linear.split for linear in linears}
    sizes = []
    for path, rank in ranks.by_layer:
        layer = block.get_submodule(path)
        assert isinstance(layer, nn.Linear)
        a, b = rank * layer.in_features, rank * layer.out_features
        split = splits.get(path)
        sizes += [a // tensor if split is Split.ROW else a, b // tensor if split is Split.COLUMN else b]
    return sizes


def _factors(updates: Sequence[tuple[Lora, LowRank]]) -> tuple[Tensor, Tensor]:
    """Return A and B of all adapters of one layer, below and beside each other, in fp32; the scales are in B."""
    a_RI = torch.cat([update.a.read().float() for _, update in updates])
    b_OR = torch.cat([update.b.read().float() * (update.scale * lora.scale) for lora, update in updates], dim=1)
    return a_RI, b_OR


def _sharded_linears(transformer: MMDiT) -> dict[str, ShardedLinear]:
    return {
        f"{stack.module_path}.{index}.{linear.path}": linear
        for stack in repeated_blocks(transformer.config)
        for index in range(stack.count)
        for linear in stack.linears
    }
