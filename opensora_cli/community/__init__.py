"""Adapters with the names that the Open-Sora community knows, in modules by topic. Nothing else imports them.

Arguments have the community's order and names; additional arguments are keyword-only.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opensora_cli.core.exceptions import RequestError


def refused(name: str, *, hint: str) -> Callable[..., NoReturn]:
    """Return a function for a name that makes no sense here. A call raises RequestError with a replacement as hint."""

    def refuse(*_args: object, **_kwargs: object) -> NoReturn:
        raise RequestError(f"{name} does not exist in osora", hint=hint)

    return refuse


def unwrapped(model: nn.Module | None) -> Any:
    """Return the module inside DDP, or the module itself."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def own_piece(whole: Tensor, device: torch.device | str | None = None) -> Tensor:
    """Return a copy of this rank's piece of a tensor."""
    rank, ranks = rank_and_count()
    flat = whole.detach().flatten()
    length = -(-flat.numel() // ranks)
    piece = torch.zeros(length, dtype=flat.dtype, device=device or flat.device)
    own = flat[rank * length : (rank + 1) * length]
    piece[: own.numel()].copy_(own)
    return piece


def rank_and_count() -> tuple[int, int]:
    """Return this rank and the number of ranks, (0, 1) without process groups."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
