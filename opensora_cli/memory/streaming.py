"""Block streaming: a model runs with few blocks on the device, and the next one's weights are copied meanwhile."""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from opensora_cli.memory.host_memory import SideStream
from opensora_cli.memory.host_weights import BlockWeights, HostSource, HostWeights, open_host_weights

_SLOTS = 2
"""One for the block that computes, one for the next."""


@dataclass(slots=True)
class StreamingFigures:
    """What streaming takes; all in bytes."""

    device_bytes: int = 0
    """Held on the device for weights, from beginning to end."""
    host_bytes: int = 0
    """Taken in the host's memory, beside or instead of that which the weights were in."""
    copied_bytes: int = 0
    """Copied to the device so far; copies that have started count."""


@contextmanager
def stream_blocks(
    stacks: Sequence[nn.ModuleList],
    *,
    device: torch.device | str,
    resident: int,
    source: HostSource = "pinned",
    dtype: torch.dtype | None = None,
) -> Iterator[StreamingFigures]:
    """Run a model with the weights of at most `resident` of its blocks on the device.

    All of these but two stay there, spread evenly over the blocks. The others go through two slots, round and round: as
    soon as a block has computed, the one after the next takes its place, copied on a stream of its own while the next
    computes. With one resident block there is one slot, and nothing overlaps. Blocks may be called in any order and be
    left out, but only that of the stacks is fast. The results are those of a model that is on the device as a whole.

    A block has its weights on the device during its forward only; at any other time its parameters are on the CPU,
    under their names. With `pinned` they are other tensors from then on, of the same values. The figures that it yields
    are kept up to date. When the context ends, the device's memory is free again.

    Args:
        stacks: the blocks, in the order in which they run; their parameters are on the CPU. Everything else of the
            model is on the device, and buffers of blocks are moved there.
        resident: how many blocks' weights may be on the device at a time, from 1; with as many as there are all stay.
        source: where the weights of the blocks that don't stay wait: `pinned` is one page-locked copy; `mapped` is no
            copy, but a thread that reads them where they are.
        dtype: that the floating-point weights are computed in, to which they are cast as they are copied, and for good
            where they are `pinned`; None: their own. On the CPU alone.

    Raises:
        ValueError: `resident` is not positive, or weights are on the meta device.
        HardwareError: memory cannot be page-locked.
        RuntimeError: (from a call of the model) gradients are recorded for weights that are streamed.
    """
    device = torch.device(device)
    modules = list(dict.fromkeys(block for stack in stacks for block in stack))
    blocks = [BlockWeights(module, dtype) for module in modules]
    if any(weight.is_meta for block in blocks for weight in block.host):
        raise ValueError("blocks on the meta device have no weights to stream")
    kept = kept_blocks(len(blocks), resident=resident)
    streamed = [block for index, block in enumerate(blocks) if index not in kept]
    figures = StreamingFigures()
    side = SideStream(device)
    with ExitStack() as ends:
        runs: list[Tensor] = []
        # Last of all: only when no copy is under way may the memory go to others.
        ends.callback(runs.clear)
        host = ends.enter_context(open_host_weights(source, streamed, device=device, side=side))
        figures.host_bytes = host.nbytes
        ends.enter_context(_buffers_on(modules, device))
        streamer = _Streamer(host, side, figures)
        ends.callback(streamer.close)
        for index in kept:
            runs.append(_run(blocks[index].nbytes, device))
            streamer.keep(blocks[index], runs[-1])
        if streamed:
            for _ in range(min(resident, _SLOTS)):
                runs.append(_run(max(block.nbytes for block in streamed), device))
            streamer.rotate(streamed, runs[len(kept) :])
        figures.device_bytes = sum(run.nbytes for run in runs)
        streamer.follow(modules, blocks)
        yield figures


@contextmanager
def stream_model(model: nn.Module, *, device: torch.device | str, resident: int) -> Iterator[StreamingFigures]:
    """Run a model of any kind with `stream_blocks`: blocks are the modules in its `ModuleList`s and `Sequential`s.

    A block in another is a part of it. All else of the model is on the device meanwhile, and all of it on the CPU
    afterwards. Errors are those of `stream_blocks`.
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


def streaming_bytes(block_bytes: Sequence[int], *, resident: int) -> int:
    """Return the bytes of weights that `stream_blocks` holds on the device, from the blocks' `slot_bytes` in order.

    Raises ValueError if `resident` is not positive.
    """
    kept = kept_blocks(len(block_bytes), resident=resident)
    streamed = [size for index, size in enumerate(block_bytes) if index not in kept]
    return sum(block_bytes[index] for index in kept) + min(resident, _SLOTS) * max(streamed, default=0)


def kept_blocks(count: int, *, resident: int) -> list[int]:
    """Return the numbers of the blocks, of `count`, that `stream_blocks` keeps on the device.

    Raises ValueError if `resident` is not positive.
    """
    if resident < 1:
        raise ValueError(f"resident={resident} is not positive: a block must be on the device to compute")
    if resident >= count:
        return list(range(count))
    kept = max(0, resident - _SLOTS)
    return [(2 * index + 1) * count // (2 * kept) for index in range(kept)]


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A block that is in a slot, or being copied there."""

    block: BlockWeights
    slot: Tensor
    copied: Future[torch.cuda.Event | None]


