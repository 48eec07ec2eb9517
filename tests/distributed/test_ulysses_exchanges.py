"""Ulysses attention by every kind of exchange: it sends what the plan counts, and gives what one rank does."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from shared_tokens import mesh_of, random_qkv

from opensora_cli.engine.components.parallelize import exchanged_bytes
from opensora_cli.models.attention.torch_kernels import sdpa
from opensora_cli.models.mmdit.config import MMDiTConfig
from opensora_cli.parallel.exchanges import open_stages
from opensora_cli.parallel.sequence import sequence_attention
from opensora_cli.parallel.shares import ExchangePlan, MeshShape, SequenceLengths, shares, span

HEADS, VIDEO, TEXT = 8, 13, 5
TWO_MACHINES = ExchangePlan(inner=2)


def _planned(plan: ExchangePlan, ranks: int, heads: int, *, blocks: int, **sizes: int) -> dict[str, int]:
    """Return the planned bytes for a model with this number of blocks and of heads, 8 wide."""
    config = MMDiTConfig(
        hidden_size=8 * heads, num_heads=heads, axes_dim=(4, 2, 2), depth=blocks, depth_single_blocks=0
    )
    return exchanged_bytes(plan, MeshShape(ulysses=ranks), config, **sizes)


def _attended(plan: ExchangePlan, backward: bool) -> tuple[float, float, int, int]:
    """Return the largest errors of result and gradient over what is largest, and the bytes sent forward and in all."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    mesh = mesh_of(ulysses=ranks)
    stages = open_stages(mesh, plan)
    lengths = SequenceLengths.of_mesh(mesh)
    lengths.of_ranks = tuple(map(sum, zip(shares(VIDEO, ranks), shares(TEXT, ranks)[::-1], strict=True)))
    own = span(lengths.of_ranks, rank)
    *wholes, gradient = random_qkv(HEADS, VIDEO + TEXT, dtype=torch.float32)
    wholes = [whole[:1].requires_grad_() for whole in wholes]
    gradient = gradient[:1]
    expected = sdpa(*wholes)
    expected.backward(gradient)
    exchange, sent = dist.all_to_all_single, []

    def counting(received: Any, flat: torch.Tensor, expected: Any, parts: list[int], **kwargs: Any) -> Any:
        sent.append((sum(parts) - parts[kwargs["group"].rank()]) * flat.itemsize)
        return exchange(received, flat, expected, parts, **kwargs)

    given = [whole.detach()[:, :, own].clone().requires_grad_(backward) for whole in wholes]
    with patch.object(dist, "all_to_all_single", counting):
        out = sequence_attention(sdpa, mesh, lengths, plan=plan, stages=stages)(*given)
        forward = sum(sent)
        if backward:
            out.backward(gradient[:, :, own])
    error = float((out - expected[:, :, own]).detach().abs().max() / expected.abs().max())
    of_gradient = 0.0
    if backward:
        pairs = [(ours.grad, whole.grad) for ours, whole in zip(given, wholes, strict=True)]
        of_gradient = max(float((ours - theirs[:, :, own]).abs().max() / theirs.abs().max()) for ours, theirs in pairs)
    return error, of_gradient, forward, sum(sent)


@pytest.mark.parametrize(
    ("ranks", "plan", "tolerance"),
    [
        (2, ExchangePlan(), 1e-5),
        (4, ExchangePlan(), 1e-5),
        (4, TWO_MACHINES, 1e-5),
        # Of v, and of scores that are sums of rounded products.
        (2, ExchangePlan(wire="bf16"), 1e-2),
        (4, ExchangePlan(wire="fp8"), 0.15),
        (4, ExchangePlan(inner=2, wire="bf16"), 1e-2),
    ],
)
def test_bytes_and_results(pool: Callable[[int], Any], ranks: int, plan: ExchangePlan, tolerance: float) -> None:
    answers = pool(ranks).run(_attended, plan, True)
    planned = sum(_planned(plan, ranks, HEADS, blocks=1, video_tokens=VIDEO, text_tokens=TEXT, itemsize=4).values())
    assert sum(forward for _, _, forward, _ in answers) == planned
    assert sum(both for _, _, _, both in answers) == 2 * planned
    for error, of_gradient, _, _ in answers:
        assert error < tolerance
        assert of_gradient < tolerance
    if plan.wire is not None:
        # The rounding is there.
        assert max(error for error, *_ in answers) > tolerance / 200


@pytest.mark.parametrize("wire", [None, "fp8"])
def test_chunks_send_the_same(pool: Callable[[int], Any], wire: Any) -> None:
    whole, chunks = (pool(2).run(_attended, ExchangePlan(wire=wire, chunks=count), False) for count in (1, 3))
    assert [sent for *_, sent in chunks] == [sent for *_, sent in whole]
    for (error, *_), (of_whole, *_) in zip(chunks, whole, strict=True):
        assert error == pytest.approx(of_whole, abs=1e-5)


def test_stages_of_two_machines() -> None:
    sizes = {"blocks": 3, "video_tokens": 16, "text_tokens": 0, "itemsize": 2}
    direct = _planned(ExchangePlan(), 4, 4, **sizes)
    # 4 tokens and 1 head a rank: each of q, k, v and the result sends 3 parts of 4 tokens, 8 wide.
    assert direct == {"sent": 3 * 4 * 4 * 3 * 4 * 8 * 2}
    staged = _planned(TWO_MACHINES, 4, 4, **sizes)
    assert staged == {"inside": direct["sent"] * 2 // 3, "between": direct["sent"] * 2 // 3}
    compressed = _planned(ExchangePlan(wire="fp8"), 4, 4, **sizes)
    assert compressed["sent"] * 8 * 2 == direct["sent"] * (8 + 4)
