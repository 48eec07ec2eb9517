"""Block streaming: a model runs with few blocks on the device, and the next block's weights are prefetched."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from opensora_cli.memory.checkpointing import RECOMPUTING, is_checkpointed
from opensora_cli.memory.host_memory import SideStream
from opensora_cli.memory.host_weights import (
    SLOTS,
    BlockWeights,
    HostSource,
    HostWeights,
    kept_blocks,
    open_host_weights,
)


@dataclass(slots=True)
class StreamingFigures:
    """Memory and copies of streaming."""

    device_bytes: int = 0
    """Bytes on the device for weights, constant for the whole context."""
    host_bytes: int = 0
    """Bytes allocated in host memory, in addition to or instead of the weights' former memory."""
    copied_bytes: int = 0
    """Bytes copied to the device, including copies that have started."""
    runs: list[Tensor] = field(default_factory=list)
    """Memory on the device, until the end of the context."""


@contextmanager
def stream_blocks(
    stacks: Sequence[nn.ModuleList],
    *,
    device: torch.device | str,
    resident: int,
    source: HostSource = "pinned",
    dtype: torch.dtype | None = None,
    trains: bool = False,
    without: Sequence[nn.Module] = (),
) -> Iterator[StreamingFigures]:
    """Run a model with the weights of at most `resident` of its blocks on the device.

    All of these but two stay there, spread evenly over the blocks. The other blocks use two slots in turn: while a
    block computes, the next one is copied on a separate stream. Blocks may be called in any order and be skipped, but
    only the order of the stacks is fast. The results are those of a model that is on the device as a whole.

    A block has its weights on the device only during its forward; at any other time its parameters are on the CPU,
    under their names, with `pinned` as other tensors with the same values. The yielded figures are updated
    continuously. With gradients, each block needs a checkpoint (`set_grad_checkpoint`), so that autograd does not hold
    its weights until backward, which copies them again.

    Args:
        stacks: blocks in the order in which they run, with parameters on the CPU. Everything else of the model is on
            the device. Buffers of blocks are moved there.
        resident: largest number of blocks with weights on the device at the same time, at least 1.
        source: place of the weights of streamed blocks, see `HostSource`.
        dtype: dtype to which copies of floating-point weights are cast, permanently if they are `pinned`. None means
            their own. Only for the CPU.
        trains: leave weights that require gradients on the device.
        without: modules inside the blocks whose weights are not moved because nothing computes with them there.

    Raises:
        ValueError: `resident` is not positive, or weights are on the meta device.
        HardwareError: Memory cannot be page-locked.
        RuntimeError: (from a call of the model) Gradients are recorded for streamed weights or without checkpoints.
    """
    device = torch.device(device)
    modules = list(dict.fromkeys(block for stack in stacks for block in stack))
    left_out = {part for module in without for part in module.modules()}
    blocks = [BlockWeights(module, dtype, frozen=trains, without=left_out) for module in modules]
    if any(weight.is_meta for block in blocks for weight in block.host):
        raise ValueError("blocks on the meta device have no weights to stream")
    kept = kept_blocks(len(blocks), resident=resident)
    streamed = [block for index, block in enumerate(blocks) if index not in kept]
    figures = StreamingFigures()
    side = SideStream(device)
    with ExitStack() as ends:
        runs = figures.runs
        # Runs last because the memory may be freed only after all copies are done.
        ends.callback(runs.clear)
        host = ends.enter_context(open_host_weights(source, streamed, device=device, side=side))
        figures.host_bytes = host.nbytes
        ends.enter_context(_buffers_on(modules, device))
        streamer = _Streamer(host, side, figures, trains=trains)
        ends.callback(streamer.close)
        for index in kept:
            runs.append(_run(blocks[index].nbytes, device))
            streamer.keep(blocks[index], runs[-1])
        if streamed:
            for _ in range(min(resident, SLOTS)):
                runs.append(_run(max(block.nbytes for block in streamed), device))
            streamer.rotate(streamed, runs[len(kept) :])
        figures.device_bytes = sum(run.nbytes for run in runs)
        streamer.follow(modules, blocks)
        yield figures


@contextmanager
def stream_model(model: nn.Module, *, device: torch.device | str, resident: int) -> Iterator[StreamingFigures]:
    """Run any model with `stream_blocks`. Its blocks are the modules in its outermost `ModuleList`s and `Sequential`s.

    Its other parts are on the device inside the context, and the whole model is on the CPU afterwards.
    """
    model.cpu()
    stacks: list[nn.ModuleList] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, nn.ModuleList | nn.Sequential) and module not in inside:
            stacks.append(nn.ModuleList(module))
            inside.update(module.modules())
    outside = [module for module in model.modules() if module not in inside]
    try:
        for module in outside:
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                tensor.data = tensor.data.to(device)
        with stream_blocks(stacks, device=device, resident=resident) as figures:
            yield figures
    finally:
        model.cpu()


@dataclass(slots=True)
class _Slot:
    """Device memory for one block at a time."""

    run: Tensor
    number: int | None = None
    """Index of the block that is in the slot or being copied there. None means an empty slot."""
    copied: Future[torch.Event | None] | None = None


