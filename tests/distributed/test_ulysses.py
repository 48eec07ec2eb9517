"""Ulysses attention, alone and around a ring, over real processes against attention of one."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from shared_tokens import attention_bytes, attention_errors, mesh_of, random_qkv, sdpa

from opensora_cli.core.exceptions import RequestError
from opensora_cli.parallel.shares import SequenceLengths
from opensora_cli.parallel.ulysses import UlyssesAttention

Pool = Callable[[int], Any]


def _errors(*args: Any) -> Any:
    return attention_errors(*args)


def _bytes(*args: Any) -> Any:
    return attention_bytes(*args)


@pytest.mark.parametrize(
    ("num_heads", "tokens"), [(4, (5, 5)), (3, (1, 8)), (4, (6, 2, 1, 4)), (7, (3, 4, 1, 3)), (24, (3, 3, 3, 3))]
)
def test_result_and_gradients_are_those_of_one_process(pool: Pool, num_heads: int, tokens: tuple[int, ...]) -> None:
    ranks = len(tokens)
    for errors, dtypes in pool(ranks).run(_errors, 1, ranks, num_heads, tokens, torch.float64, 1.0):
        assert max(errors) < 1e-13
        assert dtypes == [torch.float64] * 4


@pytest.mark.slow
def test_the_released_models_heads_on_five_ranks(pool: Pool) -> None:
    # 5, 5, 5, 5 and 4 heads.
    for errors, _ in pool(5).run(_errors, 1, 5, 24, (4, 4, 3, 3, 3), torch.float64, 1.0):
        assert max(errors) < 1e-13


@pytest.mark.parametrize(
    ("num_heads", "tokens"), [(3, (6, 2, 1, 4)), pytest.param(2, (4, 4, 4, 4), marks=pytest.mark.slow)]
)
def test_around_a_ring(pool: Pool, num_heads: int, tokens: tuple[int, ...]) -> None:
    for errors, _ in pool(4).run(_errors, 2, 2, num_heads, tokens, torch.float64, 1.0):
        assert max(errors) < 1e-13


@pytest.mark.parametrize(("ring", "ulysses"), [(2, 2), pytest.param(1, 4, marks=pytest.mark.slow)])
def test_bfloat16(pool: Pool, ring: int, ulysses: int) -> None:
    for errors, dtypes in pool(4).run(_errors, ring, ulysses, 5, (6, 2, 1, 4), torch.bfloat16, 1.0):
        assert max(errors) < 3e-2
        assert dtypes == [torch.bfloat16] * 4


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_no_rank_gathers_all(pool: Pool, ranks: int) -> None:
    for share, forward, backward in pool(ranks).run(_bytes, 1, ranks, 4, 64):
        # q, k and v as they are sent and as they come, or as they come and in their places.
        assert forward < 6.5 * share
        # Those in their places, the result and its gradient, and what attention and the exchange take on the way.
        assert backward < 11.5 * share


def _exchanges() -> tuple[list[int], list[int]]:
    """Return the bytes of each exchange that go to other ranks, forward and backward."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    mesh = mesh_of(ulysses=ranks)
    lengths = SequenceLengths.of_mesh(mesh)
    lengths.of_ranks = tuple(range(1, 1 + ranks))
    given = [tensor.requires_grad_() for tensor in random_qkv(5, rank + 1, dtype=torch.bfloat16)[:3]]
    exchange, sent = dist.all_to_all_single, []

    def watched(received: Any, packed: torch.Tensor, expected: Any, counts: list[int], *, group: Any) -> None:
        assert packed.numel() == sum(counts)
        sent.append((sum(counts) - counts[rank]) * packed.itemsize)
        exchange(received, packed, expected, counts, group=group)

    with patch.object(dist, "all_to_all_single", watched):
        out = UlyssesAttention(sdpa, mesh.group("ulysses"), lengths)(*given)
        forward = list(sent)
        out.sum().backward()
    return forward, sent[len(forward) :]


def test_two_exchanges_send_all_but_the_own_part(pool: Pool) -> None:
    heads, tokens, entry = (2, 1, 1, 1), (1, 2, 3, 4), 2 * 8 * 2  # of one token and head in bf16: batch 2, 8 wide
    for rank, (forward, backward) in enumerate(pool(4).run(_exchanges)):
        out = (sum(heads) - heads[rank]) * tokens[rank] * entry
        back = heads[rank] * (sum(tokens) - tokens[rank]) * entry
        assert forward == [3 * out, back]
        assert backward == [out, 3 * back]


def _too_few_heads() -> str:
    mesh = mesh_of(ulysses=dist.get_world_size())
    lengths = SequenceLengths.of_mesh(mesh)
    lengths.of_ranks = (2,) * dist.get_world_size()
    with pytest.raises(RequestError) as raised:
        UlyssesAttention(sdpa, mesh.group("ulysses"), lengths)(*random_qkv(3, 2)[:3])
    return raised.value.message


def test_fewer_heads_than_ranks_are_refused(pool: Pool) -> None:
    assert pool(4).run(_too_few_heads) == ["ulysses_degree=4 is over the 3 heads: use at most 3"] * 4
