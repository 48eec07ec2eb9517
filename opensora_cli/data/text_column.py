"""Many texts in two arrays, which worker processes share without copying them."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


class TextColumn:
    """An unchangeable sequence of texts.

    A list of a million strings is a million objects, whose reference counts make every worker process copy the memory
    that it shared with its parent. Here they are one array of bytes.

    Args:
        texts: the texts, in order.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        # Lone surrogates come from file names that are not UTF-8.
        encoded = [text.encode("utf-8", "surrogateescape") for text in texts]
        self._bytes: NDArray[np.uint8] = np.frombuffer(b"".join(encoded), dtype=np.uint8)
        self._ends = np.cumsum([len(text) for text in encoded], dtype=np.int64)

    def __len__(self) -> int:
        """Return how many texts there are."""
        return len(self._ends)

    def __getitem__(self, index: int) -> str:
        """Return one text, counted from 0."""
        if not 0 <= index < len(self._ends):
            raise IndexError(index)
        begin = int(self._ends[index - 1]) if index else 0
        return self._bytes[begin : int(self._ends[index])].tobytes().decode("utf-8", "surrogateescape")

    @property
    def num_empty(self) -> int:
        """How many of the texts are empty."""
        return int((np.diff(self._ends, prepend=0) == 0).sum())

    def arrays(self) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Return all bytes, and where each text ends."""
        return self._bytes, self._ends
