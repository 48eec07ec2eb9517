"""Activations of the transformer between forward and backward, planned for the largest micro-batch."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import torch
from pydantic import ConfigDict, Field
from torch import nn

from opensora_cli.core.documents import Document
from opensora_cli.core.exceptions import HardwareError, RequestError
from opensora_cli.core.formatting import format_bytes
from opensora_cli.data.batches import ClipBatch
from opensora_cli.engine.components.configs import mmdit_config, transformer_on_meta
from opensora_cli.engine.encode.datasets import pixel_multiple
from opensora_cli.engine.train.objectives.base import find_objective
from opensora_cli.engine.train.precision import DTYPES
from opensora_cli.engine.train.transformer import weights_dtype
from opensora_cli.memory.activations import ActivationManager
from opensora_cli.memory.checkpointing import set_grad_checkpoint
from opensora_cli.models.mmdit.blocks import OUTPUT_LAYER, repeated_blocks
from opensora_cli.sampling.sizes import training_sizes
from opensora_cli.settings.train import TrainSettings
from opensora_cli.settings.train_loop import Checkpointing


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """Number and size of the clips in a micro-batch."""

    batch_size: int
    num_frames: int
    height: int
    width: int

    def token_grid(self, settings: TrainSettings) -> tuple[int, int, int]:
        """Return the frames, rows and columns of a clip's tokens."""
        grid, patch = settings.vae.grid, settings.model.patch_size
        height, width = grid.latent_size(self.height, self.width)
        return grid.latent_frames(self.num_frames), height // patch, width // patch

    def zeros(self) -> ClipBatch:
        """Return black clips of this shape, without captions."""
        count = self.batch_size
        return ClipBatch(
            number=0,
            epoch=0,
            paths=tuple(f"black:{index}" for index in range(count)),
            captions=("",) * count,
            fps=(0.0,) * count,
            motion_scores=(None,) * count,
            pixels_BTHWC=torch.zeros(count, self.num_frames, self.height, self.width, 3, dtype=torch.uint8),
            cached=None,
        )


def largest_batch_shape(settings: TrainSettings) -> BatchShape:
    """Return the shape with the most tokens, including captions; for an autoencoder, with the most pixels.
    Raises RequestError if a resolution is too small.
    """
    return _largest(settings)[1]


def layer_values(settings: TrainSettings) -> int:
    """Return the number of values in a layer of the largest micro-batch, including captions."""
    objective = find_objective(settings)
    return objective.positions(settings, largest_batch_shape(settings)) * objective.width(settings)


def with_batch_size(settings: TrainSettings, batch_size: int) -> TrainSettings:
    """Return the settings with micro-batches of this size, only from the largest bucket.
    Raises RequestError if a resolution is too small.
    """
    resolution, shape = _largest(settings)
    return settings.replace({"data.buckets": {resolution: {shape.num_frames: (1.0, batch_size)}}})


def _largest(settings: TrainSettings) -> tuple[str, BatchShape]:
    shapes = [
        (name, BatchShape(batch_size=bucket.batch_size, num_frames=length, height=height, width=width))
        for name, lengths in settings.data.buckets.items()
        for height, width in training_sizes(name, multiple=pixel_multiple(settings)).values()
        for length, bucket in lengths.items()
        if bucket.probability > 0
    ]
    return max(shapes, key=lambda found: find_objective(settings).positions(settings, found[1]))


_SMALLER = "smaller batches need less: data.buckets"


