"""Ring attention (Liu et al. 2023): queries stay on their rank, and keys and values rotate.

Each rank holds some tokens. At every step it attends to its present keys and values. Meanwhile it sends them to the
next rank and receives those of the previous rank. No rank holds more than three shares of keys at the same time.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from opensora_cli.core.attention import AttentionBackend, AttentionFn, PartKernel
from opensora_cli.core.device import accumulation_dtype
from opensora_cli.core.exceptions import RequestError
from opensora_cli.parallel.shares import SequenceLengths


class RingAttention:
    """Self-attention over tokens that are divided between the ranks of a ring, with at least one token on each.

    Partial results are merged, and gradients summed, in at least fp32. In backward, keys and values rotate again,
    followed by their gradients, so that no more is saved than by attention of one process. `lengths` has the number of
    tokens of each rank (`of_ring`) at each call. Raises RequestError if the attention does not compute in parts.
    """

    def __init__(self, attention: AttentionFn, group: dist.ProcessGroup, lengths: SequenceLengths) -> None:
        if not isinstance(attention, AttentionBackend) or attention.part_kernel is None:
            name = attention.name if isinstance(attention, AttentionBackend) else repr(attention)
            raise RequestError(f"attention={name} does not compute in parts, which ring attention needs")
        self._part_kernel = attention.part_kernel
        self._group = group
        self._lengths = lengths

    def __call__(self, q_BHND: Tensor, k_BHND: Tensor, v_BHND: Tensor, /) -> Tensor:
        """Return attention of this rank's queries to the keys of all ranks, (B, H, N, D).
        Raises ValueError if the tokens are not as many as `lengths` says, or a rank has none.
        """
        lengths, rank = self._lengths.of_ring, dist.get_rank(self._group)
        tokens = {tensor.shape[2] for tensor in (q_BHND, k_BHND, v_BHND)}
        if len(lengths) != dist.get_world_size(self._group) or tokens != {lengths[rank]} or not all(lengths):
            raise ValueError(f"{sorted(tokens)} tokens at place {rank} of a ring whose ranks should have {lengths}")
        # Outside of the autograd function, so that it saves only the contiguous tensors.
        k_BHND, v_BHND = k_BHND.contiguous(), v_BHND.contiguous()
        kernel = self._part_kernel(q_BHND, k_BHND, v_BHND)
        out: Tensor = _Ring.apply(q_BHND, k_BHND, v_BHND, kernel, self._group, lengths)  # type: ignore[no-untyped-call]
        return out


def merge(out_BHND: Tensor, lse_BHN: Tensor, part_BHND: Tensor, part_lse_BHN: Tensor) -> Tensor:
    """Merge one more part into `out_BHND`, in place, and return the new log-sum-exp.

    It computes no exponential of a score, which could overflow, but only a weight in 0..1 and a stable `logaddexp`.
    `out_BHND` is in at least fp32, and the part in any dtype.
    """
    weight_BHN1 = torch.sigmoid(part_lse_BHN - lse_BHN)[..., None].to(out_BHND.dtype)
    out_BHND.lerp_(part_BHND.to(out_BHND.dtype), weight_BHN1)
    return torch.logaddexp(lse_BHN, part_lse_BHN)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kernel: PartKernel,
        group: dist.ProcessGroup,
        lengths: tuple[int, ...],
    ) -> Tensor:
        out: Tensor | None = None
        for tensors in _going_round([k, v], group, lengths):
            part, part_lse = kernel.attend(q, tensors[0], tensors[1])
            if out is None:
                out, lse = part.to(accumulation_dtype(q.dtype)), part_lse
            else:
                lse = merge(out, lse, part, part_lse)
            # Free the part before the next one is computed.
            del part
        assert out is not None
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.kernel, ctx.group, ctx.lengths = kernel, group, lengths
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        group, lengths = ctx.group, ctx.lengths
        dtype = accumulation_dtype(q.dtype)
        grad_q = torch.zeros_like(q, dtype=dtype)
        coming: _Coming | None = None
        for step, tensors in zip(range(len(lengths)), _going_round([k, v], group, lengths), strict=True):
            part_q, *sums = ctx.kernel.gradients(gradient, q, tensors[0], tensors[1], out, lse)
            grad_q += part_q
            del part_q
            if coming is None:
                sums = [part.to(dtype).contiguous() for part in sums]
            else:
                sums = [before.add_(part) for before, part in zip(coming.wait(), sums, strict=True)]
            # Gradients follow their keys and values, and finally return to the rank that these came from.
            coming = _pass_on(sums, group, lengths, step) if len(lengths) > 1 else None
        grad_k, grad_v = sums if coming is None else coming.wait()
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), None, None, None


class _Coming:
    """Tensors that are being received from the previous rank, and sent to the next one."""

    def __init__(self, works: list[dist.Work], sent: list[Tensor], received: list[Tensor]) -> None:
        self._works = works
        # Tensors that are being sent must stay alive, even without other references.
        self._sent = sent
        self._received = received

    def wait(self) -> list[Tensor]:
        """Return the received tensors, and drop all references to them. Call this once."""
        for work in self._works:
            work.wait()
        received = self._received
        self._works, self._sent, self._received = [], [], []
        return received


def _going_round(tensors: list[Tensor], group: dist.ProcessGroup, lengths: tuple[int, ...]) -> Iterator[list[Tensor]]:
    """Yield this rank's tensors, then those of the previous rank, and so on, while the next ones are being received.

    It yields the same list with new contents each time, so that a reference to it keeps no old tensors alive.
    """
    held = list(tensors)
    for step in range(len(lengths) - 1):
        coming = _pass_on(held, group, lengths, step)
        yield held
        held[:] = coming.wait()
    yield held


def _pass_on(tensors: list[Tensor], group: dist.ProcessGroup, lengths: tuple[int, ...], step: int) -> _Coming:
    """Start sending tensors that have moved `step` places to the next rank, and receiving those of the previous one.

    All ranks start all transfers in the same order, which matches them.
    """
    rank, ranks = dist.get_rank(group), len(lengths)
    length = lengths[(rank - step - 1) % ranks]
    received = [tensor.new_empty(*tensor.shape[:2], length, tensor.shape[3]) for tensor in tensors]
    transfers = [dist.P2POp(dist.isend, tensor, group=group, group_peer=(rank + 1) % ranks) for tensor in tensors]
    transfers += [dist.P2POp(dist.irecv, tensor, group=group, group_peer=(rank - 1) % ranks) for tensor in received]
    return _Coming(dist.batch_isend_irecv(transfers), list(tensors), received)
