"""Shape of the largest micro-batch, and activation checkpointing."""

from dataclasses import dataclass

import torch

from opensora_cli.core.documents import Document
from opensora_cli.core.formatting import format_bytes
from opensora_cli.data.batches import ClipBatch, ClipRequest
from opensora_cli.engine.components.architectures import mmdit_config
from opensora_cli.engine.encode.datasets import pixel_multiple
from opensora_cli.engine.train.objectives import find_objective
from opensora_cli.models.mmdit.blocks import repeated_blocks
from opensora_cli.sampling.sizes import training_sizes
from opensora_cli.settings.train import TrainSettings
from opensora_cli.settings.train_sections import Checkpointing, Compute


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
        frames, height, width = self.num_frames, self.height, self.width
        clip = ClipRequest(path="black", num_frames=frames, height=height, width=width)
        pixels_BTHWC = torch.zeros(self.batch_size, frames, height, width, 3, dtype=torch.uint8)
        return ClipBatch(number=0, epoch=0, requests=(clip,) * self.batch_size, pixels_BTHWC=pixels_BTHWC, cached=None)


def largest_batch_shape(settings: TrainSettings) -> BatchShape:
    """Return the shape with the most tokens, including captions; for an autoencoder, with the most pixels."""
    return _largest(settings)[1]


def layer_values(settings: TrainSettings) -> int:
    """Return the number of values in a layer of the largest micro-batch, including captions."""
    return find_objective(settings).layer_values(settings, largest_batch_shape(settings))


def with_batch_size(settings: TrainSettings, batch_size: int) -> TrainSettings:
    """Return the settings with micro-batches of this size, only from the largest bucket."""
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
    return max(shapes, key=lambda found: find_objective(settings).layer_values(settings, found[1]))


class ActivationPlan(Document):
    """Plan for activation checkpointing of the transformer's blocks."""

    checkpointing: Checkpointing
    checkpointed_blocks: dict[str, int]
    """Path of each stack of blocks -> number of checkpointed blocks, counted from the first."""
    host_bytes: int
    """Bytes of activations on the host after the forward pass of the largest micro-batch; 0 without offload."""

    def line(self) -> str:
        """Return the plan as text."""
        words = "checkpoints in " + " and ".join(f"{count} {path}" for path, count in self.checkpointed_blocks.items())
        match self.checkpointing:
            case Checkpointing.SELECTIVE:
                words += ", results of attention are kept"
            case Checkpointing.OFFLOAD:
                words += f", their inputs on the host ({format_bytes(self.host_bytes)})"
        return words


def plan_activations(settings: TrainSettings) -> ActivationPlan | None:
    """Return the plan; None means that all activations stay on the device, without checkpointing."""
    memory = settings.memory
    if not settings.trains_transformer or memory.checkpointing is Checkpointing.NONE:
        return None
    chosen = (memory.checkpoint_double_blocks, memory.checkpoint_single_blocks)
    stacks = repeated_blocks(mmdit_config(settings.model))
    blocks = {
        stack.module_path: stack.count if count is None else count for stack, count in zip(stacks, chosen, strict=True)
    }
    host_bytes = 0
    if memory.checkpointing is Checkpointing.OFFLOAD:
        axes = settings.parallel.axes(settings.strategy)
        # Inputs have the dtype of the weights in use, also under autocast. The output layer is checkpointed, too.
        is_gathered = settings.strategy.shards and settings.parallel.world_size > 1
        halves = settings.precision.compute is Compute.BF16 and (is_gathered or settings.lora.is_on)
        values = layer_values(settings) // (axes["ring"] * axes["ulysses"])
        host_bytes = (sum(blocks.values()) + 1) * values * (2 if halves else 4)
    return ActivationPlan(checkpointing=memory.checkpointing, checkpointed_blocks=blocks, host_bytes=host_bytes)
