"""What the two readers, of pictures and of video containers, have in common."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch


class StoredFrame(Protocol):
    """A decoded frame in the form that its decoder likes."""

    @property
    def time(self) -> float:
        """Seconds at which it appears."""

    @property
    def duration(self) -> float:
        """Seconds for which it is shown, if nothing follows."""

    def to_rgb(self) -> torch.Tensor:
        """Return it as uint8 (H, W, 3), upright."""


@dataclass(frozen=True)
class VideoSource:
    """An open video: its frames, decoded as they are asked for, and its mean rate (complete once they are read)."""

    frames: Iterator[StoredFrame]
    fps: float
