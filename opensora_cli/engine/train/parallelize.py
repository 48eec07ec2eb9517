"""Rank's part of a module, and the recipe of a transformer: how it is divided, checkpointed and compiled (FSDP2).

A rank holds a share of the features of each weight, and some rows of that share.
"""

from collections.abc import Callable, Collection
from itertools import product
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from opensora_cli.core.device import is_accelerator
from opensora_cli.engine.components.compiled import compile_blocks
from opensora_cli.engine.components.parallelize import share_tokens
from opensora_cli.engine.train.distribution import WEIGHT_AXES, Distribution, WeightLayout, moved
from opensora_cli.memory.checkpointing import HostActivations, set_grad_checkpoint
from opensora_cli.models.linears import Split
from opensora_cli.models.mmdit.blocks import OUTPUT_LAYER, repeated_blocks
from opensora_cli.models.mmdit.model import MMDiT
from opensora_cli.parallel.tensor import FeatureCut, shard_linears
from opensora_cli.settings.train_sections import Checkpointing

if TYPE_CHECKING:
    from opensora_cli.engine.train.memory import ActivationPlan

Recipe = Callable[[MMDiT, Distribution], Callable[..., Tensor]]


def shard(
    module: nn.Module,
    ranks: Distribution,
    *,
    trained: Collection[nn.Parameter] | None = None,
    recipe: Recipe | None = None,
) -> Callable[..., Tensor]:
    """Reduce a module to this rank's part, in place and on its device; return the function to call instead of it.

    `trained` are the weights that each call uses and trains, by default all that require gradients. Raises ValueError
    if weights are divided and the module is not the only transformer.
    """
    if ranks.divides and (not isinstance(module, MMDiT) or ranks.layouts):
        raise ValueError(f"weights of one MMDiT are divided, not of a {type(module).__name__} or a second one")
    if isinstance(module, MMDiT):
        forward = (recipe or parallelize)(module, ranks)
        if ranks.divides:
            return forward
    if ranks.mesh is None:
        return moved(module, ranks.device)
    trains = [weight for weight in module.parameters() if weight.requires_grad] if trained is None else trained
    return ranks.replicate(module, trains)


def parallelize(
    transformer: MMDiT,
    ranks: Distribution,
    *,
    activations: "ActivationPlan | None" = None,
    compiles: bool = False,
    warn: Callable[[str], None] = lambda line: None,
) -> Callable[..., Tensor]:
    """Reduce a transformer to this rank's part, in place. Call the result instead of it.

    A transformer on the meta device gets memory only for its part. Without an activation plan, nothing is
    checkpointed. `warn` is called for blocks that cannot be compiled.
    Raises RequestError if there are more tensor-parallel ranks than heads.
    """
    forward: Callable[..., Tensor] = transformer

    # Tensor parallel: each rank has some heads and features of every block.
    mesh = ranks.mesh if ranks.divides else None
    if mesh is not None:
        ranks.layouts = cut_features(transformer, mesh.group("tensor"))

    # Sequence parallel: each rank has some tokens of every clip.
    if mesh is not None and mesh.shape.ring * mesh.shape.ulysses > 1:
        forward = share_tokens(transformer, mesh, ranks.token_exchange)

    # Activation checkpointing: backward recomputes blocks from their inputs.
    checkpoint_blocks(transformer, activations)

    # Compile: one graph for each kind of block.
    if compiles:
        compile_blocks(transformer, warn=warn)

    # FSDP2: each rank has some rows of every weight. ZeRO-3 frees a block's weights after its forward pass, ZeRO-1 and
    # ZeRO-2 keep them until the last backward pass of an update.
    if mesh is None:
        return forward
    # The model casts its inputs itself, and the rotary tables of its blocks must stay in fp32.
    precision = MixedPrecisionPolicy(
        param_dtype=ranks.dtype, reduce_dtype=None if ranks.dtype is None else torch.float32, cast_forward_inputs=False
    )
    offload = CPUOffloadPolicy(pin_memory=is_accelerator(ranks.device)) if ranks.offload_states else OffloadPolicy()
    # FSDP2 hooks into the gradient of the result, and warns if the result is a view.
    transformer.register_forward_hook(lambda _, __, result: result.clone() if result._is_view() else result)
    stacks = [transformer.get_submodule(stack.module_path) for stack in repeated_blocks(transformer.config)]
    groups: list[FSDPModule] = []
    for module in (*(block for stack in stacks for block in stack.children()), transformer):
        group = fully_shard(
            module,
            mesh=ranks.fsdp,
            reshard_after_forward=ranks.strategy.gathers_twice and module is not transformer,
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
        transformer.to_empty(device=torch.device("cpu") if ranks.offload_states else ranks.device)

    ranks.groups = groups
    if mesh.shape.tensor > 1:
        ranks.norms = [
            transformer.get_parameter(f"{stack.module_path}.{index}.{path}")
            for stack in repeated_blocks(transformer.config)
            for index, path in product(range(stack.count), stack.used_by_all_heads)
        ]
    return forward


def checkpoint_blocks(
    transformer: nn.Module,
    plan: "ActivationPlan | None",
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


def cut_features(transformer: MMDiT, group: dist.ProcessGroup) -> dict[str, WeightLayout]:
    """Reduce the blocks of a transformer to this rank's heads and features; return the layout of each parameter.

    Gradients of the norms of queries and keys then come from these heads only: see `Distribution.norms`.
    """
    ranks = dist.get_world_size(group)
    cuts: dict[str, tuple[str, FeatureCut]] = {}
    for stack in repeated_blocks(transformer.config) if ranks > 1 else ():
        for index, block in enumerate(transformer.get_submodule(stack.module_path).children()):
            shard_linears(block, stack.linears, group)
            for plan in stack.linears:
                path, cut = f"{stack.module_path}.{index}.{plan.path}", FeatureCut.of_weight(plan, ranks)
                cuts[f"{path}.linear.weight"] = f"{path}.weight", cut
                if plan.split is Split.COLUMN:
                    cuts[f"{path}.linear.bias"] = f"{path}.bias", cut
    layouts = {}
    for name, weight in transformer.named_parameters():
        whole_name, feature_cut = cuts.get(name, (name, None))
        layouts[name] = WeightLayout(whole_name, weight.shape[0], feature_cut)
    return layouts
