"""Attention between real processes, by rings and by Ulysses, against attention of one; and what exchanges send."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from attention_libraries import fake_flash2, fake_flash3
from shared_tokens import Attended, attended, attention_bytes, mesh_of, random_qkv

from opensora_cli.core.exceptions import RequestError
from opensora_cli.engine.components.parallelize import exchanged_bytes
from opensora_cli.models.attention.sdpa import sdpa
from opensora_cli.models.mmdit.config import MMDiTConfig
from opensora_cli.parallel.ring import RingAttention
from opensora_cli.parallel.shares import ExchangePlan, MeshShape, SequenceLengths, shares
from opensora_cli.parallel.ulysses import UlyssesAttention

Pool = Callable[[int], Any]


FP64, FP32, BF16 = torch.float64, torch.float32, torch.bfloat16
UNEVEN = (6, 2, 1, 4)


@pytest.mark.parametrize(
    ("ring", "num_heads", "tokens", "dtype", "scale", "tolerance"),
    [
        (2, 3, (1, 8), FP64, 1.0, 1e-13),
        (4, 3, UNEVEN, FP64, 1.0, 1e-13),
        (1, 3, (1, 8), FP64, 1.0, 1e-13),
        (1, 7, (3, 4, 1, 3), FP64, 1.0, 1e-13),
        (2, 3, UNEVEN, FP64, 1.0, 1e-13),
        *(
            pytest.param(1, num_heads, tokens, FP64, 1.0, 1e-13, marks=pytest.mark.slow)
            # Five ranks have 5, 5, 5, 5 and 4 of 24 heads.
            for num_heads, tokens in ((4, (5, 5)), (4, UNEVEN), (24, (3, 3, 3, 3)), (24, (4, 4, 3, 3, 3)))
        ),
        (4, 3, UNEVEN, FP32, 1.0, 2e-6),
        (4, 3, UNEVEN, BF16, 1.0, 2e-2),
        pytest.param(2, 5, UNEVEN, BF16, 1.0, 2e-2, marks=pytest.mark.slow),
        # Scores of some 1e4: their exponentials are infinite even in fp64.
        (4, 3, UNEVEN, FP64, 60.0, 1e-8),
    ],
)
def test_result_and_gradients_are_those_of_one_process(
    pool: Pool, ring: int, num_heads: int, tokens: tuple[int, ...], dtype: torch.dtype, scale: float, tolerance: float
) -> None:
    for found in pool(len(tokens)).run(_attended, ring, num_heads, tokens, dtype, scale):
        assert max(found.errors) < tolerance
        assert found.dtypes == {dtype}


def _attended(ring: int, num_heads: int, tokens: tuple[int, ...], dtype: torch.dtype, scale: float) -> Attended:
    return attended(ring, len(tokens) // ring, num_heads, tokens, dtype, scale=scale)


def _by_library(name: str, ring: int, ulysses: int) -> Attended:
    with pytest.MonkeyPatch.context() as monkeypatch:
        {"flash2": fake_flash2, "flash3": fake_flash3}[name](monkeypatch)
        return attended(ring, ulysses, 3, UNEVEN[: ring * ulysses], BF16, backend=name)


@pytest.mark.parametrize(("name", "ring", "ulysses"), [("flash2", 1, 2), ("flash3", 2, 2)])
def test_backends_of_libraries_compute_between_ranks(pool: Pool, name: str, ring: int, ulysses: int) -> None:
    for found in pool(ring * ulysses).run(_by_library, name, ring, ulysses):
        assert max(found.errors) < 4e-2
        assert found.dtypes == {BF16}


HEADS, VIDEO, TEXT = 8, 13, 5
TWO_MACHINES = ExchangePlan(inner=2)


def _planned(plan: ExchangePlan, ranks: int, heads: int, *, blocks: int, **sizes: int) -> dict[str, int]:
    """Return the planned bytes for a model with this number of blocks and of heads, 8 wide."""
    config = MMDiTConfig(
        hidden_size=8 * heads, num_heads=heads, axes_dim=(4, 2, 2), depth=blocks, depth_single_blocks=0
    )
    return exchanged_bytes(plan, MeshShape(ulysses=ranks), config, **sizes)


def _exchanged(plan: ExchangePlan, backward: bool) -> Attended:
    ranks = dist.get_world_size()
    tokens = [sum(each) for each in zip(shares(VIDEO, ranks), shares(TEXT, ranks)[::-1], strict=True)]
    return attended(1, ranks, HEADS, tokens, FP32, plan=plan, backward=backward)


@pytest.mark.parametrize(
    ("ranks", "plan", "tolerance"),
    [
        (2, ExchangePlan(), 1e-5),
        pytest.param(4, ExchangePlan(), 1e-5, marks=pytest.mark.slow),
        (4, TWO_MACHINES, 1e-5),
        # Values, and scores that are sums of rounded products, are rounded.
        (2, ExchangePlan(wire="bf16"), 1e-2),
        (4, ExchangePlan(wire="fp8"), 0.15),
        (4, ExchangePlan(inner=2, wire="bf16"), 1e-2),
    ],
)
def test_every_exchange_sends_what_is_planned(pool: Pool, ranks: int, plan: ExchangePlan, tolerance: float) -> None:
    answers = pool(ranks).run(_exchanged, plan, True)
    planned = sum(_planned(plan, ranks, HEADS, blocks=1, video_tokens=VIDEO, text_tokens=TEXT, itemsize=4).values())
    # The inputs have a batch of two.
    assert sum(found.sent_bytes[0] for found in answers) == 2 * planned
    assert sum(found.sent_bytes[1] for found in answers) == 4 * planned
    assert all(max(found.errors) < tolerance for found in answers)
    if plan.wire is not None:
        # The rounding is there.
        assert max(found.errors[0] for found in answers) > tolerance / 200


@pytest.mark.parametrize("wire", [None, "fp8"])
def test_chunks_send_the_same(pool: Pool, wire: Any) -> None:
    whole, chunks = (pool(2).run(_exchanged, ExchangePlan(wire=wire, chunks=count), False) for count in (1, 3))
    for ours, theirs in zip(chunks, whole, strict=True):
        assert ours.sent_bytes == theirs.sent_bytes
        assert ours.errors == pytest.approx(theirs.errors, abs=1e-5)


def test_stages_of_two_machines() -> None:
    sizes = {"blocks": 3, "video_tokens": 16, "text_tokens": 0, "itemsize": 2}
    direct = _planned(ExchangePlan(), 4, 4, **sizes)
    # 4 tokens and 1 head a rank: each of q, k, v and the result sends 3 parts of 4 tokens, 8 wide.
    assert direct == {"sent": 3 * 4 * 4 * 3 * 4 * 8 * 2}
    staged = _planned(TWO_MACHINES, 4, 4, **sizes)
    assert staged == {"inside": direct["sent"] * 2 // 3, "between": direct["sent"] * 2 // 3}
    compressed = _planned(ExchangePlan(wire="fp8"), 4, 4, **sizes)
    assert compressed["sent"] * 8 * 2 == direct["sent"] * (8 + 4)


def test_no_rank_of_a_ring_gathers_the_keys(pool: Pool) -> None:
    for share, forward, backward in pool(4).run(attention_bytes, 4, 1, 2, 64):
        # Beside the log-sum-exp: keys and values at hand, those that come, the result, and a part of it.
        assert forward < 7 * share
        # The result and its gradient; keys and values as before; gradients of q and of a part; sums that go and come.
        assert backward < 15 * share


def test_no_rank_of_ulysses_gathers_all(pool: Pool) -> None:
    for share, forward, backward in pool(4).run(attention_bytes, 1, 4, 4, 64):
        # q, k and v as they are sent and as they come, or as they come and in their places.
        assert forward < 6.5 * share
        # Those in their places, the result and its gradient, and what attention and the exchange take on the way.
        assert backward < 11.5 * share


def _sent() -> tuple[list[int], list[int]]:
    """Return the bytes of each message that this rank sends forward, and backward."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    mesh = mesh_of(ring=ranks)
    lengths = SequenceLengths.of_mesh(mesh)
    lengths.of_ranks = tuple(range(1, 1 + ranks))
    given = [tensor.requires_grad_() for tensor in random_qkv(2, rank + 1, dtype=torch.bfloat16)[:3]]
    begin, sent = dist.batch_isend_irecv, []

    def watched(transfers: list[dist.P2POp]) -> list[dist.Work]:
        sent.extend(transfer.tensor.nbytes for transfer in transfers if transfer.op is dist.isend)
        return begin(transfers)

    with patch.object(dist, "batch_isend_irecv", watched):
        out = RingAttention(sdpa, mesh.group("ring"), lengths)(*given)
        forward = list(sent)
        out.sum().backward()
    return forward, sent[len(forward) :]


