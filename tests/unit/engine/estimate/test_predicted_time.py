"""Seconds from operations, bytes and the figures of a GPU."""

import pytest
import torch

from opensora_cli.engine.estimate.fake_tensors import Work
from opensora_cli.engine.estimate.predicted_time import (
    ATTENTION,
    COPIES,
    LAUNCHES,
    PRODUCTS,
    TRAFFIC,
    Exchanged,
    Links,
    copied,
    kernel_seconds,
)
from opensora_cli.models.mmdit.config import MMDiTConfig
from opensora_cli.parallel.shares import MeshShape
from opensora_cli.settings.hardware import read_machine

H100 = read_machine("H100").gpu.replace({"product_efficiency": 0.5, "attention_efficiency": 0.25})
BF16 = torch.bfloat16
CONFIG = MMDiTConfig()


def test_each_part_has_its_own_roof() -> None:
    found = kernel_seconds(Work(989.5e12, 989.5e12, 1.0, 3015e9, 1), H100, BF16)
    assert found == pytest.approx({PRODUCTS: 2.0, ATTENTION: 4.0, TRAFFIC: 1.0})
    # Products with few operations wait for their operands.
    assert kernel_seconds(Work(1.0, 0, 3015e9), H100, BF16)[PRODUCTS] == pytest.approx(1.0)
    in_fp32 = kernel_seconds(Work(66.9e12), H100, torch.float32)
    assert in_fp32[PRODUCTS] == pytest.approx(2.0)


def test_many_small_kernels_wait_for_the_host() -> None:
    found = kernel_seconds(Work(989.5e9, kernels=1e6), H100, BF16)
    assert found[PRODUCTS] == pytest.approx(2e-3)
    assert found[LAUNCHES] == pytest.approx(5.0 - 2e-3)


def test_copies_from_memory_that_is_not_page_locked_take_twice_as_long() -> None:
    assert copied(H100, 52e9, pinned=True) == {COPIES: pytest.approx(1.0)}
    assert copied(H100, 52e9, pinned=False) == {COPIES: pytest.approx(2.0)}
    # Page-locked copies overlap with computation.
    assert copied(H100, 52e9, pinned=True, behind=0.75) == {COPIES: pytest.approx(0.25)}


def test_the_slowest_link_counts() -> None:
    links = Links(H100, per_node=8)
    assert links.between(8) is H100.gpu_link
    assert links.between(16) is H100.node_link
    # A ring through all GPUs of a machine has all of its links.
    assert links.ring_seconds(370e9, 8) == pytest.approx(1.0)
    assert links.ring_seconds(370e9, 16) == pytest.approx(1.0)
    slow = read_machine("4090").gpu
    assert Links(slow, per_node=8).ring_seconds(1.4e9, 16) == pytest.approx(1 / 8)


def exchanged(mesh: MeshShape) -> Exchanged:
    sizes = {"video_tokens": 8000, "text_tokens": 192, "itemsize": 2}
    return Exchanged(config=CONFIG, mesh=mesh, links=Links(H100, per_node=8), **sizes)


def test_ring_attention_hides_its_exchanges_behind_attention() -> None:
    ring = exchanged(MeshShape(ring=4))
    # Keys and values of a quarter of the tokens, three times in each of 57 attentions.
    passed = 57 * 3 * 2 * 2048 * 3072 * 2 / 370e9
    hidden = ring.seconds(attention=1.0)
    assert hidden == pytest.approx(8000 * 64 * 2 * 3 / 4 / 370e9)
    assert ring.seconds(attention=0.0) == pytest.approx(hidden + passed)
    assert ring.seconds(attention=0.0, keys_and_values=3.0) == pytest.approx(hidden + 3 * passed)


def test_exchanges_for_heads_and_sums_are_waited_for() -> None:
    heads = exchanged(MeshShape(ulysses=2))
    # Half of queries, keys, values and results of both ranks move, and the velocity is gathered.
    moved = 57 * 4 * 8192 * 3072 * 2 / 2
    assert heads.for_heads == {"sent": moved}
    assert heads.seconds(attention=1.0) == pytest.approx((moved / 2 + 8000 * 64 * 2 / 2) / 370e9)
    sums = exchanged(MeshShape(tensor=2)).seconds(attention=1.0)
    assert sums == pytest.approx(76 * 8192 * 3072 * 2 / 370e9)
    assert exchanged(MeshShape()).seconds(attention=0.0) == 0.0
    assert exchanged(MeshShape(guidance=2)).seconds(attention=0.0) == pytest.approx(8000 * 64 * 2 / 370e9)
