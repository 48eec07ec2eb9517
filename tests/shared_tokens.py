"""Attention between ranks against attention of one process, on tensors that all ranks can draw."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_cli.models.attention import BACKENDS
from opensora_cli.models.attention.torch_kernels import sdpa
from opensora_cli.parallel.mesh import ParallelMesh
from opensora_cli.parallel.sequence import open_exchange, sequence_attention
from opensora_cli.parallel.shares import ExchangePlan, MeshShape, SequenceLengths, span


def mesh_of(*, ring: int = 1, ulysses: int = 1, tensor: int = 1, device_type: str = "cpu") -> ParallelMesh:
    return ParallelMesh(MeshShape(ring=ring, ulysses=ulysses, tensor=tensor), device_type=device_type)


def random_qkv(num_heads: int, tokens: int, *, dtype: torch.dtype = torch.float64, scale: float = 1.0) -> list[Tensor]:
    """Return q, k, v and the gradient of the result, each (2, num_heads, tokens, 8)."""
    generator = torch.Generator().manual_seed(2)
    return [
        (torch.randn(2, num_heads, tokens, 8, generator=generator, dtype=torch.float64) * scale).to(dtype)
        for _ in range(4)
    ]


@dataclass(frozen=True)
class Attended:
    """Attention of a rank against that of one process."""

    errors: list[float]
    """Largest errors of the result and of the gradients of q, k and v, over the largest values."""
    dtypes: set[torch.dtype]
    sent_bytes: tuple[int, int]
    """Bytes of all-to-alls in the forward pass, and in both."""


def attended(
    ring: int,
    ulysses: int,
    num_heads: int,
    tokens: Sequence[int],
    dtype: torch.dtype,
    *,
    scale: float = 1.0,
    device_type: str = "cpu",
    backend: str = "sdpa",
    plan: ExchangePlan | None = None,
    backward: bool = True,
) -> Attended:
    """Compute on all ranks of the pool, and compare with fp64. `tokens` are those of each rank; `scale` multiplies q,
    k and v.
    """
    mesh = mesh_of(ring=ring, ulysses=ulysses, device_type=device_type)
    between = open_exchange(mesh, plan or ExchangePlan())
    lengths = SequenceLengths.of_mesh(mesh)
    lengths.of_ranks = tuple(tokens)
    own = span(tokens, dist.get_rank())
    *wholes, gradient = (part.to(device_type) for part in random_qkv(num_heads, sum(tokens), dtype=dtype, scale=scale))
    exact = [whole.double().clone().requires_grad_() for whole in wholes]
    expected = sdpa(*exact)
    expected.backward(gradient.double())
    exchange, sent = dist.all_to_all_single, list[int]()

    def counting(received: Tensor, flat: Tensor, expected: list[int], parts: list[int], **kwargs: Any) -> Any:
        sent.append((sum(parts) - parts[kwargs["group"].rank()]) * flat.itemsize)
        return exchange(received, flat, expected, parts, **kwargs)

    # Laid out as a model lays them out: heads behind tokens.
    given = [whole[:, :, own].transpose(1, 2).contiguous().transpose(1, 2) for whole in wholes]
    given = [share.requires_grad_(backward) for share in given]
    with patch.object(dist, "all_to_all_single", counting):
        attention = sequence_attention(BACKENDS[backend], mesh, lengths, exchange=between)
        out = attention(*given)
        forward = sum(sent)
        if backward:
            out.backward(gradient[:, :, own])
    assert out.shape == given[0].shape
    pairs = [(out.detach(), expected.detach())]
    pairs += [(ours.grad, theirs.grad) for ours, theirs in zip(given, exact, strict=True) if backward]
    errors = [float((ours.double() - theirs[:, :, own]).abs().max() / theirs.abs().max()) for ours, theirs in pairs]
    return Attended(errors, {ours.dtype for ours, _ in pairs}, (forward, sum(sent)))


@contextmanager
def prompt_exchanges() -> Iterator[None]:
    """Let exchanges go from rank to rank: gloo holds the tensors of its all-to-all for a while after its end."""

    def exchange(
        received: Tensor, sent: Tensor, expected: list[int], lengths: list[int], *, group: dist.ProcessGroup
    ) -> None:
        transfers = []
        for peer, (place, part) in enumerate(zip(received.split(expected), sent.split(lengths), strict=True)):
            if peer == dist.get_rank(group):
                place.copy_(part)
            else:
                transfers.append(dist.P2POp(dist.isend, part, group=group, group_peer=peer))
                transfers.append(dist.P2POp(dist.irecv, place, group=group, group_peer=peer))
        for work in dist.batch_isend_irecv(transfers):
            work.wait()

    with patch.object(dist, "all_to_all_single", exchange):
        yield
