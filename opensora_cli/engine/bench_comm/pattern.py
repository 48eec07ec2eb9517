"""Numbers that tell which rank wrote them and where, so that a wrong element is found exactly.

The element at index i that rank r writes is (i mod 31 + 1)(r + 1). Sums over ranks stay exact in float32 up to a
thousand ranks, and so do moved values in any dtype, since both sides round alike.
"""

import torch

_PERIOD = 31
_CHUNK = 1 << 22
"""Elements made at a time, so that checking 1 GiB needs no other GiB."""


def fill(values: torch.Tensor, *, scale: int, start: int = 0) -> None:
    """Write the pattern into a contiguous tensor.

    Args:
        values: gets it, in its dtype.
        scale: rank + 1, or the sum of that over ranks.
        start: index of the first element.
    """
    flat = values.view(-1)
    for begin in range(0, flat.numel(), _CHUNK):
        part = flat[begin : begin + _CHUNK]
        part.copy_(_numbers(start + begin, part.numel(), scale, part.device))


def count_wrong(values: torch.Tensor, *, scale: int, start: int = 0) -> int:
    """Return how many elements of a contiguous tensor are not those of `fill`."""
    flat = values.view(-1)
    wrong = 0
    for begin in range(0, flat.numel(), _CHUNK):
        part = flat[begin : begin + _CHUNK]
        expected = _numbers(start + begin, part.numel(), scale, part.device).to(part.dtype)
        wrong += int((part != expected).sum())
    return wrong


def count_wrong_pieces(values: torch.Tensor, *, ranks: int, start: int | None = None) -> int:
    """Return how many elements are wrong where equal pieces come from all ranks in order.

    Args:
        values: contiguous; piece r has the scale r + 1.
        ranks: how many pieces.
        start: index of the first element of every piece; None: the place of the piece in the whole.
    """
    pieces = values.view(ranks, -1)
    length = pieces.shape[1]
    return sum(
        count_wrong(piece, scale=rank + 1, start=rank * length if start is None else start)
        for rank, piece in enumerate(pieces)
    )


def sum_of_scales(ranks: int) -> int:
    """Return the scale of a sum over all ranks."""
    return ranks * (ranks + 1) // 2


def _numbers(start: int, count: int, scale: int, device: torch.device) -> torch.Tensor:
    # Only the remainder of the start matters, and keeps the indexes small.
    first = start % _PERIOD
    indexes = torch.arange(first, first + count, dtype=torch.int32, device=device)
    return (indexes % _PERIOD + 1).mul_(scale).float()
