"""LoRA adapters (Hu et al. 2021) beside the layers of a transformer.

A generation computes adapters beside the layers. The weights of the layers stay as they are: mapped from their file,
shared by all ranks, in 8 bits, or offloaded to the host.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opensora_cli.checkpoint.lazy import rounded
from opensora_cli.checkpoint.lora import Adapter
from opensora_cli.core.formatting import format_bytes
from opensora_cli.models.linears import LowRankLinear, Split
from opensora_cli.models.mmdit.blocks import repeated_blocks
from opensora_cli.models.mmdit.model import MMDiT

_IN_BLOCK = re.compile(r"(?P<stack>\w+_blocks)\.(?P<index>\d+)\.(?P<linear>.+)")

LoraRanks = tuple[tuple[str, int], ...]
"""Path of each changed linear layer of the transformer, with its rank, summed over all adapters."""


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


def add_loras(
    transformer: MMDiT, loras: Sequence[Lora], *, dtype: torch.dtype, group: dist.ProcessGroup | None = None
) -> None:
    """Add all adapters beside the transformer's layers, in place, on the device of the layers.

    The transformer computes in `dtype`. Its blocks may be sharded (by `shard_transformer`, over `group`), or in 8 bits.
    """
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
