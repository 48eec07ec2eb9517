"""Recipe of a transformer in training: tensor and sequence parallel, checkpointing, compile, FSDP2 (Zhao et al. 2023).

A rank holds a share of the features of each weight, and some rows of that share.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from opensora_cli.core.device import is_accelerator
from opensora_cli.engine.components.compiled import compile_blocks
from opensora_cli.engine.train.activations import ActivationPlan
from opensora_cli.memory.activations import HostActivations
from opensora_cli.memory.checkpointing import set_grad_checkpoint
from opensora_cli.models.linears import Split
from opensora_cli.models.mmdit.blocks import OUTPUT_LAYER, SEQUENCE_INPUTS, TEXT_SEQUENCE_INPUTS, repeated_blocks
from opensora_cli.models.mmdit.model import MMDiT
from opensora_cli.parallel.exchanges import TwoStages, open_stages
from opensora_cli.parallel.mesh import ParallelMesh
from opensora_cli.parallel.sequence import SequenceParallel, sequence_attention
from opensora_cli.parallel.shares import ExchangePlan, SequenceLengths
from opensora_cli.parallel.tensor import FeatureCut, shard_linears
from opensora_cli.settings.devices import Strategy
from opensora_cli.settings.train_loop import Checkpointing

WEIGHT_AXES = ("shard", "ring", "ulysses")
"""Axes that divide rows of weights between their ranks. Gradients of ranks that share tokens are also summed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLinks:
    """Process groups for a transformer. All ranks must create them at the same time, outside of fake tensors."""

    mesh: ParallelMesh
    """Mesh with `replicate` copies of weights, each divided along `WEIGHT_AXES`."""
    fsdp: DeviceMesh
    """Mesh of FSDP2, in which all axes that divide rows form one axis."""
    parts: dist.ProcessGroup
    """Group of the ranks that share one copy of the weights."""
    exchange: ExchangePlan
    stages: TwoStages | None

    @classmethod
    def open(cls, mesh: ParallelMesh, device_type: str, exchange: ExchangePlan) -> "RankLinks":
        """Create the groups of this rank."""
        rows = mesh.group(*WEIGHT_AXES)
        ranks = torch.tensor(sorted(dist.get_process_group_ranks(mesh.group("replicate", *WEIGHT_AXES))))
        if mesh.shape.replicate == 1:
            fsdp = DeviceMesh.from_group([rows], device_type, mesh=ranks, mesh_dim_names=("shard",))
        else:
            groups, shape = [mesh.group("replicate"), rows], (mesh.shape.replicate, -1)
            names = ("replicate", "shard")
            fsdp = DeviceMesh.from_group(groups, device_type, mesh=ranks.view(shape), mesh_dim_names=names)
        parts = mesh.group(*WEIGHT_AXES, "tensor")
        return cls(mesh=mesh, fsdp=fsdp, parts=parts, exchange=exchange, stages=open_stages(mesh, exchange))


def parallelize(
    transformer: MMDiT,
    links: RankLinks | None,
    *,
    device: torch.device,
    strategy: Strategy,
    dtype: torch.dtype | None,
    activations: ActivationPlan | None = None,
    compiles: bool = False,
    warn: Callable[[str], None] = lambda line: None,
    offload_states: bool = False,
) -> "Sharded":
    """Reduce a transformer to this rank's part, in place. Call `Sharded.forward` instead of it.

    A transformer on the meta device gets memory only for its part. Raises RequestError if there are more
    tensor-parallel ranks than heads.

    Args:
        links: groups of the ranks that divide the weights. None means that this process has all of them.
        dtype: dtype of gathered weights and compute; gradients are summed in fp32. None means that of the weights.
        activations: activation checkpointing of the blocks. None means no checkpoints.
        compiles: whether the blocks are compiled; `warn` is called for blocks that cannot be compiled.
        offload_states: keep weights, gradients and moments in host memory; blocks are copied to the device.
    """
    forward: Callable[..., Tensor] = transformer

    # Tensor parallel: each rank has some heads and features of every block.
    layouts = {} if links is None else cut_features(transformer, links.mesh.group("tensor"))

    # Sequence parallel: each rank has some tokens of every clip.
    if links is not None and links.mesh.shape.ring * links.mesh.shape.ulysses > 1:
        lengths = SequenceLengths.of_mesh(links.mesh)
        transformer.set_attention(
            sequence_attention(transformer.attention, links.mesh, lengths, plan=links.exchange, stages=links.stages)
        )
        forward = SequenceParallel(
            transformer,
            links.mesh.group("ring", "ulysses"),
            lengths,
            sequence_inputs=SEQUENCE_INPUTS,
            text_sequence_inputs=TEXT_SEQUENCE_INPUTS,
        )

    # Activation checkpointing: backward recomputes blocks from their inputs.
    checkpoint_blocks(transformer, activations)

    # Compile: one graph for each kind of block.
    if compiles:
        compile_blocks(transformer, warn=warn)

    # FSDP2: each rank has some rows of every weight. ZeRO-3 frees a block's weights after its forward pass, ZeRO-1 and
    # ZeRO-2 keep them until the last backward pass of an update.
    if links is None:
        return Sharded(forward, (), layouts, ())
    mesh = links.mesh
    # The model casts its inputs itself, and the rotary tables of its blocks must stay in fp32.
    precision = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=None if dtype is None else torch.float32, cast_forward_inputs=False
    )
    offload = CPUOffloadPolicy(pin_memory=is_accelerator(device)) if offload_states else OffloadPolicy()
    # FSDP2 hooks into the gradient of the result, and warns if the result is a view.
    transformer.register_forward_hook(_in_memory_of_its_own)
    stacks = [transformer.get_submodule(stack.module_path) for stack in repeated_blocks(transformer.config)]
    groups: list[FSDPModule] = []
    for module in (*(block for stack in stacks for block in stack.children()), transformer):
        group = fully_shard(
            module,
            mesh=links.fsdp,
            reshard_after_forward=strategy.gathers_twice and module is not transformer,
            mp_policy=precision,
            offload_policy=offload,
        )
        # A sum and a scaling because gloo has no mean.
        group.set_force_sum_reduction_for_comms(True)
        # Ranks that share a sample have summands of its gradient. Without divided weights, torch (2.13) divides by
        # this number anyway, and would divide twice.
        if mesh.group(*WEIGHT_AXES).size() > 1:
            group.set_gradient_divide_factor(float(mesh.shape.replicate * mesh.shape.shard))
        groups.append(group)
    if any(parameter.is_meta for parameter in transformer.parameters()):
        transformer.to_empty(device=torch.device("cpu") if offload_states else device)

    norms = [
        transformer.get_parameter(f"{stack.module_path}.{index}.{path}")
        for stack in repeated_blocks(transformer.config)
        for index, path in product(range(stack.count), stack.used_by_all_heads)
    ]
    return Sharded(forward, groups, layouts, norms if mesh.shape.tensor > 1 else [])


