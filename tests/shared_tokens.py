"""Attention between ranks against attention of one process, on tensors that all ranks can draw."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_cli.memory.counting import TensorBytes
from opensora_cli.models.attention import BACKENDS
from opensora_cli.models.attention.torch_kernels import sdpa
from opensora_cli.parallel.mesh import ParallelMesh
from opensora_cli.parallel.sequence import sequence_attention
from opensora_cli.parallel.shares import MeshShape, SequenceLengths, span


def mesh_of(*, ring: int = 1, ulysses: int = 1, tensor: int = 1, device_type: str = "cpu") -> ParallelMesh:
    """Return the mesh of a shape."""
    return ParallelMesh(MeshShape(ring=ring, ulysses=ulysses, tensor=tensor), device_type=device_type)


def random_qkv(num_heads: int, tokens: int, *, dtype: torch.dtype = torch.float64, scale: float = 1.0) -> list[Tensor]:
    """Return q, k, v and the gradient of the result, each (2, num_heads, tokens, 8)."""
    generator = torch.Generator().manual_seed(2)
    return [
        (torch.randn(2, num_heads, tokens, 8, generator=generator, dtype=torch.float64) * scale).to(dtype)
        for _ in range(4)
    ]


def attention_errors(
    ring: int,
    ulysses: int,
    num_heads: int,
    tokens: tuple[int, ...],
    dtype: torch.dtype,
    scale: float,
    device_type: str = "cpu",
    backend: str = "sdpa",
) -> tuple[list[float], list[torch.dtype]]:
    """Compute on all ranks of the pool, and return the largest errors of the result and of the gradients of q, k, v.

    Args:
        ring: ranks along that axis.
        ulysses: the same.
        num_heads: any number from `ulysses`.
        tokens: of each rank.
        dtype: of the tensors; what is compared with is computed in fp64.
        scale: of the random numbers.
        device_type: where to compute.
        backend: of attention.
    """
    mesh = mesh_of(ring=ring, ulysses=ulysses, device_type=device_type)
    lengths = SequenceLengths.of_mesh(mesh)
    lengths.of_ranks = tokens
    own = span(tokens, dist.get_rank())
    *wholes, gradient = (part.to(device_type) for part in random_qkv(num_heads, sum(tokens), dtype=dtype, scale=scale))
    exact = [whole.double().clone().requires_grad_() for whole in wholes]
    expected = sdpa(*exact)
    expected.backward(gradient.double())

    # Laid out as a model lays them out: heads behind tokens.
    given = [whole[:, :, own].transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for whole in wholes]
    out = sequence_attention(BACKENDS[backend], mesh, lengths)(*given)
    assert out.shape == given[0].shape
    out.backward(gradient[:, :, own])
    pairs = [(out, expected), *((ours.grad, theirs.grad) for ours, theirs in zip(given, exact, strict=True))]
    assert all(theirs.abs().max() > 0 for _, theirs in pairs)
    errors = [(ours.double() - theirs[:, :, own]).abs().max().item() for ours, theirs in pairs]
    return errors, [out.dtype, *(tensor.grad.dtype for tensor in given)]


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


def attention_bytes(ring: int, ulysses: int, num_heads: int, tokens: int) -> tuple[int, int, int]:
    """Return the bytes of this rank's share of q, and the most that a forward and a backward pass hold beside q, k, v.

    The backward pass counts with what the forward pass has kept for it, and the result.
    """
    mesh = mesh_of(ring=ring, ulysses=ulysses)
    lengths = SequenceLengths.of_mesh(mesh)
    lengths.of_ranks = (tokens,) * mesh.shape.size
    given = [tensor.requires_grad_() for tensor in random_qkv(num_heads, tokens, dtype=torch.float32)[:3]]
    attention = sequence_attention(sdpa, mesh, lengths)
    with prompt_exchanges(), TensorBytes() as counted:
        out = attention(*given)
        forward = counted.peak_bytes
        counted.reset_peak()
        out.backward(torch.ones_like(out))
    return given[0].nbytes, forward, counted.peak_bytes
