"""A stand-in for the stream of copies, on a CPU: what is copied is not there before it is waited for."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from opensora_cli.memory import host_weights, streaming


class LateStream:
    """A stream that copies only when it is waited for; until then the target holds NaN."""

    def __init__(self) -> None:
        self.queued: list[Callable[[], None]] = []
        self.done = 0

    def mark(self) -> int:
        return len(self.queued)

    def wait(self, mark: int) -> None:
        for copy in self.queued[self.done : mark]:
            copy()
        self.done = max(self.done, mark)

    @contextmanager
    def after(self, _mark: int) -> Iterator[None]:
        yield

    def synchronize(self) -> None:
        self.wait(len(self.queued))


def install(monkeypatch: pytest.MonkeyPatch) -> list[LateStream]:
    """Let pinned weights be copied by such streams, and return those that are made.

    A slot is overwritten at once by what would be wrong for whatever still reads it.
    """
    made: list[LateStream] = []

    def late_stream(_device: torch.device) -> LateStream:
        made.append(LateStream())
        return made[-1]

    copy_to = host_weights._PinnedWeights.copy_to

    def later(self: host_weights._PinnedWeights, index: int, slot: Tensor) -> None:
        slot.fill_(255)  # NaN in any dtype
        made[-1].queued.append(lambda: copy_to(self, index, slot))

    monkeypatch.setattr(streaming, "SideStream", late_stream)
    monkeypatch.setattr(host_weights._PinnedWeights, "copy_to", later)
    return made
