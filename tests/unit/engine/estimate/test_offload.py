"""Measures of offload that are taken to fit a memory, in order."""

from dataclasses import replace

import pytest

from opensora_cli.engine.estimate.offload import (
    HostMemory,
    Offloadable,
    OffloadPlan,
    StageMemory,
    choose_offload,
    keep_models,
    stronger_offload,
    verdict_line,
)
from opensora_cli.settings.devices import HostWeights, MemorySettings, OffloadMode

BLOCKS = 10
ALL = Offloadable(num_blocks=BLOCKS)
MAPPED = replace(ALL, host_weights=HostWeights.MAPPED)


def estimate(plan):
    """Ten blocks of 10 bytes, an autoencoder of 5, T5 of 40; chunks cut what comes on top."""
    blocks = plan.resident_blocks if plan.mode is OffloadMode.BLOCKS else BLOCKS
    kept = 5 if plan.mode is OffloadMode.NONE else 0
    tokens = {8192: 20, 2048: 10}[plan.chunk_tokens]
    decoder = (plan.chunk_frames or 20) + (0 if plan.chunk_frames is None or plan.store_on_host else 40)
    return (
        StageMemory("text", 8 if plan.stream_text else 40, 1),
        StageMemory("denoise", 10 * blocks + kept, 2, tokens),
        StageMemory("decode", 5, 3, decoder),
    )


def choose(budget, **memory):
    return choose_offload(MemorySettings(**memory), ALL, estimate, budget=budget)


BLOCK = {"mode": OffloadMode.BLOCKS, "resident_blocks": 1}
LEAST = {**BLOCK, "chunk_tokens": 2048, "stream_text": True, "store_on_host": True}


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (140, {}),
        # 5 % stay free.
        (133, {"mode": OffloadMode.MODEL}),
        (125, {**BLOCK, "resident_blocks": 9}),
        (60, {**BLOCK, "resident_blocks": 3}),
        (40, {**BLOCK, "stream_text": True}),
        (25, {**LEAST, "chunk_frames": 4}),
    ],
)
def test_least_that_fits(budget, expected):
    assert choose(budget) == OffloadPlan(**expected)
    assert all(stage.total_bytes <= 0.95 * budget for stage in estimate(choose(budget)))


def test_where_nothing_fits_the_least_is_taken():
    assert choose(5) == OffloadPlan(**LEAST, chunk_frames=1)


def test_without_a_transformer_none_is_offloaded():
    plan = choose_offload(
        MemorySettings(offload="blocks"),
        ALL,
        lambda plan: tuple(stage for stage in estimate(plan) if stage.name == "decode"),
        budget=1000,
    )
    assert plan == OffloadPlan()


@pytest.mark.parametrize(
    ("budget", "memory", "expected"),
    [
        (1000, {"offload": "model"}, {"mode": OffloadMode.MODEL}),
        (1000, {"offload": "blocks"}, {**BLOCK, "resident_blocks": 9}),
        # What was asked for is not exceeded.
        (60, {"offload": "none"}, {}),
        (
            1000,
            {"resident_blocks": 3, "host_weights": "mapped", "fp8_storage": True},
            {**BLOCK, "resident_blocks": 3, "host_weights": HostWeights.MAPPED, "fp8_storage": True},
        ),
    ],
)
def test_settings_name_modes_and_numbers(budget, memory, expected):
    assert choose(budget, **memory) == OffloadPlan(**expected)


@pytest.mark.parametrize(("budget", "resident"), [(140, None), (120, 2), (40, 1)])
def test_blocks_that_are_cast_leave_the_memory_to_the_page_cache(budget, resident):
    plan = choose_offload(MemorySettings(), replace(MAPPED, on_cpu=True), estimate, budget=budget)
    assert plan.resident_blocks == resident


@pytest.mark.parametrize("first", [False, True])
def test_text_that_is_streamed_at_no_cost_is_streamed_where_all_would_fit(first):
    plan = choose_offload(MemorySettings(), replace(MAPPED, text_first=first), estimate, budget=1000)
    assert plan == OffloadPlan(host_weights=HostWeights.MAPPED, stream_text=first)


