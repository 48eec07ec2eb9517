"""One log of all that a process asks of its device, in the order in which it asks: what `checks` reads."""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

import opensora_cli

MAIN = "main"
"""The name of the thread that a rehearsal runs in."""
_PACKAGE = str(Path(opensora_cli.__file__).parent)
_TESTS = str(Path(__file__).parents[1])
_OWN = str(Path(__file__).parent)


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor that an operation reads or writes."""

    storage: int
    """Its number; none is given twice."""
    device: torch.device
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """The first of the bytes of its storage that it covers."""
    stop: int
    is_pinned: bool


@dataclass(frozen=True, slots=True)
class Entry:
    """Something that was asked."""

    thread: str
    """Of the host."""
    where: str
    """The line of the engine that asked, as `engine/generate/denoise.py:142`."""


@dataclass(frozen=True, slots=True)
class Operation(Entry):
    """A kernel or a copy. One of the host is done when the next entry of its thread begins."""

    name: str
    queue: str | None
    """The stream of the device that it is queued on; None: the host does it."""
    reads: tuple[Operand, ...]
    writes: tuple[Operand, ...]

    @property
    def operands(self) -> tuple[Operand, ...]:
        return (*self.reads, *self.writes)


@dataclass(frozen=True, slots=True)
class Copy(Operation):
    """A copy between the host and the device, or between devices."""

    is_blocking: bool
    """Whether the host waits for it, as it was asked; memory that is not pinned makes it wait in any case."""


@dataclass(frozen=True, slots=True)
class Collective(Operation):
    """An exchange with other ranks."""

    caller: str | None
    """The stream that asks; None: the host, of tensors of its own."""
    group: tuple[int, ...]
    """The ranks of its group, in their order there."""
    work: int
    """Number of its handle."""
    peer: int | None
    """The root, or the rank that gets or sends a message; in the run."""
    sent: tuple[int, ...]
    """Of an all-to-all, the elements that each rank gets; otherwise those of each tensor that is handed in."""
    received: tuple[int, ...]
    """Of an all-to-all, the elements that come from each rank; otherwise those of each tensor that is filled."""


@dataclass(frozen=True, slots=True)
class Marked(Entry):
    """A name for all that a thread or queue was asked before, such as an event or the end of a task."""

    mark: object
    agent: str


@dataclass(frozen=True, slots=True)
class Awaited(Entry):
    """What a thread or queue is asked from now on waits for a mark."""

    mark: object
    agent: str


@dataclass(frozen=True, slots=True)
class Synchronized(Entry):
    """The host waits for an event, a stream, or a device."""

    what: str
    """`event`, `stream`, `device`, or the operation that needs a number of the device."""
    mark: object
    """That of an event, or None."""
    queues: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Allocated(Entry):
    """A storage is there."""

    storage: int
    device: torch.device
    num_bytes: int
    queue: str | None


@dataclass(frozen=True, slots=True)
class Freed(Entry):
    """The last tensor of a storage is gone."""

    storage: int
    device: torch.device
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Lent(Entry):
    """A storage whose memory others get only when what is queued on a stream before it is freed is done."""

    storage: int
    queue: str


@dataclass(frozen=True, slots=True)
class Unlocked(Entry):
    """A storage of the host is not page-locked any more."""

    storage: int


@dataclass(frozen=True, slots=True)
class Stage(Entry):
    """A stage of the run began, did one unit of its work, or ended."""

    stage: str
    what: Literal["began", "advanced", "ended"]


@dataclass(slots=True)
class Log:
    """What one process asks, as rank `rank`."""

    rank: int = 0
    entries: list[Entry] = field(default_factory=list)
    thread: str = MAIN
    """That asks now."""
    live_bytes: dict[torch.device, int] = field(default_factory=dict)
    peak_bytes: dict[torch.device, int] = field(default_factory=dict)
    """Of each device, since `reset_peak` at the latest; those of the whole run are in the entries."""

    def asked(self, kind: type[Entry], *fields: Any, **named: Any) -> None:
        """Add what the current thread and line of the engine ask."""
        self.add(kind(self.thread, where(), *fields, **named))

    def add(self, entry: Entry) -> None:
        self.entries.append(entry)
        if isinstance(entry, Allocated | Freed):
            change = entry.num_bytes if isinstance(entry, Allocated) else -entry.num_bytes
            live = self.live_bytes.get(entry.device, 0) + change
            self.live_bytes[entry.device] = live
            self.peak_bytes[entry.device] = max(live, self.peak_bytes.get(entry.device, 0))

    @contextmanager
    def on_thread(self, name: str) -> Iterator[None]:
        before, self.thread = self.thread, name
        try:
            yield
        finally:
            self.thread = before


def lines_of(function: Callable[..., object]) -> frozenset[str]:
    """Return the lines of a function of the engine, as `where` names them."""
    lines, first = inspect.getsourcelines(function)
    file = inspect.getsourcefile(function) or ""
    return frozenset(f"{file[len(_PACKAGE) + 1 :]}:{first + index}" for index in range(len(lines)))


def where() -> str:
    """Return the line of the engine, or of a test, that is running."""
    frame = sys._getframe(1)
    found = ""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_PACKAGE):
            return f"{file[len(_PACKAGE) + 1 :]}:{frame.f_lineno}"
        if not found and file.startswith(_TESTS) and not file.startswith(_OWN):
            found = f"{file[len(_TESTS) + 1 :]}:{frame.f_lineno}"
        frame = frame.f_back
    return found
