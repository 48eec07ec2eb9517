"""Memory of a run: its largest micro-batch, activations between the passes, and frozen weights of an adapter."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from opensora_cli.core.documents import Document
from opensora_cli.core.exceptions import HardwareError
from opensora_cli.core.formatting import format_bytes
from opensora_cli.core.limits import freed_at_once, read_private_memory
from opensora_cli.core.progress import Reporter
from opensora_cli.data.batches import ClipBatch, ClipRequest
from opensora_cli.engine.components.architectures import mmdit_config
from opensora_cli.engine.components.hardware import OutOfMemoryError
from opensora_cli.engine.encode.datasets import pixel_multiple
from opensora_cli.engine.estimate.offload import OffloadPlan
from opensora_cli.engine.estimate.weights import bytes_of_blocks
from opensora_cli.engine.launch.rank import device_type
from opensora_cli.engine.train.objectives import find_objective
from opensora_cli.memory.host_weights import kept_blocks, streaming_bytes
from opensora_cli.memory.streaming import stream_blocks
from opensora_cli.models.mmdit.blocks import repeated_blocks
from opensora_cli.sampling.sizes import training_sizes
from opensora_cli.settings.devices import HostWeights
from opensora_cli.settings.train import TrainSettings
from opensora_cli.settings.train_sections import Checkpointing, Compute, WeightOffload

_RESIDENT = 2
"""Default number of resident blocks: one computes while the next is copied."""
_ROOM = 1.25
"""Free memory, relative to the size of a page-locked copy, that the copy needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """Number and size of the clips in a micro-batch."""

    batch_size: int
    num_frames: int
    height: int
    width: int

    def token_grid(self, settings: TrainSettings) -> tuple[int, int, int]:
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


def stack_paths(settings: TrainSettings) -> list[str]:
    return [stack.module_path for stack in repeated_blocks(mmdit_config(settings.model))]


def weights_dtype(settings: TrainSettings) -> torch.dtype:
    """Return the dtype of the transformer's weights; weights of an adapter are in float32."""
    # In float16, sums over the blocks may overflow.
    halves = settings.lora.is_on and settings.precision.compute is Compute.BF16
    return torch.bfloat16 if halves else torch.float32


class ActivationPlan(Document):
    """Plan for activation checkpointing of the transformer's blocks."""

    checkpointing: Checkpointing
    checkpointed_blocks: dict[str, int]
    """Path of each stack of blocks -> number of checkpointed blocks, counted from the first."""

    def line(self) -> str:
        words = "checkpoints in " + " and ".join(f"{count} {path}" for path, count in self.checkpointed_blocks.items())
        match self.checkpointing:
            case Checkpointing.SELECTIVE:
                words += ", results of attention are kept"
            case Checkpointing.OFFLOAD:
                words += ", their inputs on the host"
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
    return ActivationPlan(checkpointing=memory.checkpointing, checkpointed_blocks=blocks)


class FrozenWeights(Document):
    """Storage of the blocks' frozen weights in adapter training."""

    fp8_storage: bool
    blocks: int
    resident_blocks: int
    """Number of blocks on the device at the same time."""
    host_weights: HostWeights | None
    """Host memory of the other blocks. None means that all blocks are on the device."""
    device_bytes: int
    """Bytes of the blocks' weights on the device."""
    host_bytes: int
    """Bytes of the blocks on the host: page-locked, or mapped from their file, which uses only page cache."""
    casts: bool
    """Whether blocks on the host keep their file's dtype, which a CPU casts; `host_bytes` counts after the cast."""

    def line(self) -> str:
        kept = f"{self.blocks} frozen blocks{' in 8 bits' if self.fp8_storage else ''}"
        if self.host_weights is None:
            return f"{kept}, on the device ({format_bytes(self.device_bytes)})"
        waiting = "as their file has them" if self.casts else format_bytes(self.host_bytes)
        return (
            f"{kept}, {self.resident_blocks} on the device at a time ({format_bytes(self.device_bytes)}), "
            f"the others {self.host_weights} ({waiting})"
        )


