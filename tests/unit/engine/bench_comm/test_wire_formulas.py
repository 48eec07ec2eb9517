"""Formulas of what is sent, checked by hand. Real processes are in tests/distributed."""

import pytest
from wire_formulas import Scheme, StepSizes, step_traffic, traffic, wire_bytes

from opensora_cli.engine.bench_comm.counting import Traffic
from opensora_cli.models.mmdit.config import MMDiTConfig
from opensora_cli.parallel.shares import MeshShape

CONFIG = MMDiTConfig()
SIZES = StepSizes(config=CONFIG, batch=1, text_tokens=512, latent_tokens=7488, itemsize=2)
WIDTH = 3072 * 2  # bytes of a token in bf16


@pytest.mark.parametrize(
    ("scheme", "shape", "sent"),
    [
        # All but the own part of q, k, v and the result: 8000 tokens, of each 7 of 8 parts of the heads lie elsewhere.
        (Scheme.ULYSSES, MeshShape(ulysses=8), Traffic(57 * 4 * 8000 * WIDTH * 7 // 8, 57 * 2)),
        # Keys and values, once to every other rank.
        (Scheme.RING, MeshShape(ring=4), Traffic(57 * 2 * 8000 * WIDTH * 3, 57 * 2 * 3)),
        # A ring's all-reduce over 2 ranks moves the tensor twice; double blocks sum each token twice, single ones once.
        (Scheme.TENSOR, MeshShape(tensor=2), Traffic((2 * 19 + 38) * 2 * 8000 * WIDTH, 4 * 19 + 38)),
    ],
)
def test_what_a_scheme_sends(scheme: Scheme, shape: MeshShape, sent: Traffic) -> None:
    assert traffic(scheme, SIZES, shape) == sent


def test_uneven_heads_send_more_than_their_average() -> None:
    uneven = wire_bytes(Scheme.ULYSSES, SIZES, MeshShape(ulysses=5))
    # Heads are 5, 5, 5, 5, 4; tokens 103 + 1497 and the like.
    text, latents, heads = (102, 102, 102, 103, 103), (1498, 1498, 1498, 1497, 1497), (5, 5, 5, 5, 4)
    stays = sum((t + n) * h for t, n, h in zip(text, latents, heads, strict=True))
    assert uneven == 57 * 4 * (8000 * 24 - stays) * 128 * 2


def test_shares_of_the_velocity_travel_padded() -> None:
    sizes = StepSizes(config=CONFIG, batch=2, text_tokens=3, latent_tokens=10, itemsize=4)
    assert traffic(Scheme.VELOCITY, sizes, MeshShape(ring=2, ulysses=2)) == Traffic(4 * 3 * 3 * 64 * 2 * 4, 1)


def test_branches_on_ranks_of_their_own() -> None:
    sizes = StepSizes(config=CONFIG, batch=1, text_tokens=512, latent_tokens=7488, itemsize=2, branches=3)
    shape = MeshShape(guidance=2, ulysses=2)
    velocity = 7488 * 64 * 2
    assert traffic(Scheme.GUIDANCE, sizes, shape) == Traffic(3 * velocity * 2, 3)
    # Three evaluations in sum, two of them by the rank that has most.
    once = traffic(Scheme.ULYSSES, SIZES, MeshShape(ulysses=2))
    assert traffic(Scheme.ULYSSES, sizes, shape) == Traffic(3 * once.num_bytes, 2 * once.collectives)


@pytest.mark.parametrize("scheme", Scheme)
def test_one_rank_sends_nothing(scheme: Scheme) -> None:
    assert traffic(scheme, SIZES, MeshShape(replicate=4)) == Traffic(0, 0)


def test_a_step_is_the_sum_of_its_reasons() -> None:
    shape = MeshShape(ring=2, ulysses=2, tensor=2, guidance=2)
    total = step_traffic(SIZES, shape)
    assert total.num_bytes == sum(wire_bytes(scheme, SIZES, shape) for scheme in Scheme)
    assert all(wire_bytes(scheme, SIZES, shape) > 0 for scheme in Scheme)
