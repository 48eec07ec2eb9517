"""What the transformer holds between forward and backward: planned for the largest micro-batch, and kept to."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf, prod

import torch
from pydantic import ConfigDict, Field
from torch import nn

from opensora_cli.core.documents import Document
from opensora_cli.core.exceptions import HardwareError, RequestError
from opensora_cli.core.formatting import format_bytes
from opensora_cli.data.batches import ClipBatch
from opensora_cli.engine.components.configs import mmdit_config, transformer_on_meta
from opensora_cli.engine.encode.datasets import pixel_multiple
from opensora_cli.engine.train.precision import DTYPES
from opensora_cli.engine.train.transformer import weights_dtype
from opensora_cli.memory.activations import ActivationManager
from opensora_cli.memory.checkpointing import set_grad_checkpoint
from opensora_cli.memory.dynamic_activations import DynamicActivationManager
from opensora_cli.models.mmdit.blocks import OUTPUT_LAYER, repeated_blocks
from opensora_cli.sampling.sizes import training_sizes
from opensora_cli.settings.train import TrainSettings, TrainTarget
from opensora_cli.settings.train_loop import ActivationOffload


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """Clips of one size."""

    batch_size: int
    num_frames: int
    height: int
    width: int

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
    """Return the shape with the most tokens, captions included; for other targets, with the most pixels.
    Raises RequestError if a resolution is too small.
    """
    return _largest(settings)[1]


def token_grid(settings: TrainSettings, shape: BatchShape) -> tuple[int, int, int]:
    """Return frames, rows and columns of a clip's tokens."""
    grid, patch = settings.vae.grid, settings.model.patch_size
    height, width = grid.latent_size(shape.height, shape.width)
    return grid.latent_frames(shape.num_frames), height // patch, width // patch


def layer_values(settings: TrainSettings) -> int:
    """Return the values in a layer of the largest micro-batch, captions included."""
    shape = largest_batch_shape(settings)
    if settings.target is TrainTarget.VAE:
        pixels = shape.batch_size * shape.num_frames * shape.height * shape.width
        return pixels * settings.vae.sizes.pixel_width
    tokens = prod(token_grid(settings, shape)) + settings.text.t5_max_length
    return shape.batch_size * tokens * settings.model.hidden_size


def with_batch_size(settings: TrainSettings, batch_size: int) -> TrainSettings:
    """Return the same run with micro-batches of this size, of its largest bucket alone.
    Raises RequestError if a resolution is too small.
    """
    resolution, shape = _largest(settings)
    return settings.replace({"data.buckets": {resolution: {shape.num_frames: (1.0, batch_size)}}})


def _shapes(settings: TrainSettings) -> Iterator[tuple[str, BatchShape]]:
    for resolution, lengths in settings.data.buckets.items():
        for height, width in training_sizes(resolution, multiple=pixel_multiple(settings)).values():
            for length, bucket in lengths.items():
                if bucket.probability > 0:
                    yield (
                        resolution,
                        BatchShape(batch_size=bucket.batch_size, num_frames=length, height=height, width=width),
                    )


def _largest(settings: TrainSettings) -> tuple[str, BatchShape]:
    def size(found: tuple[str, BatchShape]) -> int:
        shape = found[1]
        if settings.target is TrainTarget.MMDIT:
            return shape.batch_size * (prod(token_grid(settings, shape)) + settings.text.t5_max_length)
        return shape.batch_size * shape.num_frames * shape.height * shape.width

    return max(_shapes(settings), key=size)


_OFFLOAD_ABOVE = 0.8
_SMALLER = "smaller batches need less: data.buckets"


class KeptResults(Document):
    """Which results are kept of checkpointed blocks."""

    operations_a_byte: float
    """Those of products and attention that take as many, or more."""
    blocks: dict[str, int]
    """Path of each stack -> how many of its checkpointed blocks, the last ones."""


class Recomputed(Document):
    """What is computed again in backward, as shares of the blocks' forward pass."""

    products: float
    attention: float
    operations: float
    """Of both together."""


