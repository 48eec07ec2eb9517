"""The order of an epoch."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from opensora_cli.core.choices import Fit
from opensora_cli.data.batches import EpochPlan, MicroBatch
from opensora_cli.data.buckets import Buckets, Resolution, Samples
from opensora_cli.data.table import ClipTable, text_column
from opensora_cli.engine.encode.datasets import TableSource


def all_batches(plan: EpochPlan) -> list[MicroBatch]:
    return [plan.batch(position, number=position, epoch=0) for position in range(len(plan))]


@pytest.fixture
def source() -> TableSource:
    rng = np.random.default_rng(0)
    count = 200
    samples = Samples(
        num_frames=rng.choice([1, 5, 9], size=count),
        height=rng.choice([40, 64, 100], size=count),
        width=rng.choice([40, 64, 100], size=count),
        fps=np.full(count, 24.0),
    )
    texts, none = text_column([""] * count), np.full(count, np.nan)
    table = ClipTable(folder=Path(), paths=texts, texts=texts, samples=samples, motion_scores=none, bad_rows=())
    sizes = {"1:1": (64, 64), "2:1": (48, 96)}
    large = Resolution(name="large", pixels=4096, sizes=sizes, lengths={1: (0.5, 7), 9: (0.75, 2)})
    small = Resolution(name="small", pixels=1600, sizes=sizes, lengths={1: (1.0, 10), 5: (1.0, 3)})
    buckets = Buckets([large, small], fps_max=24)
    return TableSource(
        table=table, buckets=buckets, fps_max=24, fit=Fit.CROP, seed=3, fixed_starts=False, fingerprint=""
    )


def test_micro_batches_are_full_and_of_one_bucket_and_have_each_sample_that_fills_one_once(source: TableSource) -> None:
    plan, sizes = source.plan_epoch(0), source.buckets.batch_sizes
    batches, fitting = all_batches(plan), source.buckets.fitting(source.table.samples)
    assert len(batches) > 20
    assert plan.samples_of_buckets.sum() > 150
    assert plan.batches_of_buckets.tolist() == (plan.samples_of_buckets // sizes).tolist()
    counted = Counter(batch.bucket for batch in batches)
    assert [counted[bucket] for bucket in range(len(sizes))] == plan.batches_of_buckets.tolist()
    seen = Counter(sample for batch in batches for sample in batch.samples)
    assert max(seen.values()) == 1
    for batch in batches:
        assert len(batch.samples) == source.buckets[batch.bucket].batch_size
        assert all(batch.bucket in fitting[sample] for sample in batch.samples)


def test_an_epoch_depends_on_seed_and_epoch_alone(source: TableSource) -> None:
    first = all_batches(source.plan_epoch(1))
    other_seed = replace(source, seed=4)
    assert all_batches(source.plan_epoch(1)) == first
    assert all_batches(source.plan_epoch(0)) != first
    assert all_batches(other_seed.plan_epoch(1)) != first


def test_a_probability_lets_that_part_in_and_others_in_each_epoch(source: TableSource) -> None:
    fitting = source.buckets.fitting(source.table.samples)
    pictures = {
        i
        for i in range(len(source.buckets))
        if (source.buckets[i].resolution, source.buckets[i].num_frames) == ("large", 1)
    }
    could = sum(int(row[0]) in pictures for row in fitting)
    went = [sum(int(source.plan_epoch(epoch).samples_of_buckets[i]) for i in pictures) for epoch in range(20)]
    assert could > 20
    assert len(set(went)) > 3
    assert sum(went) / 20 == pytest.approx(could / 2, rel=0.15)


def test_substitutes_are_of_the_bucket_and_not_of_the_batch_where_there_are_others(source: TableSource) -> None:
    plan = source.plan_epoch(0)
    fitting = source.buckets.fitting(source.table.samples)
    for batch in all_batches(plan):
        others = int(plan.samples_of_buckets[batch.bucket]) - len(batch.samples)
        assert all(batch.bucket in fitting[sample] for sample in batch.substitutes)
        if others:
            assert len(batch.substitutes) == min(3, others)
            assert not set(batch.substitutes) & set(batch.samples)
        else:
            assert batch.substitutes == batch.samples


def test_starts_cover_all_places_and_depend_on_seed_number_and_place(source: TableSource) -> None:
    long = int(np.flatnonzero(source.table.samples.num_frames == 9)[0])
    five = next(index for index in range(len(source.buckets)) if source.buckets[index].num_frames == 5)

    def starts(source: TableSource) -> list[int]:
        return [source.request(long, bucket=five, number=n, place=p).start for n in range(20) for p in range(4)]

    assert {*starts(source)} == {0, 1, 2, 3, 4}
    assert starts(source) == starts(source) != starts(replace(source, seed=2))
