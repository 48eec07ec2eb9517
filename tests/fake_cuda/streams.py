"""Streams, events and threads that do nothing, and log who waits for whom."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import count
from typing import Any, TypeVar

import torch
from fake_cuda.log import Awaited, Log, Marked, Synchronized

T = TypeVar("T")


class Queues:
    """The streams of a process: which is current in which thread, and their names in the log."""

    def __init__(self, log: Log, device: torch.device) -> None:
        self.log = log
        self.device = device
        self.all: list[FakeStream] = []
        self._of_autograd: list[FakeEvent] = []
        self.events = count()
        self.tasks = count()
        # Types, as those of torch are: annotations name them.
        self.stream = type("Stream", (FakeStream,), {"queues": self})
        self.event = type("Event", (FakeEvent,), {"queues": self})
        self.default: FakeStream = self.stream(device)
        self._current: dict[str, FakeStream] = {}

    @property
    def current(self) -> "FakeStream":
        return self._current.get(self.log.thread, self.default)

    @contextmanager
    def using(self, stream: "FakeStream | None") -> Iterator[None]:
        if stream is None:
            yield
            return
        before = self.current
        self._current[self.log.thread] = stream
        try:
            yield
        finally:
            self._current[self.log.thread] = before

    def use(self, stream: "FakeStream") -> None:
        self._current[self.log.thread] = stream

    def autograd_current(self) -> int:
        """Return the number of the current stream: this and the next three are what autograd asks for."""
        return self.current.cuda_stream

    def autograd_use(self, stream: int) -> None:
        self.use(self.all[stream])

    def autograd_record(self, stream: int) -> int:
        self._of_autograd.append(self.all[stream].record_event())
        return len(self._of_autograd) - 1

    def autograd_wait(self, event: int, stream: int) -> None:
        self._of_autograd[event].wait(self.all[stream])

    def synchronize(self) -> None:
        self.log.asked(Synchronized, "device", None, tuple(each.queue for each in self.all))


class FakeStream:
    """Stands in for a stream of CUDA, in the subclass of a process."""

    queues: Queues

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        asked = torch.device("cuda" if device is None else device)
        self.device = self.queues.device if asked.index is None else asked
        self.cuda_stream = len(self.queues.all)
        self.queue = f"{self.device}/{self.cuda_stream}"
        self.queues.all.append(self)

    def record_event(self, event: "FakeEvent | None" = None) -> "FakeEvent":
        event = event or self.queues.event()
        event.record(self)
        return event

    def wait_event(self, event: "FakeEvent") -> None:
        event.wait(self)

    def wait_stream(self, other: "FakeStream") -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.queues.log.asked(Synchronized, "stream", None, (self.queue,))

    def query(self) -> bool:
        return True

    def __enter__(self) -> "FakeStream":
        self._entered = self.queues.using(self)
        self._entered.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._entered.__exit__(*error)


class FakeEvent:
    """Stands in for an event of CUDA, in the subclass of a process."""

    queues: Queues

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self._mark, self._timed = ("event", next(self.queues.events)), enable_timing
        self._is_recorded = False

    def record(self, stream: FakeStream | None = None) -> None:
        self._is_recorded = True
        self.queues.log.asked(Marked, self._mark, (stream or self.queues.current).queue)

    def wait(self, stream: FakeStream | None = None) -> None:
        # One that was never recorded is waited for by nobody.
        if self._is_recorded:
            self.queues.log.asked(Awaited, self._mark, (stream or self.queues.current).queue)

    def synchronize(self) -> None:
        if self._is_recorded:
            self.queues.log.asked(Synchronized, "event", self._mark, ())

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "FakeEvent") -> float:
        if not (self._timed and end._timed):
            raise RuntimeError("both events must be created with enable_timing=True")
        return 1.0


class InlineExecutor:
    """Stands in for a thread: its tasks run at once, in one order, and the log has them as those of another thread."""

    def __init__(self, queues: Queues, max_workers: int | None = None, thread_name_prefix: str = "worker") -> None:
        self._queues = queues
        self._name = thread_name_prefix or "worker"

    def submit(self, task: Callable[..., T], *arguments: Any) -> "Future[T]":
        log, number = self._queues.log, next(self._queues.tasks)
        log.asked(Marked, ("handed over", number), log.thread)
        done: Future[T] = _LoggedFuture(log, ("done", number))
        with log.on_thread(self._name):
            log.asked(Awaited, ("handed over", number), self._name)
            try:
                done.set_result(task(*arguments))
            except BaseException as error:
                done.set_exception(error)
            log.asked(Marked, ("done", number), self._name)
        return done

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        log = self._queues.log
        if wait:
            done = ("done", next(self._queues.tasks))
            log.add(Marked(self._name, "", done, self._name))
            log.asked(Awaited, done, log.thread)

    def __enter__(self) -> "InlineExecutor":
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()


class _LoggedFuture(Future[T]):
    def __init__(self, log: Log, mark: object) -> None:
        super().__init__()
        self._log, self._mark = log, mark

    def result(self, timeout: float | None = None) -> T:
        self._log.asked(Awaited, self._mark, self._log.thread)
        return super().result(timeout)
