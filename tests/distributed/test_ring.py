"""Ring attention over real processes against attention of one."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from shared_tokens import attention_bytes, attention_errors, mesh_of, random_qkv

from opensora_cli.models.attention.sdpa import sdpa
from opensora_cli.parallel.ring import RingAttention
from opensora_cli.parallel.shares import SequenceLengths

Pool = Callable[[int], Any]


def _errors(*args: Any) -> Any:
    return attention_errors(*args)


def _bytes(*args: Any) -> Any:
    return attention_bytes(*args)


@pytest.mark.parametrize("tokens", [(1, 8), (6, 2, 1, 4)])
def test_result_and_gradients_are_those_of_one_process(pool: Pool, tokens: tuple[int, ...]) -> None:
    ranks = len(tokens)
    for errors, dtypes in pool(ranks).run(_errors, ranks, 1, 3, tokens, torch.float64, 1.0):
        assert max(errors) < 1e-13
        assert dtypes == [torch.float64] * 4


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 3e-2)])
def test_precision_is_that_of_fp32_sums(pool: Pool, dtype: torch.dtype, tolerance: float) -> None:
    for errors, dtypes in pool(4).run(_errors, 4, 1, 3, (6, 2, 1, 4), dtype, 1.0):
        assert max(errors) < tolerance
        assert dtypes == [dtype] * 4


def test_large_scores_do_not_overflow(pool: Pool) -> None:
    # Scores of some 1e4: their exponentials are infinite even in fp64.
    for errors, _ in pool(4).run(_errors, 4, 1, 3, (6, 2, 1, 4), torch.float64, 60.0):
        assert max(errors) < 1e-8


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_no_rank_gathers_the_keys(pool: Pool, ranks: int) -> None:
    for share, forward, backward in pool(ranks).run(_bytes, ranks, 1, 2, 64):
        # Beside the log-sum-exp: keys and values at hand, those that come, the result, and a part of it.
        assert forward < 7 * share
        # The result and its gradient; keys and values as before; gradients of q and of a part; sums that go and come.
        assert backward < 15 * share


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
