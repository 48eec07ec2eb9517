"""From a plan to loaded components, shown while they load, and on the device as far as the plan allows.

Each is made without weights and filled from its mapped file, tensor by tensor.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import cast

import torch
import torch.distributed as dist
from torch import nn

from opensora_cli.checkpoint.load import load_into_module
from opensora_cli.checkpoint.opening import open_checkpoint
from opensora_cli.core.exceptions import HardwareError
from opensora_cli.core.linear_products import LinearProducts
from opensora_cli.core.progress import BYTES, Reporter
from opensora_cli.engine.components import text_encoders
from opensora_cli.engine.components.autoencoders import load_autoencoder
from opensora_cli.engine.components.configs import mmdit_config, transformer_on_meta
from opensora_cli.engine.components.hardware import OutOfMemoryError
from opensora_cli.engine.components.linear_products import use_in_block
from opensora_cli.engine.components.loras import add_loras
from opensora_cli.engine.components.parallelize import shard_block, shard_t5
from opensora_cli.engine.components.weights import Component
from opensora_cli.engine.estimate.offload import OffloadPlan
from opensora_cli.engine.generate.execution_plan import ExecutionPlan
from opensora_cli.engine.generate.stages import RunRecord
from opensora_cli.memory.eight_bit_products import ProductError
from opensora_cli.memory.fp8_storage import store_in_fp8
from opensora_cli.memory.host_memory import SharedCopies
from opensora_cli.memory.streaming import StreamingFigures, stream_blocks
from opensora_cli.models.attention import attention_backend
from opensora_cli.models.mmdit import MMDiT
from opensora_cli.models.mmdit.blocks import modulation_layers, repeated_blocks
from opensora_cli.models.mmdit.layout import Rotary, converter, find_rotary
from opensora_cli.models.text.encoders import ClipEncoder, PromptReader, T5Encoder
from opensora_cli.models.vae.autoencoder import Autoencoder
from opensora_cli.settings.enums import HostWeights, OffloadMode

Advance = Callable[[int], None]
"""Called with the bytes of each tensor as it is loaded."""


def load_t5(plan: ExecutionPlan, *, group: dist.ProcessGroup | None = None) -> T5Encoder:
    """Return the T5 encoder; with `stream_text` its layers stay on the CPU, for `streamed_layers`.

    Otherwise the ranks of `group` share its layers, if they have a head for each. A folder that is missing, incomplete
    or broken is a CheckpointError.
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


def load_clip(plan: ExecutionPlan) -> ClipEncoder:
    """Return the CLIP encoder.

    A CheckpointError if its folder is missing, incomplete or broken, a RequestError if `text.clip_max_length` is over
    what the model can read.
    """
    return text_encoders.load_clip(
        plan.weights.path(Component.CLIP),
        max_length=plan.settings.text.clip_max_length,
        device=plan.hardware.device,
        dtype=plan.hardware.dtype,
    )


def prompt_readers(plan: ExecutionPlan) -> tuple[PromptReader, PromptReader]:
    """Return how T5 and CLIP read prompts, without their weights; errors as `load_t5` and `load_clip`."""
    text = plan.settings.text
    return (
        T5Encoder.reader(plan.weights.path(Component.T5), max_length=text.t5_max_length),
        ClipEncoder.reader(plan.weights.path(Component.CLIP), max_length=text.clip_max_length),
    )