class _Streamer:
    """Lends blocks their weights on the device, and fetches those that come next."""

    def __init__(self, host: HostWeights, side: SideStream, figures: StreamingFigures) -> None:
        self._host = host
        self._side = side
        self._figures = figures
        self._kept: dict[BlockWeights, list[Tensor]] = {}
        self._ring: list[BlockWeights] = []
        self._slots: list[Tensor] = []
        self._arrivals: deque[_Arrival] = deque()
        self._next = 0
        self._lent: BlockWeights | None = None
        self._hooks: list[RemovableHandle] = []

    def keep(self, block: BlockWeights, run: Tensor) -> None:
        """Copy a block to a run of memory on the device, where it stays."""
        with torch.inference_mode(False), torch.no_grad():
            views = block.views(run)
            for view, weight in zip(views, block.host, strict=True):
                view.copy_(weight)
        self._kept[block] = views
        self._figures.copied_bytes += block.nbytes

    def rotate(self, ring: Sequence[BlockWeights], slots: Sequence[Tensor]) -> None:
        """Let all other blocks, one or more, go through slots, and begin to fill these."""
        self._ring, self._slots = list(ring), list(slots)
        self._restart(ring[0])

    def follow(self, modules: Sequence[nn.Module], blocks: Sequence[BlockWeights]) -> None:
        """Lend each block its weights whenever it is called."""
        for module, block in zip(modules, blocks, strict=True):
            self._hooks += [
                module.register_forward_pre_hook(partial(self._before, block)),
                module.register_forward_hook(partial(self._after, block), always_call=True),
            ]

    def close(self) -> None:
        """Leave the modules as they were, and let go of what is on the device."""
        while self._hooks:
            self._hooks.pop().remove()
        self._take_back()
        self._kept.clear()
        self._arrivals.clear()
        self._slots.clear()

    def _before(self, block: BlockWeights, _module: nn.Module, _inputs: object) -> None:
        # An interruption leaves a forward without the hook that follows it.
        self._take_back()
        if torch.is_grad_enabled() and any(weight.requires_grad for weight in block.host):
            raise RuntimeError(
                "weights that are streamed get no gradients: call the model under torch.no_grad() or inference_mode()"
            )
        tensors = self._kept[block] if block in self._kept else self._arrived(block)
        self._lent = block
        with torch.inference_mode(False):
            block.lend(tensors)

    def _after(self, block: BlockWeights, _module: nn.Module, _inputs: object, _result: object) -> None:
        if self._lent is not block:
            return
        self._take_back()
        if self._arrivals and self._arrivals[0].block is block:
            self._fetch_next(self._arrivals.popleft().slot)

    def _take_back(self) -> None:
        if self._lent is not None:
            self._lent.take_back()
            self._lent = None

    def _arrived(self, block: BlockWeights) -> list[Tensor]:
        """Return the weights of a streamed block on the device, fetched now if they are not on their way."""
        if all(arrival.block is not block for arrival in self._arrivals):
            self._restart(block)
        while self._arrivals[0].block is not block:
            self._fetch_next(self._arrivals.popleft().slot)
        try:
            self._side.wait(self._arrivals[0].copied.result())
        except Exception:
            self._arrivals.clear()
            raise
        with torch.inference_mode(False):
            return block.views(self._arrivals[0].slot)

    def _restart(self, block: BlockWeights) -> None:
        """Refill all slots, with this block and those after it."""
        self._arrivals.clear()
        self._next = self._ring.index(block)
        for slot in self._slots:
            self._fetch_next(slot)

    def _fetch_next(self, slot: Tensor) -> None:
        index, block = self._next, self._ring[self._next]
        # What was in the slot may still be computed with.
        copy = partial(self._copy, index, slot, self._side.mark())
        self._arrivals.append(_Arrival(block, slot, self._host.start(copy)))
        self._figures.copied_bytes += block.nbytes
        self._next = (index + 1) % len(self._ring)

    def _copy(self, index: int, slot: Tensor, free: torch.cuda.Event | None) -> torch.cuda.Event | None:
        with torch.inference_mode(False), torch.no_grad(), self._side.after(free):
            self._host.copy_to(index, slot)
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
