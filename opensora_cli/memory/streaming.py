"""Block streaming: a model runs with few blocks on the device, and the next one's weights are copied meanwhile."""

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
from opensora_cli.memory.host_weights import BlockWeights, HostSource, HostWeights, open_host_weights

_SLOTS = 2
"""One for the block that computes, one for the next."""


@dataclass(slots=True)
class StreamingFigures:
    """What streaming takes."""

    device_bytes: int = 0
    """Held on the device for weights, from beginning to end."""
    host_bytes: int = 0
    """Bytes taken in the host's memory, beside or instead of that which the weights were in."""
    copied_bytes: int = 0
    """Copied to the device so far; copies that have started count."""
    runs: list[Tensor] = field(default_factory=list)
    """The memory on the device, until the end."""


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

    All of these but two stay there, spread evenly over the blocks. The others go through two slots, round and round: as
    soon as a block has computed, the one after the next takes its place, copied on a stream of its own while the next
    computes. With one resident block there is one slot, and nothing overlaps. Blocks may be called in any order and be
    left out, but only that of the stacks is fast. The results are those of a model that is on the device as a whole.

    A block has its weights on the device during its forward only; at any other time its parameters are on the CPU,
    under their names. With `pinned` they are other tensors from then on, of the same values. The figures that it yields
    are kept up to date. When the context ends, the device's memory is free again.

    Where gradients are recorded, each block needs a checkpoint (`set_grad_checkpoint`), so that nothing keeps its
    weights until backward. They come again when it is computed again, from the last block to the first, and stay until
    the one before it is: by then autograd, which goes back in the reverse order of forward, is done with them.

    Args:
        stacks: the blocks, in the order in which they run; their parameters are on the CPU. Everything else of the
            model is on the device, and buffers of blocks are moved there.
        resident: how many blocks' weights may be on the device at a time, from 1; with as many as there are all stay.
        source: where the weights of the blocks that don't stay wait: `pinned` is one page-locked copy; `mapped` is no
            copy, but a thread that reads them where they are.
        dtype: that the floating-point weights are computed in, to which they are cast as they are copied, and for good
            where they are `pinned`; None: their own. On the CPU alone.
        trains: leave weights that require gradients where they are: on the device.
        without: modules inside the blocks whose weights stay where they are, since nothing computes with them there.

    Raises:
        ValueError: `resident` is not positive, or weights are on the meta device.
        HardwareError: memory cannot be page-locked.
        RuntimeError: (from a call of the model) gradients are recorded for weights that are streamed, or, with
            `trains`, through blocks without a checkpoint.
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
        # Last of all: only when no copy is under way may the memory go to others.
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


@dataclass(slots=True)
class _Slot:
    """A place on the device for one block at a time."""

    run: Tensor
    number: int | None = None
    """Of the block that is in it, or being copied there; None: it is empty."""
    copied: Future[torch.cuda.Event | None] | None = None


class _Streamer:
    """Lends blocks their weights on the device, and fetches those that come next."""

    def __init__(self, host: HostWeights, side: SideStream, figures: StreamingFigures, *, trains: bool) -> None:
        self._host = host
        self._side = side
        self._figures = figures
        self._trains = trains
        self._kept: dict[BlockWeights, list[Tensor]] = {}
        self._ring: list[BlockWeights] = []
        self._slots: list[_Slot] = []
        self._lent: BlockWeights | None = None
        self._hooks: list[RemovableHandle] = []
        self._modules: Sequence[nn.Module] = ()

    def keep(self, block: BlockWeights, run: Tensor) -> None:
        """Copy a block to a run of memory on the device, where it stays."""
        with torch.inference_mode(False), torch.no_grad():
            views = block.views(run)
            for view, weight in zip(views, block.host, strict=True):
                view.copy_(weight)
        self._kept[block] = views
        self._figures.copied_bytes += block.nbytes

    def rotate(self, ring: Sequence[BlockWeights], runs: Sequence[Tensor]) -> None:
        """Let all other blocks, more than there are `runs`, go through these, and begin to fill them."""
        self._ring, self._slots = list(ring), [_Slot(run) for run in runs]
        self._fetch_ahead(0)

    def follow(self, modules: Sequence[nn.Module], blocks: Sequence[BlockWeights]) -> None:
        """Lend each block its weights whenever it is called, or computed again in backward."""
        self._modules = modules
        for module, block in zip(modules, blocks, strict=True):
            vars(module)[RECOMPUTING] = partial(self._recomputing, block)
            self._hooks += [
                module.register_forward_pre_hook(partial(self._before, block)),
                module.register_forward_hook(partial(self._after, block), always_call=True),
            ]

    def close(self) -> None:
        """Leave the modules as they were, and let go of what is on the device."""
        while self._hooks:
            self._hooks.pop().remove()
        for module in self._modules:
            vars(module).pop(RECOMPUTING, None)
        self._take_back()
        self._kept.clear()
        self._slots.clear()

    def _before(self, block: BlockWeights, module: nn.Module, _inputs: object) -> None:
        if torch.is_grad_enabled() and any(weight.requires_grad for weight in block.host):
            raise RuntimeError(
                "weights that are streamed get no gradients: call the model under torch.no_grad() or inference_mode()"
            )
        if torch.is_grad_enabled() and self._trains and not is_checkpointed(module):
            raise RuntimeError("blocks that are streamed while gradients are recorded must be checkpointed")
        self._lend(block)

    def _after(self, block: BlockWeights, _module: nn.Module, _inputs: object, _result: object) -> None:
        if self._lent is not block:
            return
        self._take_back()
        if block not in self._kept:
            self._fetch_ahead(self._ring.index(block) + 1)

    @contextmanager
    def _recomputing(self, block: BlockWeights) -> Iterator[None]:
        self._lend(block, backwards=True)
        try:
            yield
        finally:
            # What autograd has saved by now holds the memory, not the parameters.
            self._take_back()

    def _lend(self, block: BlockWeights, *, backwards: bool = False) -> None:
        # An interruption leaves a forward without the hook that follows it.
        self._take_back()
        tensors = self._kept[block] if block in self._kept else self._arrived(block, backwards=backwards)
        self._lent = block
        with torch.inference_mode(False):
            block.lend(tensors)

    def _take_back(self) -> None:
        if self._lent is not None:
            self._lent.take_back()
            self._lent = None

    def _arrived(self, block: BlockWeights, *, backwards: bool) -> list[Tensor]:
        """Return the weights of a streamed block on the device, fetched now if they are not on their way."""
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
        """Begin to fetch this block of the ring and those that are computed after it, as far as there are slots.

        A pass without gradients is followed by one like it. One with gradients goes back where it ends, and the next
        one begins where that ends: the blocks that are in the slots then are the first ones again.
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
        # What was in the slot may still be computed with.
        copy = partial(self._copy, number, slot.run, self._side.mark())
        slot.number = None
        slot.copied = self._host.start(copy)
        slot.number = number
        self._figures.copied_bytes += self._ring[number].nbytes

    def _copy(self, number: int, run: Tensor, free: torch.cuda.Event | None) -> torch.cuda.Event | None:
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