class ActivationPlan(Document):
    """Which blocks are checkpointed, and where their inputs are held."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    checkpointed_blocks: dict[str, int]
    """Path of each stack of blocks -> how many are checkpointed, from the first."""
    kept: tuple[KeptResults, ...] = ()
    """What these keep all the same; of a block in several, the lowest number holds."""
    recomputed: Recomputed | None = None
    """With `memory.checkpointing=auto`, as far as the cost is known."""
    activation_offload: ActivationOffload
    offload_above: float | None
    """With `dynamic`: the share of the device's memory."""
    needed_bytes: int
    """The most that one step puts into the buffer; 0 without offload."""
    buffer_bytes: int
    dtype: torch.dtype = Field(exclude=True)
    """Of the activations that are offloaded; others stay on the device."""

    def line(self) -> str:
        """Return the plan for people."""
        blocks = " and ".join(f"{count} {path}" for path, count in self.checkpointed_blocks.items())
        words = [f"checkpoints in {blocks}"]
        if self.offload_above is not None:
            words.append(f"their inputs on the host above {self.offload_above:.0%} of the memory")
        elif self.activation_offload is ActivationOffload.ALL:
            words.append("their inputs on the host")
        if self.activation_offload is not ActivationOffload.NONE:
            words.append(f"buffer {format_bytes(self.buffer_bytes)}")
        for kept in self.kept:
            of = " and ".join(f"the last {count} of {path}" for path, count in kept.blocks.items() if count)
            words.append(f"{of} keep results of {kept.operations_a_byte:,.0f} operations a byte or more")
        if self.recomputed is not None:
            words.append(f"{self.recomputed.operations:.0%} of the blocks' forward pass is computed again")
        return ", ".join(words)

    def keep(self) -> dict[str, float]:
        """Return path of a block -> from how many operations a byte on its results are kept; others keep none."""
        found: dict[str, float] = {}
        for kept in self.kept:
            for path, count in kept.blocks.items():
                last = self.checkpointed_blocks[path]
                for index in range(last - count, last):
                    block = f"{path}.{index}"
                    found[block] = min(found.get(block, inf), kept.operations_a_byte)
        return found


def plan_activations(settings: TrainSettings) -> ActivationPlan | None:
    """Return what is held where; None: everything on the device, as autograd does it.

    With `memory.checkpointing=auto` it is what takes the least memory; `choose_activations` finds what fits.
    Raises RequestError if the buffer is too small for a step, or sizes contradict each other.
    """
    memory = settings.memory
    if settings.target is not TrainTarget.MMDIT or not memory.checkpointing:
        return None
    chosen = (memory.checkpoint_double_blocks, memory.checkpoint_single_blocks)
    stacks = repeated_blocks(mmdit_config(settings.model))
    blocks = {
        stack.module_path: stack.count if count is None else count for stack, count in zip(stacks, chosen, strict=True)
    }
    dtype = _block_dtype(settings)
    needed = 0 if memory.activation_offload is ActivationOffload.NONE else _needed_bytes(settings, blocks, dtype)
    if memory.activation_buffer is not None and memory.activation_buffer < needed:
        raise RequestError(
            f"memory.activation_buffer={memory.activation_buffer} is too small for a step of "
            f"{largest_batch_shape(settings).batch_size} clips: use at least {needed}, or none",
            hint=_SMALLER,
        )
    above = _OFFLOAD_ABOVE if memory.offload_above is None else memory.offload_above
    return ActivationPlan(
        checkpointed_blocks=blocks,
        activation_offload=memory.activation_offload,
        offload_above=above if memory.activation_offload is ActivationOffload.DYNAMIC else None,
        needed_bytes=needed,
        buffer_bytes=needed if memory.activation_buffer is None else memory.activation_buffer,
        dtype=dtype,
    )


@contextmanager
def saved_activations(module: nn.Module, plan: ActivationPlan | None) -> Iterator[ActivationManager | None]:
    """Hold the activations of a transformer as planned while the block runs; with None, do nothing.

    Yields the manager of offloaded activations, if there are any. Raises HardwareError if the host has no memory for
    the buffer.
    """
    if plan is None:
        yield None
        return
    manager = _manager(plan)
    with set_grad_checkpoint(
        module,
        depth=plan.checkpointed_blocks,
        others=(OUTPUT_LAYER,),
        activations=manager,
        keep=plan.keep(),
    ):
        yield manager


def _manager(plan: ActivationPlan) -> ActivationManager | None:
    if plan.activation_offload is ActivationOffload.NONE:
        return None
    above = plan.offload_above
    manager = ActivationManager() if above is None else DynamicActivationManager(above)
    try:
        manager.setup_buffer(-(-plan.buffer_bytes // plan.dtype.itemsize), plan.dtype)
    except RuntimeError as error:
        raise HardwareError(
            f"there is no host memory for a buffer of {format_bytes(plan.buffer_bytes)} (memory.activation_buffer)",
            hint=f"use --set memory.activation_offload=none; {_SMALLER}",
        ) from error
    return manager


def _block_dtype(settings: TrainSettings) -> torch.dtype:
    """Return the dtype of the blocks' inputs: that of the weights as they are used, under autocast too."""
    are_gathered = settings.strategy.shards and settings.parallel.world_size > 1
    return DTYPES[settings.precision.compute] if are_gathered else weights_dtype(settings)


def _needed_bytes(settings: TrainSettings, blocks: dict[str, int], dtype: torch.dtype) -> int:
    """Run one step's forward pass on the meta device, and return what it puts into the buffer."""
    model, shape = settings.model, largest_batch_shape(settings)
    batch, axes = shape.batch_size, settings.parallel.axes(settings.strategy)
    # The largest part of the ranks that share a clip.
    sharing = axes["ring"] * axes["ulysses"]
    tokens, text_tokens = (
        -(-count // sharing) for count in (prod(token_grid(settings, shape)), settings.text.t5_max_length)
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
