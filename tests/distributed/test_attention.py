"""Attention whose tokens are divided between real processes, by rings and by Ulysses, against attention of one."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from attention_libraries import fake_flash2, fake_flash3
from shared_tokens import attention_bytes, attention_errors, mesh_of, random_qkv

from opensora_cli.core.exceptions import RequestError
from opensora_cli.models.attention.torch_kernels import sdpa
from opensora_cli.parallel.ring import RingAttention
from opensora_cli.parallel.shares import SequenceLengths
from opensora_cli.parallel.ulysses import UlyssesAttention

Pool = Callable[[int], Any]


def _slow(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("ring", "num_heads", "tokens"),
    [
        (2, 3, (1, 8)),
        (4, 3, (6, 2, 1, 4)),
        (1, 4, (5, 5)),
        (1, 3, (1, 8)),
        (1, 4, (6, 2, 1, 4)),
        (1, 7, (3, 4, 1, 3)),
        (1, 24, (3, 3, 3, 3)),
        _slow(1, 24, (4, 4, 3, 3, 3)),  # 5, 5, 5, 5 and 4 heads
        (2, 3, (6, 2, 1, 4)),
    ],
)
def test_result_and_gradients_are_those_of_one_process(
    pool: Pool, ring: int, num_heads: int, tokens: tuple[int, ...]
) -> None:
    ranks = len(tokens)
    for errors, dtypes in pool(ranks).run(attention_errors, ring, ranks // ring, num_heads, tokens, torch.float64, 1.0):
        assert max(errors) < 1e-13
        assert dtypes == [torch.float64] * 4


@pytest.mark.parametrize(
    ("ring", "num_heads", "dtype", "scale", "tolerance"),
    [
        (4, 3, torch.float32, 1.0, 2e-6),
        (4, 3, torch.bfloat16, 1.0, 3e-2),
        (2, 5, torch.bfloat16, 1.0, 3e-2),
        # Scores of some 1e4: their exponentials are infinite even in fp64.
        (4, 3, torch.float64, 60.0, 1e-8),
    ],
)
def test_precision_is_that_of_fp32_sums(
    pool: Pool, ring: int, num_heads: int, dtype: torch.dtype, scale: float, tolerance: float
) -> None:
    for errors, dtypes in pool(4).run(attention_errors, ring, 4 // ring, num_heads, (6, 2, 1, 4), dtype, scale):
        assert max(errors) < tolerance
        assert dtypes == [dtype] * 4


def _library_errors(name: str, ring: int, ulysses: int) -> tuple[list[float], list[torch.dtype]]:
    tokens = (6, 2, 1, 4)[: ring * ulysses]
    with pytest.MonkeyPatch.context() as monkeypatch:
        {"flash2": fake_flash2, "flash3": fake_flash3}[name](monkeypatch)
        return attention_errors(ring, ulysses, 3, tokens, torch.bfloat16, 1.0, backend=name)


@pytest.mark.parametrize(("name", "ring", "ulysses"), [("flash2", 1, 2), ("flash3", 2, 2)])
def test_backends_of_libraries_compute_between_ranks(pool: Pool, name: str, ring: int, ulysses: int) -> None:
    for errors, dtypes in pool(ring * ulysses).run(_library_errors, name, ring, ulysses):
        assert max(errors) < 6e-2
        assert dtypes == [torch.bfloat16] * 4


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
