"""What the transformer holds between forward and backward: planned, and kept to while it trains."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from opensora_cli.core.exceptions import HardwareError, RequestError
from opensora_cli.core.sizes import format_bytes
from opensora_cli.engine.configs import mmdit_config, transformer_on_meta
from opensora_cli.engine.sampling.packing import position_ids
from opensora_cli.engine.train.batch_shape import largest_batch_shape
from opensora_cli.memory.activations import ActivationManager
from opensora_cli.memory.checkpointing import set_grad_checkpoint
from opensora_cli.memory.dynamic_activations import DynamicActivationManager
from opensora_cli.models.mmdit.blocks import OUTPUT_LAYER, repeated_blocks
from opensora_cli.settings.train import TrainSettings, TrainTarget
from opensora_cli.settings.train_memory import ActivationOffload

# Of weights in training, and so of what goes from block to block, under autocast too.
_DTYPE = torch.float32
_OFFLOAD_ABOVE = 0.8
_SMALLER = "smaller batches need less: --set data.scenes.batch_size=N, or data.buckets"


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationPlan:
    """Which blocks are checkpointed, and where their inputs wait."""

    blocks: dict[str, int]
    """Path of each stack of blocks -> how many are checkpointed, from the first."""
    offload: ActivationOffload
    offload_above: float
    """With `dynamic`: the share of the device's memory."""
    needed_bytes: int
    """What one step puts into the buffer, at most; 0 without offload."""
    buffer_bytes: int
    """Size of the buffer."""

    def to_json(self) -> dict[str, object]:
        """Return the plan as a part of the schema `osora.train-plan/1`."""
        return {
            "checkpointed_blocks": self.blocks,
            "activation_offload": self.offload.value,
            "offload_above": self.offload_above if self.offload is ActivationOffload.DYNAMIC else None,
            "needed_bytes": self.needed_bytes,
            "buffer_bytes": self.buffer_bytes,
        }

    def line(self) -> str:
        """Return the plan for people."""
        words = [f"checkpoints in {' and '.join(f'{count} {path}' for path, count in self.blocks.items())}"]
        if self.offload is ActivationOffload.DYNAMIC:
            words.append(f"their inputs on the host above {self.offload_above:.0%} of the memory")
        elif self.offload is ActivationOffload.ALL:
            words.append("their inputs on the host")
        if self.offload is not ActivationOffload.NONE:
            words.append(f"buffer {format_bytes(self.buffer_bytes)}")
        return ", ".join(words)


def plan_activations(settings: TrainSettings) -> ActivationPlan | None:
    """Return what is held how; None: plainly, in the way of autograd.

    Raises:
        RequestError: the buffer is too small for a step, or sizes contradict each other.
    """
    memory = settings.memory
    if settings.target is not TrainTarget.MMDIT or not memory.checkpointing:
        return None
    chosen = (memory.checkpoint_double_blocks, memory.checkpoint_single_blocks)
    stacks = repeated_blocks(mmdit_config(settings.model))
    blocks = {
        stack.module_path: stack.count if count is None else count for stack, count in zip(stacks, chosen, strict=True)
    }
    needed = 0 if memory.activation_offload is ActivationOffload.NONE else _needed_bytes(settings, blocks)
    if memory.activation_buffer is not None and memory.activation_buffer < needed:
        raise RequestError(
            f"memory.activation_buffer={memory.activation_buffer} is too small for a step of "
            f"{largest_batch_shape(settings).batch_size} clips: use at least {needed}, or none",
            hint=_SMALLER,
        )
    return ActivationPlan(
        blocks=blocks,
        offload=memory.activation_offload,
        offload_above=_OFFLOAD_ABOVE if memory.offload_above is None else memory.offload_above,
        needed_bytes=needed,
        buffer_bytes=needed if memory.activation_buffer is None else memory.activation_buffer,
    )


@contextmanager
def saved_activations(module: nn.Module, plan: ActivationPlan | None) -> Iterator[ActivationManager | None]:
    """Inside the block, `module` holds its activations as planned.

    Args:
        module: the transformer.
        plan: None: nothing is done.

    Yields:
        The manager of offloaded activations, if there are any.

    Raises:
        HardwareError: the host has no memory for the buffer.
    """
    if plan is None:
        yield None
        return
    manager = _manager(plan)
    with set_grad_checkpoint(module, depth=plan.blocks, others=(OUTPUT_LAYER,), activations=manager):
        yield manager


def _manager(plan: ActivationPlan) -> ActivationManager | None:
    if plan.offload is ActivationOffload.NONE:
        return None
    dynamic = plan.offload is ActivationOffload.DYNAMIC
    manager = DynamicActivationManager(plan.offload_above) if dynamic else ActivationManager()
    try:
        manager.setup_buffer(-(-plan.buffer_bytes // _DTYPE.itemsize), _DTYPE)
    except RuntimeError as error:
        raise HardwareError(
            f"there is no host memory for a buffer of {format_bytes(plan.buffer_bytes)} (memory.activation_buffer)",
            hint=f"use --set memory.activation_offload=none; {_SMALLER}",
        ) from error
    return manager


def _needed_bytes(settings: TrainSettings, blocks: dict[str, int]) -> int:
    """Run one step's forward pass with shapes alone, and look at what it puts into the buffer."""
    model, grid, shape = settings.model, settings.vae.grid, largest_batch_shape(settings)
    batch = shape.batch_size
    manager = ActivationManager()
    manager.setup_buffer(2**60, _DTYPE, device="meta")
    transformer = transformer_on_meta(model)
    frames = grid.latent_frames(shape.num_frames)
    height, width = (side // model.patch_size for side in grid.latent_size(shape.height, shape.width))
    tokens = frames * height * width

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=_DTYPE, device="meta")

    with set_grad_checkpoint(transformer, depth=blocks, others=(OUTPUT_LAYER,), activations=manager):
        transformer(
            empty(batch, tokens, model.in_channels),
            position_ids_BN3=position_ids(batch, frames, height, width).to("meta"),
            timesteps_B=empty(batch),
            prompt_embeds_BLC=empty(batch, settings.text.t5_max_length, model.context_in_dim),
            pooled_prompt_embeds_BV=empty(batch, model.vec_in_dim),
            conditioning_BNK=(
                empty(batch, tokens, transformer.config.conditioning_channels) if model.cond_embed else None
            ),
            embedded_guidance_B=empty(batch) if model.guidance_embed else None,
        )
    return manager.peak_bytes
