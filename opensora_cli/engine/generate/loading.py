"""Load the models of a plan from their files.

Each model is created without weights and filled from its mapped file, tensor by tensor.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import nn

from opensora_cli.checkpoint.load import load_into_module
from opensora_cli.checkpoint.opening import open_checkpoint
from opensora_cli.core.choices import LinearProducts, Rotary
from opensora_cli.engine.components import text_encoders
from opensora_cli.engine.components.architectures import mmdit_config, transformer_on_meta
from opensora_cli.engine.components.linear_products import use_in_block
from opensora_cli.engine.components.parallelize import shard_block, shard_t5
from opensora_cli.engine.components.weights import Component
from opensora_cli.engine.estimate.offload import OffloadPlan
from opensora_cli.engine.generate.plan import Plan
from opensora_cli.models.attention import BACKENDS
from opensora_cli.models.mmdit.blocks import modulation_layers, repeated_blocks
from opensora_cli.models.mmdit.layout import converter, find_rotary
from opensora_cli.models.mmdit.model import MMDiT
from opensora_cli.models.text.encoders import T5Encoder
from opensora_cli.settings.enums import HostWeights, OffloadMode

if TYPE_CHECKING:
    from opensora_cli.memory.eight_bit import ProductError
    from opensora_cli.memory.streaming import StreamingFigures


def load_t5(plan: Plan, *, group: dist.ProcessGroup | None = None) -> T5Encoder:
    """Return the T5 encoder. With `stream_text` its layers stay on the CPU, for `text_encoders.streamed_layers`.

    Otherwise the ranks of `group` share its layers, if T5 has a head for each rank. Raises CheckpointError if the
    folder is missing, incomplete or broken.
    """
    streams, device, dtype = plan.offload.stream_text, plan.hardware.device, plan.hardware.dtype
    t5 = text_encoders.load_t5(
        plan.weights.path(Component.T5),
        max_length=plan.settings.text.t5_max_length,
        device=device,
        dtype=dtype,
        layers_on_host=streams or group is not None,
    )
    if group is not None and not streams:
        if dist.get_world_size(group) <= t5.model.sizes.num_heads:
            shard_t5(t5, group)
        t5.blocks.to(device=device, dtype=dtype if text_encoders.cast_later(device, dtype) else None)
    return t5


def load_transformer(
    plan: Plan,
    *,
    group: dist.ProcessGroup | None = None,
    machine_group: dist.ProcessGroup | None = None,
    advance: Callable[[int], None] | None = None,
    measured: "Callable[[ProductError], object] | None" = None,
) -> MMDiT:
    """Return the transformer with its adapters. Files in another published layout are converted.

    Offloaded blocks stay on the CPU, for `streamed_blocks`.

    Args:
        group: ranks that share each block's heads and features.
        machine_group: ranks of this machine, which share one copy of the weights that are offloaded to the CPU.
        advance: called with the bytes of each tensor.
        measured: called with the error of each layer that multiplies in 8 bits.
    """
    settings, path, offload = plan.settings.model, plan.weights.path(Component.TRANSFORMER), plan.offload
    transformer = transformer_on_meta(settings)
    checkpoint = open_checkpoint(path)
    rotary = find_rotary(checkpoint.entries, checkpoint.metadata)
    streams = offload.mode is OffloadMode.BLOCKS
    changes = offload.in_8_bits or group is not None
    stacks = repeated_blocks(transformer.config)
    blocks = {f"{stack.module_path}.{index}": stack for stack in stacks for index in range(stack.count)}
    patterns = [f"{stack.module_path}.*" for stack in stacks]
    modulation = [f"{layer}.*" for layer in modulation_layers(transformer.config)] if offload.modulation_on_host else []
    transformer.requires_grad_(False).eval()

    with ExitStack() as ends:
        hold: Callable[[torch.Tensor], torch.Tensor] | None = None
        if machine_group is not None:
            from opensora_cli.memory.host_memory import SharedCopies

            hold = ends.enter_context(SharedCopies(machine_group)).hold

        def finish_block(path: str) -> None:
            block = transformer.get_submodule(path)
            if group is not None:
                shard_block(block, blocks[path], group)
            if offload.linear is not LinearProducts.EXACT:
                for error in use_in_block(block, blocks[path], offload.linear):
                    if measured is not None:
                        measured(replace(error, path=f"{path}.{error.path}"))
            if offload.fp8_storage:
                from opensora_cli.memory.eight_bit import store_in_fp8

                store_in_fp8(block)
            if not streams and plan.hardware.device.type != "cpu":
                move_except(host_modulation(transformer, offload), block, plan.hardware.device)
            # Ranks of a tensor-parallel group have different weights, and share no copies.
            if hold is not None and group is None:
                for weight in block.parameters():
                    if weight.device.type == "cpu" and weight.dtype in (torch.float8_e4m3fn, torch.int8):
                        weight.data = hold(weight.data)

        load_into_module(
            transformer,
            path,
            device=plan.hardware.device,
            dtype=plan.hardware.dtype,
            convert=converter(mmdit_config(settings), interleaved=rotary is Rotary.INTERLEAVED),
            keep_on_host=patterns + modulation if streams or changes else modulation,
            keep_dtype=patterns + modulation if _casts_blocks_at_use(plan) else (),
            # One block at a time: the host never holds more than one that has not been changed yet.
            blocks=list(blocks) if changes else (),
            finish_block=finish_block if changes else None,
            hold=hold,
            advance=advance,
        )
    if plan.loras:
        from opensora_cli.engine.components.loras import add_loras

        add_loras(transformer, plan.loras, dtype=plan.hardware.dtype, group=group)
    prepare(transformer, plan)
    return transformer


def prepare(transformer: MMDiT, plan: Plan) -> None:
    """Apply the parts of a plan that need no other weights: sequence chunks and attention backend."""
    transformer.set_sequence_chunk(plan.offload.chunk_tokens)
    if plan.attention is not None:
        transformer.set_attention(BACKENDS[plan.attention.backend])


def streamed_blocks(
    plan: Plan, transformer: MMDiT, *, source: HostWeights | None = None
) -> "AbstractContextManager[StreamingFigures]":
    """Return a context that copies the offloaded blocks of a transformer to the device while they are needed.

    The rest of the transformer stays on the device. `source` is the place of the blocks; None means the planned one.
    """
    from opensora_cli.memory.streaming import stream_blocks

    stacks = [stack.module_path for stack in repeated_blocks(transformer.config)]
    return stream_blocks(
        [cast(nn.ModuleList, transformer.get_submodule(path)) for path in stacks],
        device=plan.hardware.device,
        resident=plan.offload.resident_blocks or 1,
        source=(source or plan.offload.host_weights).value,
        dtype=plan.hardware.dtype if _casts_blocks_at_use(plan) else None,
        without=host_modulation(transformer, plan.offload),
    )


def host_modulation(transformer: MMDiT, offload: OffloadPlan) -> list[nn.Module]:
    """Return the modulation layers whose weights stay on the host, since they run once, before the first step."""
    if not offload.modulation_on_host:
        return []
    return [transformer.get_submodule(path) for path in modulation_layers(transformer.config)]


def move_except(excluded: Sequence[nn.Module], block: nn.Module, device: torch.device) -> None:
    """Move a block to a device in place, except some of its layers.

    Modules that contain an excluded layer must have no weights of their own.
    """
    if not any(part in excluded for part in block.modules()):
        block.to(device)
        return
    for child in block.children():
        if child not in excluded:
            move_except(excluded, child, device)


def _casts_blocks_at_use(plan: Plan) -> bool:
    """Return whether blocks are cast when they are needed, which happens on a CPU only."""
    offload = plan.offload
    return plan.hardware.device.type == "cpu" and offload.mode is OffloadMode.BLOCKS and not offload.in_8_bits
