"""Attention between real processes, by rings and by Ulysses, against attention of one; and what exchanges send."""

import pytest
import torch
import torch.distributed as dist
from shared_tokens import Attended, attended

from opensora_cli.engine.components.parallelize import exchanged_bytes
from opensora_cli.models.mmdit.config import MMDiTConfig
from opensora_cli.parallel.shares import ExchangePlan, MeshShape, shares

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
def test_result_and_gradients_are_those_of_one_process(pool, ring, num_heads, tokens, dtype, scale, tolerance):
    for found in pool(len(tokens)).run(_attended, ring, num_heads, tokens, dtype, scale):
        assert max(found.errors) < tolerance
        assert found.dtypes == {dtype}


def _attended(ring: int, num_heads: int, tokens: tuple[int, ...], dtype: torch.dtype, scale: float) -> Attended:
    return attended(ring, len(tokens) // ring, num_heads, tokens, dtype, scale=scale)


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
def test_every_exchange_sends_what_is_planned(pool, ranks, plan, tolerance):
    answers = pool(ranks).run(_exchanged, plan, True)
    planned = sum(_planned(plan, ranks, HEADS, blocks=1, video_tokens=VIDEO, text_tokens=TEXT, itemsize=4).values())
    # The inputs have a batch of two.
    assert sum(found.sent_bytes[0] for found in answers) == 2 * planned
    assert sum(found.sent_bytes[1] for found in answers) == 4 * planned
    assert all(max(found.errors) < tolerance for found in answers)
    if plan.wire is not None:
        # The rounding is there.
        assert max(found.errors[0] for found in answers) > tolerance / 200


def test_stages_of_two_machines():
    sizes = {"blocks": 3, "video_tokens": 16, "text_tokens": 0, "itemsize": 2}
    direct = _planned(ExchangePlan(), 4, 4, **sizes)
    # 4 tokens and 1 head a rank: each of q, k, v and the result sends 3 parts of 4 tokens, 8 wide.
    assert direct == {"sent": 3 * 4 * 4 * 3 * 4 * 8 * 2}
    staged = _planned(TWO_MACHINES, 4, 4, **sizes)
    assert staged == {"inside": direct["sent"] * 2 // 3, "between": direct["sent"] * 2 // 3}
    compressed = _planned(ExchangePlan(wire="fp8"), 4, 4, **sizes)
    assert compressed["sent"] * 8 * 2 == direct["sent"] * (8 + 4)