def checkpoint_blocks(
    transformer: nn.Module,
    plan: ActivationPlan | None,
    *,
    on_copy: Callable[[Tensor], object] = lambda copy: None,
) -> None:
    """Checkpoint the blocks of a transformer as planned. `on_copy` is called with each activation on the host."""
    if plan is None:
        return
    is_offloaded = plan.checkpointing is Checkpointing.OFFLOAD
    set_grad_checkpoint(
        transformer,
        depth=plan.checkpointed_blocks,
        others=(OUTPUT_LAYER,),
        activations=HostActivations(on_copy=on_copy) if is_offloaded else None,
        keep_attention=plan.checkpointing is Checkpointing.SELECTIVE,
    )


class WeightLayout(NamedTuple):
    """Division of one weight between ranks."""

    whole_name: str
    """Name of the weight in the model of a single process."""
    rows: int
    """Number of rows on all ranks that divide them."""
    cut: FeatureCut | None
    """Division of the features between tensor-parallel ranks. None means that all ranks have all features."""


class Sharded(NamedTuple):
    """Rank's part of a transformer."""

    forward: Callable[..., Tensor]
    groups: Sequence[FSDPModule]
    layouts: Mapping[str, WeightLayout]
    """Layout of each parameter, by its name in the sharded module."""
    norms: Sequence[nn.Parameter]
    """Weights whose gradients on a tensor-parallel rank come from its own heads only."""


def row_sizes(rows: int, ranks: int) -> tuple[int, ...]:
    """Return the number of rows of a weight on each rank. FSDP2 divides like `chunk`: the last ranks have fewer."""
    longest = -(-rows // ranks)
    return tuple(max(0, min(longest, rows - rank * longest)) for rank in range(ranks))


def cut_features(transformer: MMDiT, group: dist.ProcessGroup) -> dict[str, WeightLayout]:
    """Reduce the blocks of a transformer to this rank's heads and features; return the layout of each parameter.

    Gradients of the norms of queries and keys on a rank then come from its own heads only: see `Sharded.norms`.
    A hook that sums them would not survive FSDP2, which replaces the parameters. Raises RequestError if there are more
    ranks than heads.
    """
    ranks = dist.get_world_size(group)
    cuts: dict[str, tuple[str, FeatureCut]] = {}
    for stack in repeated_blocks(transformer.config) if ranks > 1 else ():
        for index, block in enumerate(transformer.get_submodule(stack.module_path).children()):
            shard_linears(block, stack.linears, group)
            for plan in stack.linears:
                path = f"{stack.module_path}.{index}.{plan.path}"
                cuts[f"{path}.linear.weight"] = f"{path}.weight", FeatureCut.of_weight(plan, ranks)
                if plan.split is Split.COLUMN:
                    cuts[f"{path}.linear.bias"] = f"{path}.bias", FeatureCut.of_bias(plan, ranks)
    layouts = {}
    for name, weight in transformer.named_parameters():
        whole_name, feature_cut = cuts.get(name, (name, None))
        layouts[name] = WeightLayout(whole_name, weight.shape[0], feature_cut)
    return layouts


def _in_memory_of_its_own(module: nn.Module, inputs: object, result: Tensor) -> Tensor:
    return result.clone() if result._is_view() else result