def test_keys_and_values_are_sent_once_round(pool: Pool) -> None:
    ranks = 4
    token = 2 * 2 * 8 * 2  # of one tensor in bf16: batch 2, 2 heads of 8
    for rank, (forward, backward) in enumerate(pool(ranks).run(_sent)):
        passing = [(rank - step) % ranks + 1 for step in range(ranks)]  # tokens at hand at each step
        assert forward == [tokens * token for tokens in passing[:-1] for _ in ("k", "v")]
        # Once more, and behind them their gradients in fp32, which also take the last step home.
        expected = sum(2 * tokens * token for tokens in passing[:-1]) + sum(
            2 * tokens * 2 * token for tokens in passing
        )
        assert sum(backward) == expected
        assert len(backward) == 2 * (ranks - 1) + 2 * ranks


def _too_few_heads() -> str:
    mesh = mesh_of(ulysses=dist.get_world_size())
    lengths = SequenceLengths.of_mesh(mesh)
    lengths.of_ranks = (2,) * dist.get_world_size()
    with pytest.raises(RequestError) as raised:
        UlyssesAttention(sdpa, mesh.group("ulysses"), lengths)(*random_qkv(3, 2)[:3])
    return raised.value.message


def test_fewer_heads_than_ranks_are_refused(pool: Pool) -> None:
    assert pool(4).run(_too_few_heads) == ["ulysses_degree=4 is over the 3 heads: use at most 3"] * 4