def load_transformer(
    plan: ExecutionPlan,
    *,
    group: dist.ProcessGroup | None = None,
    machine_group: dist.ProcessGroup | None = None,
    advance: Advance | None = None,
    measured: Callable[[ProductError], object] | None = None,
) -> MMDiT:
    """Return the transformer with its adapters; a file in another published layout is converted.

    Where blocks are offloaded they stay on the CPU, for `streamed_blocks`.

    Args:
        group: ranks that share each block's heads and features.
        machine_group: the ranks of this machine, which hold one copy of what is offloaded to the CPU.
        advance: called with the bytes of each tensor.
        measured: called with the error of each layer that multiplies in 8 bits.

    Raises:
        CheckpointError: the file is missing or broken, or its keys or shapes do not fit the settings; or an adapter
            cannot be read.
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

    def change(path: str) -> None:
        block = transformer.get_submodule(path)
        if group is not None:
            shard_block(block, blocks[path], group)
        if offload.linear is not LinearProducts.EXACT:
            for error in use_in_block(block, blocks[path], offload.linear, device=plan.hardware.device):
                if measured is not None:
                    measured(replace(error, path=f"{path}.{error.path}"))
        if offload.fp8_storage:
            store_in_fp8(block)
        if not streams and plan.hardware.device.type != "cpu":
            move_but(waiting_modulation(transformer, offload), block, plan.hardware.device)
        # Shares of heads and features differ from rank to rank.
        if copies is not None and group is None:
            _hold_8_bits(block, copies)

    with _shared_copies(machine_group) as copies:
        load_into_module(
            transformer,
            path,
            device=plan.hardware.device,
            dtype=plan.hardware.dtype,
            convert=converter(mmdit_config(settings), interleaved=rotary is Rotary.INTERLEAVED),
            keep_on_host=patterns + modulation if streams or changes else modulation,
            keep_dtype=patterns + modulation if _casts_later(plan) else (),
            # One after the other: the host never holds more than one that has not been changed yet.
            blocks=list(blocks) if changes else (),
            finish_block=change if changes else None,
            hold=None if copies is None else copies.hold,
            advance=advance,
        )
    add_loras(transformer, plan.loras, dtype=plan.hardware.dtype, group=group)
    prepare(transformer, plan)
    return transformer


def waiting_modulation(transformer: MMDiT, offload: OffloadPlan) -> list[nn.Module]:
    """Return the layers whose weights stay on the host, since they run before the first step alone."""
    if not offload.modulation_on_host:
        return []
    return [transformer.get_submodule(path) for path in modulation_layers(transformer.config)]


def move_but(without: Sequence[nn.Module], block: nn.Module, device: torch.device) -> None:
    """Move a block to a device, in place, but for some of its layers; modules that have these have no weights of their
    own.
    """
    if not any(part in without for part in block.modules()):
        block.to(device)
        return
    for child in block.children():
        if child not in without:
            move_but(without, child, device)


def prepare(transformer: MMDiT, plan: ExecutionPlan) -> None:
    """Give the transformer what a plan changes without other weights."""
    transformer.set_sequence_chunk(plan.offload.chunk_tokens)
    if plan.attention is not None:
        transformer.set_attention(attention_backend(plan.attention.backend))


def _casts_later(plan: ExecutionPlan) -> bool:
    """Whether blocks are cast when they are needed: on a CPU, which streams nothing else."""
    offload = plan.offload
    return plan.hardware.device.type == "cpu" and offload.mode is OffloadMode.BLOCKS and not offload.in_8_bits


@contextmanager
def _shared_copies(machine_group: dist.ProcessGroup | None) -> Iterator[SharedCopies | None]:
    if machine_group is None:
        yield None
    else:
        with SharedCopies(machine_group) as copies:
            yield copies


def _hold_8_bits(block: nn.Module, copies: SharedCopies) -> None:
    for weight in block.parameters():
        if weight.device.type == "cpu" and weight.dtype in (torch.float8_e4m3fn, torch.int8):
            weight.data = copies.hold(weight.data)


def streamed_blocks(
    plan: ExecutionPlan, transformer: MMDiT, *, source: HostWeights | None = None
) -> AbstractContextManager[StreamingFigures]:
    """Return the context in which the offloaded blocks of `load_transformer` come to the device and go again.

    The rest of the transformer is on the device. `source` is where the blocks are kept; None: as planned.
    """
    return stream_blocks(
        _stacks(transformer),
        device=plan.hardware.device,
        resident=plan.offload.resident_blocks or 1,
        source=(source or plan.offload.host_weights).value,
        dtype=plan.hardware.dtype if _casts_later(plan) else None,
        without=waiting_modulation(transformer, plan.offload),
    )


def stream(plan: ExecutionPlan, transformer: MMDiT, ends: ExitStack, reporter: Reporter) -> None:
    """Enter `streamed_blocks` until `ends` are closed, without a copy of the blocks where the host has no room for one.

    A HardwareError if the settings insist on that.
    """
    try:
        ends.enter_context(streamed_blocks(plan, transformer))
    except HardwareError as error:
        if plan.settings.memory.host_weights is not None or isinstance(error, OutOfMemoryError):
            raise
        reporter.warn(f"{error.message}: the blocks stay mapped from their file")
        ends.enter_context(streamed_blocks(plan, transformer, source=HostWeights.MAPPED))


def streamed_layers(plan: ExecutionPlan, t5: T5Encoder) -> AbstractContextManager[StreamingFigures]:
    """Return the context in which the layers of `load_t5` come to the device and go again, each for one pass."""
    return text_encoders.streamed_layers(t5, device=plan.hardware.device, dtype=plan.hardware.dtype)


def _stacks(transformer: MMDiT) -> list[nn.ModuleList]:
    paths = [stack.module_path for stack in repeated_blocks(transformer.config)]
    return [cast(nn.ModuleList, transformer.get_submodule(path)) for path in paths]


def load_vae(plan: ExecutionPlan, *, advance: Advance | None = None) -> Autoencoder:
    """Return the autoencoder; a CheckpointError for a file that is missing, broken, or does not fit the settings."""
    return load_autoencoder(
        plan.settings.vae,
        plan.weights.path(Component.VAE),
        device=plan.hardware.device,
        dtype=plan.hardware.dtype,
        advance=advance,
    )


@contextmanager
def loading(plan: ExecutionPlan, component: Component, record: RunRecord) -> Iterator[Advance]:
    """Show the loading of a file of weights as part of the stage `load`."""
    total = sum(entry.nbytes for entry in open_checkpoint(plan.weights.path(component)).entries.values())
    with record.stage("load", total=total, unit=BYTES) as progress:
        yield progress.advance