class _Streamer:
    """Streamer that gives blocks their weights on the device, and prefetches the next ones."""

    def __init__(self, host: HostWeights, side: SideStream, figures: StreamingFigures, *, trains: bool) -> None:
        self._host = host
        self._side = side
        self._figures = figures
        self._trains = trains
        self._kept: dict[BlockWeights, list[Tensor]] = {}
        self._ring: list[BlockWeights] = []
        self._slots: list[_Slot] = []
        self._on_device: BlockWeights | None = None
        self._hooks: list[RemovableHandle] = []
        self._modules: Sequence[nn.Module] = ()

    def keep(self, block: BlockWeights, run: Tensor) -> None:
        """Copy a block to a run of memory on the device, permanently."""
        with torch.inference_mode(False), torch.no_grad():
            views = block.views(run)
            for view, weight in zip(views, block.host, strict=True):
                view.copy_(weight)
        self._kept[block] = views
        self._figures.copied_bytes += block.nbytes

    def rotate(self, ring: Sequence[BlockWeights], runs: Sequence[Tensor]) -> None:
        """Stream all other blocks through `runs`, which are fewer, and start filling them."""
        self._ring, self._slots = list(ring), [_Slot(run) for run in runs]
        self._fetch_ahead(0)

    def follow(self, modules: Sequence[nn.Module], blocks: Sequence[BlockWeights]) -> None:
        """Give each block its weights on the device whenever it is called, or recomputed in backward."""
        self._modules = modules
        for module, block in zip(modules, blocks, strict=True):
            vars(module)[RECOMPUTING] = partial(self._recomputing, block)
            self._hooks += [
                module.register_forward_pre_hook(partial(self._before, block)),
                module.register_forward_hook(partial(self._after, block), always_call=True),
            ]

    def close(self) -> None:
        """Restore the modules, and release the memory on the device."""
        while self._hooks:
            self._hooks.pop().remove()
        for module in self._modules:
            vars(module).pop(RECOMPUTING, None)
        self._swap_out()
        self._kept.clear()
        self._slots.clear()

    def _before(self, block: BlockWeights, module: nn.Module, _inputs: object) -> None:
        if torch.is_grad_enabled() and any(weight.requires_grad for weight in block.host):
            raise RuntimeError(
                "weights that are streamed get no gradients: call the model under torch.no_grad() or inference_mode()"
            )
        if torch.is_grad_enabled() and self._trains and not is_checkpointed(module):
            raise RuntimeError("blocks that are streamed while gradients are recorded must be checkpointed")
        self._swap_in(block)

    def _after(self, block: BlockWeights, _module: nn.Module, _inputs: object, _result: object) -> None:
        if self._on_device is not block:
            return
        self._swap_out()
        if block not in self._kept:
            self._fetch_ahead(self._ring.index(block) + 1)

    @contextmanager
    def _recomputing(self, block: BlockWeights) -> Iterator[None]:
        self._swap_in(block, backwards=True)
        try:
            yield
        finally:
            # By now, tensors that autograd has saved hold the memory, not the parameters.
            self._swap_out()

    def _swap_in(self, block: BlockWeights, *, backwards: bool = False) -> None:
        # After an interruption, the forward hook of the previous block may not have run.
        self._swap_out()
        tensors = self._kept[block] if block in self._kept else self._arrived(block, backwards=backwards)
        self._on_device = block
        with torch.inference_mode(False):
            block.swap_in(tensors)

    def _swap_out(self) -> None:
        if self._on_device is not None:
            self._on_device.swap_out()
            self._on_device = None

    def _arrived(self, block: BlockWeights, *, backwards: bool) -> list[Tensor]:
        """Return the weights of a streamed block on the device; start fetching them if that has not started."""
        number = self._ring.index(block)
        self._fetch_ahead(number, backwards=backwards)
        (slot,) = (slot for slot in self._slots if slot.number == number)
        assert slot.copied is not None
        try:
            self._side.wait(slot.copied.result())
        except Exception:
            for each in self._slots:
                each.number = None
            raise
        with torch.inference_mode(False):
            return block.views(slot.run)

    def _fetch_ahead(self, number: int, *, backwards: bool = False) -> None:
        """Start fetching this block of the ring and the following blocks, one for each slot.

        A pass without gradients is followed by another one. A forward pass with gradients is followed by a backward
        pass, after which the slots contain the first blocks again.
        """
        step = -1 if backwards else 1
        coming = range(number, number + step * len(self._slots), step)
        if backwards or torch.is_grad_enabled():
            wanted = [each for each in coming if 0 <= each < len(self._ring)]
        else:
            wanted = [each % len(self._ring) for each in coming]
        there = {slot.number for slot in self._slots}
        free = [slot for slot in self._slots if slot.number not in wanted]
        for each in wanted:
            if each not in there:
                self._fetch(each, free.pop())

    def _fetch(self, number: int, slot: _Slot) -> None:
        # Computation with the previous contents of the slot may still be running.
        copy = partial(self._copy, number, slot.run, self._side.mark())
        slot.number = None
        slot.copied = self._host.start(copy)
        slot.number = number
        self._figures.copied_bytes += self._ring[number].nbytes

    def _copy(self, number: int, run: Tensor, free: torch.Event | None) -> torch.Event | None:
        with torch.inference_mode(False), torch.no_grad(), self._side.after(free):
            self._host.copy_to(number, run)
            return self._side.mark()


def _run(nbytes: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.empty(nbytes, dtype=torch.uint8, device=device)


@contextmanager
def _buffers_on(modules: Sequence[nn.Module], device: torch.device) -> Iterator[None]:
    """Move buffers of blocks from the CPU to a device, and back with their new values at the end."""
    places = [
        (module._buffers, name)
        for block in modules
        for module in block.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.device.type == "cpu"
    ]
    try:
        _move(places, device)
        yield
    finally:
        _move(places, torch.device("cpu"))


def _move(places: Sequence[tuple[dict[str, Tensor | None], str]], device: torch.device) -> None:
    moved: dict[Tensor, Tensor] = {}
    for buffers, name in places:
        buffer = buffers[name]
        if buffer is not None:
            with torch.inference_mode(False), torch.no_grad():
                buffers[name] = moved.setdefault(buffer, buffer.to(device))
