"""Messages between ranks as JSON, so that received data is never executed.

`torch.distributed` sends objects as pickles: anyone with access to the port of a run could send a malicious one.
"""

import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_cli.core.device import current_gpu

Json = Any
"""JSON value: None, boolean, number, text, list, or mapping with text keys."""


def broadcast_json(value: Json, group: dist.ProcessGroup | None = None) -> Json:
    """Return the first rank's value on all ranks of the group. Tuples arrive as lists. None means the default group."""
    device = _device(group)
    is_first = dist.get_rank(group) == 0
    text = _encoded(value, device) if is_first else None
    length = torch.tensor([0 if text is None else len(text)], device=device)
    dist.broadcast(length, group_src=0, group=group)
    if text is None:
        text = torch.empty(int(length), dtype=torch.uint8, device=device)
    dist.broadcast(text, group_src=0, group=group)
    return value if is_first else _decoded(text)


def all_gather_json(value: Json, group: dist.ProcessGroup | None = None) -> list[Json]:
    """Return the values of all ranks, in the order of ranks. None means the default group."""
    device = _device(group)
    text = _encoded(value, device)
    lengths = [torch.empty(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, torch.tensor([len(text)], device=device), group=group)
    longest = max(map(int, lengths))
    texts = [torch.empty(longest, dtype=torch.uint8, device=device) for _ in lengths]
    dist.all_gather(texts, torch.nn.functional.pad(text, (0, longest - len(text))), group=group)
    return [_decoded(text[: int(length)]) for text, length in zip(texts, lengths, strict=True)]


def broadcast_tensors(tensors: Sequence[Tensor] | None, *, device: torch.device) -> list[Tensor]:
    """Return rank 0's tensors, each on the device of its rank; the tensors of other ranks are ignored."""
    is_main = dist.get_rank() == 0
    outlines = [(tensor.shape, str(tensor.dtype).removeprefix("torch.")) for tensor in tensors or ()]
    outlines = broadcast_json(outlines if is_main else [])
    if is_main:
        received = [tensor.to(device).contiguous() for tensor in tensors or ()]
    else:
        received = [torch.empty(shape, dtype=getattr(torch, dtype), device=device) for shape, dtype in outlines]
    for tensor in received:
        dist.broadcast(tensor, src=0)
    return received


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """Return the device for messages of the group: the CPU unless its only backend is for GPUs."""
    if "gloo" in dist.get_backend_config(group):
        return torch.device("cpu")
    return current_gpu()


def _encoded(value: Json, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)


def _decoded(text: Tensor) -> Json:
    return json.loads(bytes(text.cpu().numpy()))
