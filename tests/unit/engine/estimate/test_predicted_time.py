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
    Links,
    PredictedTime,
    Seconds,
    copied,
    exchange_seconds,
    kernel_seconds,
)
from opensora_cli.models.mmdit.config import MMDiTConfig
from opensora_cli.parallel.shares import ExchangePlan, MeshShape
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


def waited(mesh: MeshShape, attention: float = 0.0, keys_and_values: float = 1.0) -> float:
    return exchange_seconds(
        CONFIG,
        mesh,
        ExchangePlan(),
        Links(H100, per_node=8),
        video_tokens=8000,
        text_tokens=192,
        itemsize=2,
        attention=attention,
        keys_and_values=keys_and_values,
    )


def test_ring_attention_hides_its_exchanges_behind_attention() -> None:
    ring = MeshShape(ring=4)
    # Keys and values of a quarter of the tokens, three times in each of 57 attentions.
    passed = 57 * 3 * 2 * 2048 * 3072 * 2 / 370e9
    hidden = waited(ring, attention=1.0)
    assert hidden == pytest.approx(8000 * 64 * 2 * 3 / 4 / 370e9)
    assert waited(ring) == pytest.approx(hidden + passed)
    assert waited(ring, keys_and_values=3.0) == pytest.approx(hidden + 3 * passed)


def test_exchanges_for_heads_and_sums_are_waited_for() -> None:
    # Half of queries, keys, values and results of both ranks move, and the velocity is gathered.
    moved = 57 * 4 * 8192 * 3072 * 2 / 2
    assert waited(MeshShape(ulysses=2), attention=1.0) == pytest.approx((moved / 2 + 8000 * 64 * 2 / 2) / 370e9)
    assert waited(MeshShape(tensor=2), attention=1.0) == pytest.approx(76 * 8192 * 3072 * 2 / 370e9)
    assert waited(MeshShape()) == 0.0
    assert waited(MeshShape(guidance=2)) == pytest.approx(8000 * 64 * 2 / 370e9)


def test_a_document_says_that_it_is_predicted_and_begins_with_what_dominates() -> None:
    stages = {"load": Seconds({COPIES: 1.0}), "denoise": Seconds({ATTENTION: 300.0, PRODUCTS: 100.0})}
    found = PredictedTime.of_stages(stages, read_machine("H100").gpu, devices=8, of="for 1 sample", left_out="disks")
    assert found.seconds == 401.0
    assert found.stages_s == {"load": 1.0, "denoise": 400.0}
    assert list(found.parts_s.items()) == [(ATTENTION, 300.0), (PRODUCTS, 100.0), (COPIES, 1.0)]
    assert found.to_json()["predicted"] is True
    first, parts, left_out = found.lines()
    assert first == "predicted 6 min 41 s for 1 sample on 8xH100, not measured: load 1 s, denoise 6 min 40 s"
    assert parts == "parts     attention 5 min 00 s, matrix products 1 min 40 s, host copies 1 s"
    assert left_out == "left out  disks"