class ActivationPlan(Document):
    """Plan for activation checkpointing of the transformer's blocks."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    checkpointing: Checkpointing
    checkpointed_blocks: dict[str, int]
    """Path of each stack of blocks -> number of checkpointed blocks, counted from the first."""
    needed_bytes: int
    """Peak use of the host buffer in one step; 0 without offload."""
    buffer_bytes: int
    dtype: torch.dtype = Field(exclude=True)
    """Dtype of offloaded activations; others stay on the device."""

    def line(self) -> str:
        """Return the plan as text."""
        words = "checkpoints in " + " and ".join(f"{count} {path}" for path, count in self.checkpointed_blocks.items())
        match self.checkpointing:
            case Checkpointing.SELECTIVE:
                words += ", results of attention are kept"
            case Checkpointing.OFFLOAD:
                words += f", their inputs on the host, buffer {format_bytes(self.buffer_bytes)}"
        return words


def plan_activations(settings: TrainSettings) -> ActivationPlan | None:
    """Return the plan; None means that all activations stay on the device, without checkpointing.
    Raises RequestError if the buffer is too small for a step, or if sizes contradict each other.
    """
    memory = settings.memory
    if not settings.trains_transformer or memory.checkpointing is Checkpointing.NONE:
        return None
    chosen = (memory.checkpoint_double_blocks, memory.checkpoint_single_blocks)
    stacks = repeated_blocks(mmdit_config(settings.model))
    blocks = {
        stack.module_path: stack.count if count is None else count for stack, count in zip(stacks, chosen, strict=True)
    }
    needed, buffer, dtype = 0, 0, _block_dtype(settings)
    if memory.checkpointing is Checkpointing.OFFLOAD:
        needed = _needed_bytes(settings, blocks, dtype)
        buffer = needed if memory.activation_buffer is None else memory.activation_buffer
    if buffer < needed:
        raise RequestError(
            f"memory.activation_buffer={buffer} is too small for a step of "
            f"{largest_batch_shape(settings).batch_size} clips: use at least {needed}, or none",
            hint=_SMALLER,
        )
    return ActivationPlan(
        checkpointing=memory.checkpointing,
        checkpointed_blocks=blocks,
        needed_bytes=needed,
        buffer_bytes=buffer,
        dtype=dtype,
    )


@contextmanager
def saved_activations(module: nn.Module, plan: ActivationPlan | None) -> Iterator[ActivationManager | None]:
    """Manage the activations of a transformer as planned inside the block; with None, do nothing.

    Yields the manager of offloaded activations, or None. Raises HardwareError if the host has no memory for the
    buffer.
    """
    if plan is None:
        yield None
        return
    manager = None
    if plan.checkpointing is Checkpointing.OFFLOAD:
        manager = ActivationManager()
        try:
            manager.setup_buffer(-(-plan.buffer_bytes // plan.dtype.itemsize), plan.dtype)
        except RuntimeError as error:
            raise HardwareError(
                f"there is no host memory for a buffer of {format_bytes(plan.buffer_bytes)} (memory.activation_buffer)",
                hint=f"use --set memory.checkpointing=full; {_SMALLER}",
            ) from error
    with set_grad_checkpoint(
        module,
        depth=plan.checkpointed_blocks,
        others=(OUTPUT_LAYER,),
        activations=manager,
        keep_attention=plan.checkpointing is Checkpointing.SELECTIVE,
    ):
        yield manager


def _block_dtype(settings: TrainSettings) -> torch.dtype:
    """Return the dtype of the blocks' inputs, which is that of the weights in use, also under autocast."""
    are_gathered = settings.strategy.shards and settings.parallel.world_size > 1
    return DTYPES[settings.precision.compute] if are_gathered else weights_dtype(settings)


def _needed_bytes(settings: TrainSettings, blocks: dict[str, int], dtype: torch.dtype) -> int:
    """Return the peak use of the buffer in bytes, from a forward pass on the meta device."""
    model, shape = settings.model, largest_batch_shape(settings)
    batch, axes = shape.batch_size, settings.parallel.axes(settings.strategy)
    # Take the rank with the largest part of a shared clip.
    sharing = axes["ring"] * axes["ulysses"]
    tokens, text_tokens = (
        -(-count // sharing) for count in (prod(shape.token_grid(settings)), settings.text.t5_max_length)
    )
    manager = ActivationManager()
    manager.setup_buffer(2**60, dtype, device="meta")
    transformer = transformer_on_meta(model).to(dtype)

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    with set_grad_checkpoint(transformer, depth=blocks, others=(OUTPUT_LAYER,), activations=manager):
        transformer(
            empty(batch, tokens, model.in_channels),
            position_ids_BN3=torch.empty(batch, tokens, 3, device="meta"),
            timesteps_B=empty(batch),
            prompt_embeds_BLC=empty(batch, text_tokens, model.context_in_dim),
            pooled_prompt_embeds_BV=empty(batch, model.vec_in_dim),
            conditioning_BNK=(
                empty(batch, tokens, transformer.config.conditioning_channels) if model.cond_embed else None
            ),
            embedded_guidance_B=empty(batch) if model.guidance_embed else None,
        )
    return manager.peak_bytes
