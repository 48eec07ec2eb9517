"""A stream beside the one that computes, on which weights are copied."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """A CUDA stream for copies. On the CPU, where each thing is done before the next begins, it does nothing.

    Args:
        device: of the copies and of the computation.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def mark(self) -> torch.cuda.Event | None:
        """Return a mark behind all that the current stream has been told to do."""
        if self._stream is None:
            return None
        # Who waits for a blocking event sleeps instead of asking again and again.
        mark = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        mark.record(torch.cuda.current_stream(self._stream.device))
        return mark

    def wait(self, mark: torch.cuda.Event | None) -> None:
        """Let what the current stream is told from now on wait for a mark; the caller does not wait."""
        if self._stream is not None and mark is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(mark)

    @contextmanager
    def after(self, mark: torch.cuda.Event | None) -> Iterator[None]:
        """Make this the current stream of the thread, waiting for a mark of another."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            self.wait(mark)
            yield

    def synchronise(self) -> None:
        """Wait until the device has done all that it was told, on any stream."""
        if self._stream is not None:
            torch.cuda.synchronize(self._stream.device)