def test_what_is_computed_with_where_it_is_mapped_is_not_offloaded():
    mapped = replace(MAPPED, num_blocks=0, text=False, text_first=True)
    plan = choose_offload(MemorySettings(offload="blocks"), mapped, estimate, budget=25)
    assert (plan.mode, plan.resident_blocks, plan.stream_text) == (OffloadMode.MODEL, None, False)
    assert stronger_offload(plan, "text", mapped) is None
    assert stronger_offload(plan, "denoise", mapped) is None


def test_stronger_is_less_until_there_is_nothing_left():
    for stage in ("text", "denoise", "decode"):
        plan, needs = OffloadPlan(), []
        while plan is not None:
            needs += [each.total_bytes for each in estimate(plan) if each.name == stage]
            plan = stronger_offload(plan, stage, ALL)
        assert len(needs) > 1
        assert needs == sorted(set(needs), reverse=True)
    assert stronger_offload(OffloadPlan(), "encode", ALL) is None


def test_what_decodes_whole_tiles_decodes_no_chunks():
    whole = replace(MAPPED, frames=False)
    plan = choose_offload(MemorySettings(), whole, estimate, budget=25)
    assert plan.chunk_frames is None
    assert stronger_offload(plan, "decode", whole) is None


def test_lines_name_what_is_given_up():
    assert OffloadPlan().lines() == []
    plan = choose(5, fp8_storage=True)
    assert plan.lines() == [
        "blocks of the transformer on the device: 1, the others pinned",
        "T5 layer by layer",
        "tokens at a time: 2048",
        "decoded frames at a time: 1, the rest on the host",
        "weights stored in 8 bits (storage, not compute; not exact)",
    ]


@pytest.mark.parametrize(
    ("budget", "kept"),
    [
        (400, {"text": {"transformer", "autoencoder"}, "denoise": {"autoencoder", "text encoders"}}),
        # 5 % stay free; T5 has no room beside the transformer, which has room beside T5.
        (155, {"text": {"transformer", "autoencoder"}, "denoise": {"autoencoder"}}),
        (130, {"text": {"autoencoder"}, "denoise": set()}),
    ],
)
def test_models_are_kept_beside_the_stages_that_leave_room(budget, kept):
    stages = estimate(OffloadPlan(mode=OffloadMode.MODEL))
    filled = keep_models(stages, budget=budget)
    assert {stage.name: {model for model, _ in stage.kept} for stage in filled if stage.name != "decode"} == kept
    for stage, before in zip(filled, stages, strict=True):
        assert stage.own_bytes == before.own_bytes
        assert stage.total_bytes == before.total_bytes + sum(size for _, size in stage.kept)
        assert stage.total_bytes <= max(0.95 * budget, before.total_bytes)


def test_a_model_that_a_run_does_not_need_is_kept_if_there_is_room():
    [decode] = keep_models(
        [StageMemory("decode", 5, 3, 20)], budget=120, loaded={"transformer": 80, "text encoders": 9}
    )
    assert decode.kept == (("transformer", 80),)


GIB = 2**30
HOST = HostMemory(pinned_bytes=20 * GIB, page_cache_bytes=4 * GIB)


@pytest.mark.parametrize(
    ("usable", "on_gpu", "seconds", "expected"),
    [
        (23, True, 177, "Fits: 16.9 of 23.0 GiB GPU memory, 24.0 GiB host memory, about 3 min (predicted)"),
        (12, True, None, "Does not fit: 16.9 of 12.0 GiB GPU memory, 24.0 GiB host memory"),
        (None, True, None, "Unknown: 16.9 GiB GPU memory, 24.0 GiB host memory"),
        (64, False, None, "Fits: 16.9 of 64.0 GiB host memory, 4.0 GiB page cache"),
    ],
)
def test_a_verdict(usable: int | None, on_gpu: bool, seconds: float | None, expected: str) -> None:
    bytes_ = None if usable is None else usable * GIB
    line = verdict_line(needed=round(16.9 * GIB), usable=bytes_, on_gpu=on_gpu, host=HOST, seconds=seconds)
    assert line == expected


@pytest.mark.parametrize(
    ("seconds", "expected"), [(1.6, "2 s"), (119, "119 s"), (7300, "2 h"), (7100, "118 min"), (200_000, "2 days")]
)
def test_a_time_has_one_unit(seconds: float, expected: str) -> None:
    line = verdict_line(needed=1, usable=1, on_gpu=True, host=HOST, seconds=seconds)
    assert line.endswith(f"about {expected} (predicted)")
