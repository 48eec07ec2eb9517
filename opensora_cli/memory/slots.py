"""Sizes of block streaming, for plans: bytes of a block, blocks that stay on the device, and bytes of all of them."""

from collections.abc import Sequence

from torch import nn

ALIGNMENT = 512
"""Alignment of weights in bytes. It is that of torch's CUDA tensors, so that the same kernels are chosen."""
SLOTS = 2
"""Number of slots: one for the block that computes, and one for the next."""


def aligned(nbytes: int) -> int:
    """Return the aligned number of bytes of a weight in a run."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def slot_bytes(block: nn.Module) -> int:
    """Return the number of bytes for a block's weights in one run of memory. The block may be on the meta device."""
    return sum(aligned(weight.nbytes) for weight in block.parameters() if weight.device.type in ("cpu", "meta"))


def streaming_bytes(block_bytes: Sequence[int], *, resident: int) -> int:
    """Return the bytes that `stream_blocks` holds on the device for weights, from the blocks' `slot_bytes` in order.

    Raises ValueError if `resident` is not positive.
    """
    kept = kept_blocks(len(block_bytes), resident=resident)
    streamed = [size for index, size in enumerate(block_bytes) if index not in kept]
    return sum(block_bytes[index] for index in kept) + min(resident, SLOTS) * max(streamed, default=0)


def kept_blocks(count: int, *, resident: int) -> list[int]:
    """Return the indexes of the blocks, among `count`, that `stream_blocks` keeps on the device.

    Raises ValueError if `resident` is not positive.
    """
    if resident < 1:
        raise ValueError(f"resident={resident} is not positive: a block must be on the device to compute")
    if resident >= count:
        return list(range(count))
    kept = max(0, resident - SLOTS)
    return [(2 * index + 1) * count // (2 * kept) for index in range(kept)]
