"""What saving in the background takes: copies of the tensors on the host, and a thread."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from threading import Thread

import torch
from torch import Tensor


class HostCopies:
    """Copies of tensors in the host's memory, each in the memory of the last one of its name where that fits."""

    def __init__(self) -> None:
        self._buffers: dict[Hashable, Tensor] = {}

    @contextmanager
    def renewed(self) -> Iterator[Callable[[Hashable, Tensor], Tensor]]:
        """Yield what copies a tensor under a name.

        When the block has ended the copies are there, and the memory of names that it did not copy is free.
        """
        buffers: dict[Hashable, Tensor] = {}

        def copy(name: Hashable, tensor: Tensor) -> Tensor:
            buffer = self._buffers.get(name)
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            buffers[name] = buffer.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
            return buffer

        yield copy
        if any(buffer.is_pinned() for buffer in buffers.values()):
            torch.cuda.synchronize()
        self._buffers = buffers


class BackgroundJob:
    """One thing at a time that is done in a thread; Python waits for it before it exits."""

    def __init__(self) -> None:
        self._thread: Thread | None = None
        self.error: BaseException | None = None
        """What ended the last one, until it is taken."""

    def start(self, do: Callable[[], None]) -> None:
        """Begin; the one before must have been joined. Without a thread for it, it is done when this returns."""

        def run() -> None:
            try:
                do()
            except BaseException as error:
                self.error = error

        thread = Thread(target=run, name="osora-checkpoint")
        try:
            thread.start()
        except RuntimeError:  # as under `ulimit -u`: what is saved must not be lost for it
            run()
        else:
            self._thread = thread

    def join(self, seconds: float | None = None) -> bool:
        """Wait for its end, or so long; return whether it has ended. If not, it is still there to be waited for."""
        if self._thread is not None:
            self._thread.join(seconds)
            if self._thread.is_alive():
                return False
            self._thread = None
        return True

    def take_error(self) -> BaseException | None:
        """Return what went wrong, once."""
        error, self.error = self.error, None
        return error
