"""Computation over some tokens of long sequences at a time, so that intermediate tensors stay small.

All layers except attention treat tokens separately: norms, projections and MLPs of a chunk match those of the whole
sequence up to rounding.
"""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor


def spans(length: int, size: int | None) -> Iterator[slice]:
    """Yield slices of at most `size` of `length` tokens. None means one slice of all. No tokens give an empty slice."""
    if size is None or size >= length:
        # Without `range`, for which torch.compile would compile each length anew.
        return iter((slice(0, length),))
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def cut(whole: Tensor, span: slice, *, dim: int = 1) -> Tensor:
    """Return the span of a sequence. A full span is no view, whose gradient would be a copy."""
    length: int = span.stop - span.start
    return whole if length == whole.shape[dim] else whole.narrow(dim, span.start, length)


def over_tokens(compute: Callable[..., Tensor], *wholes_BN: Tensor, size: int | None) -> Tensor:
    """Return `compute(*wholes_BN)`, computed over `size` tokens at a time; None is all at once.

    `compute` treats every token by itself. All `wholes_BN` are (B, N, ...) with one N, which is also that of the
    result.
    """
    length = wholes_BN[0].shape[1]
    pieces = ((compute(*(cut(whole, span) for whole in wholes_BN)),) for span in spans(length, size))
    return joined(pieces, length=length, dim=1)[0]


def joined(pieces: Iterable[tuple[Tensor, ...]], *, length: int, dim: int) -> tuple[Tensor, ...]:
    """Join several sequences of `length` tokens each, in place without gradients; `pieces` has their spans in order."""
    if torch.is_grad_enabled():
        columns = zip(*pieces, strict=True)
        return tuple(parts[0] if len(parts) == 1 else torch.cat(parts, dim) for parts in columns)
    wholes: tuple[Tensor, ...] = ()
    end = 0
    for parts in pieces:
        begin, end = end, end + parts[0].shape[dim]
        if end - begin == length:
            return parts
        if not wholes:
            wholes = tuple(part.new_empty(*part.shape[:dim], length, *part.shape[dim + 1 :]) for part in parts)
        _write(parts, wholes, begin, dim)
        del parts
    return wholes


def _write(parts: tuple[Tensor, ...], wholes: tuple[Tensor, ...], begin: int, dim: int) -> None:
    for part, whole in zip(parts, wholes, strict=True):
        whole.narrow(dim, begin, part.shape[dim]).copy_(part)
