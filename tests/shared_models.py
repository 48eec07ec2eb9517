"""Transformers whose work is divided between ranks, against the same in one process."""

from dataclasses import dataclass
from unittest.mock import patch

import torch.distributed as dist
from shared_tokens import mesh_of
from small_stages import small_stages

from opensora_cli.engine.components.parallelize import share_tokens
from opensora_cli.engine.generate import plan as planning
from opensora_cli.models.mmdit.blocks import repeated_blocks
from opensora_cli.models.mmdit.model import MMDiT
from opensora_cli.parallel.mesh import ParallelMesh
from opensora_cli.parallel.sequence import SequenceParallel
from opensora_cli.parallel.tensor import shard_linears
from opensora_cli.settings.generate import GenerateSettings


@dataclass(frozen=True)
class Scheme:
    """How many ranks each way of dividing has."""

    ring: int = 1
    ulysses: int = 1
    tensor: int = 1

    @property
    def ranks(self) -> int:
        return self.ring * self.ulysses * self.tensor

    def mesh(self) -> ParallelMesh:
        return mesh_of(ring=self.ring, ulysses=self.ulysses, tensor=self.tensor)


def plan_without_estimate(settings: GenerateSettings) -> planning.Plan:
    """Return the plan for what fits, without what its stages need, which takes seconds to find."""
    with patch("opensora_cli.engine.generate.plan.estimate_generation", small_stages):
        return planning.make_plan(settings)


def shard_transformer(transformer: MMDiT, group: dist.ProcessGroup) -> None:
    for stack in repeated_blocks(transformer.config):
        for block in transformer.get_submodule(stack.module_path).children():
            shard_linears(block, stack.linears, group, used_by_all_heads=stack.used_by_all_heads)


def divided(model: MMDiT, mesh: ParallelMesh) -> SequenceParallel:
    """Let a model compute with this rank's share of the weights, if any is divided, and of the tokens."""
    if mesh.shape.tensor > 1:
        shard_transformer(model, mesh.group("tensor"))
    return share_tokens(model, mesh)
