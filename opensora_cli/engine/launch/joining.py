"""How a rank joins the others."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_hook

from opensora_cli.core.exceptions import HardwareError
from opensora_cli.core.rank_link import beat, device_is_card, move
from opensora_cli.core.ranks import RankContext
from opensora_cli.parallel.watching import init_with_retry

T = TypeVar("T")

TIMEOUT_S = 600.0


def rank_device(context: RankContext, device_type: Literal["cpu", "cuda"]) -> torch.device:
    """Return the device of a rank: the card of its number on this machine, or the only one that it sees.

    Raises:
        HardwareError: it sees fewer cards.
    """
    if device_type == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if context.local_rank < count:
        return torch.device("cuda", context.local_rank)
    if count == 1:  # as Slurm hands them out with --gpus-per-task=1
        return torch.device("cuda", 0)
    raise HardwareError(
        f"rank {context.rank} is number {context.local_rank} on {socket.gethostname()}, which has {count} usable cards",
        hint="start no more ranks on a machine than it has cards",
    )


@contextmanager
def joined(
    context: RankContext, *, device_type: Literal["cpu", "cuda"], timeout_s: float = TIMEOUT_S
) -> Iterator[torch.device]:
    """Join the other ranks, and leave them at the end of the block; yields the device of this rank.

    A block that fails does not leave: its process is to end, and to say so first. Leaving would close the connections,
    and the others would complain about that before anybody knows the cause; with NCCL it can also wait forever.

    Args:
        context: which rank this is.
        device_type: chooses gloo for CPUs, and NCCL beside it for CUDA.
        timeout_s: after so many seconds a collective that not all ranks come to fails, and so does joining. The time
            between two steps is watched more closely, see `rank_link.beat`.

    Raises:
        HardwareError: there is no such card, or not all ranks came in time.
    """
    device = rank_device(context, device_type)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        device_is_card()
    beat("join")
    init_with_retry(
        device_type,
        host=context.master_addr,
        port=context.master_port,
        rank=context.rank,
        world_size=context.world_size,
        timeout_s=timeout_s,
    )
    # A first evaluation may take minutes: each of its parts is a sign that it goes on.
    with register_module_forward_hook(lambda *_: move()):
        yield device
    dist.destroy_process_group()


def agreed(value: T) -> T:
    """Return the value that rank 0 gives, on all ranks; it is pickled, so only for what osora itself has made."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]
