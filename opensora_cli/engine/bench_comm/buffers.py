"""Memory that NCCL knows beforehand, where torch offers it, so that it need not copy into buffers of its own."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from opensora_cli.engine.bench_comm.timing import meet

PLAIN = "plain buffers"
REGISTERED = "buffers registered with NCCL"


@contextmanager
def communication_buffers(group: dist.ProcessGroup, device: torch.device) -> Iterator[str]:
    """Let tensors that are made inside the block lie in memory that is registered with NCCL; yield what they are.

    NCCL then sends from it without a copy, and over NVLink lets the switch add up (NCCL User Guide, User Buffer
    Registration). gloo, and a torch, NCCL or driver without it, get plain memory; so do all ranks where one of them
    gets it, because NCCL allows no mixture.

    Args:
        group: which communicates; all of its ranks call this.
        device: of this rank.
    """
    if device.type != "cuda":
        yield PLAIN
        return
    # Memory is registered with a communicator, which the first collective makes.
    meet(device, group)
    backend: Any = group._get_backend(device)
    pool = _registered_pool(backend)
    lacking = torch.tensor([int(pool is None)], device=device)
    dist.all_reduce(lacking, group=group)
    try:
        if int(lacking):
            yield PLAIN
        else:
            with torch.cuda.use_mem_pool(pool, device=device):
                yield REGISTERED
    finally:
        if pool is not None:
            torch.cuda.synchronize(device)
            backend.deregister_mem_pool(pool)


def _registered_pool(backend: Any) -> Any:
    """Return a pool whose memory a backend registers with its communicators, or None where that is not offered."""
    offered = ("mem_allocator", "register_mem_pool", "deregister_mem_pool")
    if not all(hasattr(backend, name) for name in offered):
        return None
    try:
        pool = torch.cuda.MemPool(backend.mem_allocator)
        backend.register_mem_pool(pool)
    except RuntimeError:  # such as a driver without the memory that NCCL allocates
        return None
    return pool