def plan_frozen_weights(settings: TrainSettings) -> FrozenWeights | None:
    """Return the storage of frozen weights; None if they need no plan: on the device, in the compute dtype."""
    memory, dtype = settings.memory, weights_dtype(settings)
    streams = memory.offload is WeightOffload.BLOCKS
    if not settings.lora.is_on or not (streams or memory.fp8_storage):
        return None
    sizes = bytes_of_blocks(mmdit_config(settings.model), dtype, OffloadPlan(fp8_storage=memory.fp8_storage))
    resident = min(memory.resident_blocks or _RESIDENT, len(sizes)) if streams else len(sizes)
    is_cpu = device_type(settings.device_name) == "cpu"
    host_weights = None
    if streams and is_cpu:
        host_weights = HostWeights.MAPPED  # A copy has no advantage on a CPU.
    elif streams:
        needed = _ROOM * sum(sizes) * settings.parallel.ranks_per_node
        fitting = HostWeights.PINNED if needed < read_private_memory().free_bytes else HostWeights.MAPPED
        host_weights = memory.host_weights or fitting
    return FrozenWeights(
        fp8_storage=memory.fp8_storage,
        blocks=len(sizes),
        resident_blocks=resident,
        host_weights=host_weights,
        device_bytes=streaming_bytes(sizes, resident=resident),
        host_bytes=sum(sizes) - sum(sizes[number] for number in kept_blocks(len(sizes), resident=resident)),
        casts=is_cpu and not memory.fp8_storage and dtype is torch.float32,
    )


@contextmanager
def streamed_weights(
    transformer: nn.Module,
    plan: FrozenWeights | None,
    settings: TrainSettings,
    *,
    device: torch.device,
    reporter: Reporter,
) -> Iterator[Sequence[Tensor]]:
    """Stream the frozen weights of checkpointed blocks from the host to the device; yield the buffers on the device.

    If pages cannot be locked, weights stay mapped, unless the settings require locked pages: then HardwareError is
    raised.
    """
    if plan is None or plan.host_weights is None:
        yield ()
        return
    # Layers dequantize weights in 8 bits themselves.
    casts = device.type == "cpu" and not plan.fp8_storage
    stream = partial(
        stream_blocks,
        [cast(nn.ModuleList, transformer.get_submodule(path)) for path in stack_paths(settings)],
        device=device,
        resident=plan.resident_blocks,
        dtype=weights_dtype(settings) if casts else None,
        trains=True,
    )
    with ExitStack() as ends:
        if device.type == "cpu":
            ends.enter_context(freed_at_once())
        try:
            figures = ends.enter_context(stream(source=plan.host_weights.value))
        except HardwareError as error:
            if settings.memory.host_weights is not None or isinstance(error, OutOfMemoryError):
                raise
            reporter.warn(f"{error.message}: the frozen blocks stay mapped from their file")
            figures = ends.enter_context(stream(source=HostWeights.MAPPED.value))
        yield figures.runs


def fake_slots(plan: FrozenWeights | None) -> Sequence[Tensor]:
    """Return a buffer of the size that `streamed_weights` yields. Call this inside `fake_device`."""
    if plan is None or plan.host_weights is None:
        return ()
    return [torch.empty(plan.device_bytes, dtype=torch.uint8)]


def waiting_weights(transformer: nn.Module, plan: FrozenWeights | None, settings: TrainSettings) -> list[nn.Parameter]:
    """Return the weights of a transformer that are on the host; empty if the plan has none."""
    if plan is None or plan.host_weights is None:
        return []
    blocks = [transformer.get_submodule(path) for path in stack_paths(settings)]
    return [weight for block in blocks for weight in block.parameters() if not weight.requires_grad]
