"""Placement and precision of the transformer's frozen weights in adapter training."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from opensora_cli.core.documents import Document
from opensora_cli.core.exceptions import HardwareError
from opensora_cli.core.formatting import format_bytes
from opensora_cli.core.limits import freed_at_once, read_private_memory
from opensora_cli.core.progress import Reporter
from opensora_cli.engine.components.architectures import mmdit_config
from opensora_cli.engine.components.hardware import OutOfMemoryError
from opensora_cli.engine.estimate.offload import OffloadPlan
from opensora_cli.engine.estimate.weights import bytes_of_blocks
from opensora_cli.engine.launch.rank import device_type
from opensora_cli.engine.train.transformer import weights_dtype
from opensora_cli.memory.host_weights import kept_blocks, streaming_bytes
from opensora_cli.memory.streaming import stream_blocks
from opensora_cli.models.mmdit.blocks import repeated_blocks
from opensora_cli.settings.devices import HostWeights
from opensora_cli.settings.train import TrainSettings
from opensora_cli.settings.train_sections import WeightOffload

_RESIDENT = 2
"""Default number of resident blocks: one computes while the next is copied."""
_ROOM = 1.25
"""Free memory, relative to the size of a page-locked copy, that the copy needs."""


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
        """Return the plan as text."""
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
    memory = settings.memory
    if not settings.lora.is_on or (memory.offload is WeightOffload.NONE and not memory.fp8_storage):
        return None
    sizes = bytes_of_blocks(
        mmdit_config(settings.model), weights_dtype(settings), OffloadPlan(fp8_storage=memory.fp8_storage)
    )
    resident = len(sizes)
    if memory.offload is WeightOffload.BLOCKS:
        resident = min(memory.resident_blocks or _RESIDENT, len(sizes))
    is_cpu = device_type(settings.device_name) == "cpu"
    kept = sum(sizes[number] for number in kept_blocks(len(sizes), resident=resident))
    return FrozenWeights(
        fp8_storage=memory.fp8_storage,
        blocks=len(sizes),
        resident_blocks=resident,
        host_weights=None if memory.offload is WeightOffload.NONE else _host_weights(settings, sum(sizes)),
        device_bytes=streaming_bytes(sizes, resident=resident),
        host_bytes=sum(sizes) - kept,
        casts=is_cpu and not memory.fp8_storage and weights_dtype(settings) is torch.float32,
    )


def _host_weights(settings: TrainSettings, num_bytes: int) -> HostWeights:
    # A copy has no advantage on a CPU.
    if device_type(settings.device_name) == "cpu":
        return HostWeights.MAPPED
    if settings.memory.host_weights is not None:
        return settings.memory.host_weights
    needed = _ROOM * num_bytes * settings.parallel.ranks_per_node
    return HostWeights.PINNED if needed < read_private_memory().free_bytes else HostWeights.MAPPED


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
    options = partial(
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
            figures = ends.enter_context(options(source=plan.host_weights.value))
        except HardwareError as error:
            if settings.memory.host_weights is not None or isinstance(error, OutOfMemoryError):
                raise
            reporter.warn(f"{error.message}: the frozen blocks stay mapped from their file")
            figures = ends.enter_context(options(source=HostWeights.MAPPED.value))
        yield figures.runs


def fake_slots(plan: FrozenWeights | None) -> Sequence[Tensor]:
    """Return a buffer of the size that `streamed_weights` yields. Call this inside `fake_device`."""
    if plan is None or plan.host_weights is None:
        return ()
    return [torch.empty(plan.device_bytes, dtype=torch.uint8)]


def stack_paths(settings: TrainSettings) -> list[str]:
    """Return the paths of the transformer's stacks of blocks."""
    return [stack.module_path for stack in repeated_blocks(mmdit_config(settings.model))]


def waiting_weights(transformer: nn.Module, plan: FrozenWeights | None, settings: TrainSettings) -> list[nn.Parameter]:
    """Return the weights of a transformer that are on the host; empty if the plan has none."""
    if plan is None or plan.host_weights is None:
        return []
    blocks = [transformer.get_submodule(path) for path in stack_paths(settings)]
    return [weight for block in blocks for weight in block.parameters() if not weight.requires_grad]
