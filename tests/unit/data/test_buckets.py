"""Which bucket a sample goes to."""

import numpy as np
import pytest

from opensora_cli.data.buckets import NO_BUCKET, Buckets, Resolution, Samples

SIZES = {"2:1": (64, 128), "1:1": (96, 96), "1:2": (128, 64)}


def resolution(name: str, pixels: float, lengths: dict[int, tuple[float, int]]) -> Resolution:
    return Resolution(name=name, pixels=pixels, sizes=SIZES, lengths=lengths)


def samples(*rows: tuple[int, int, int, float]) -> Samples:
    frames, heights, widths, fps = zip(*rows, strict=True)
    return Samples(
        num_frames=np.array(frames), height=np.array(heights), width=np.array(widths), fps=np.array(fps, dtype=float)
    )


@pytest.fixture
def buckets():
    small = resolution("small", 1000, {1: (1.0, 4), 5: (1.0, 2)})
    large = resolution("large", 4000, {1: (0.5, 2), 9: (0.25, 1)})
    return Buckets([small, large], fps_max=24)


def test_buckets_are_listed_by_resolution_then_length_the_largest_first(buckets):
    kinds = [(buckets[i].resolution, buckets[i].num_frames, buckets[i].aspect_ratio) for i in range(len(buckets))]
    assert kinds == [
        (name, n, ratio) for name, n in (("large", 9), ("large", 1), ("small", 5), ("small", 1)) for ratio in SIZES
    ]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ((9, 64, 64, 24.0), ("large", 9, "1:1")),
        ((8, 64, 64, 24.0), ("small", 5, "1:1")),  # no length of the larger one
        ((10, 64, 64, 25.0), ("small", 5, "1:1")),  # every second frame: 5 are left
        ((9, 64, 64, 25.0), None),
        ((18, 64, 64, 25.0), ("large", 9, "1:1")),
        ((9, 40, 80, np.nan), ("large", 9, "2:1")),  # 80 % of 4000 pixels, and an unknown rate leaves no frame out
        ((9, 40, 79, 24.0), ("small", 5, "2:1")),
        ((1, 128, 64, np.nan), ("large", 1, "1:2")),
        ((1, 28, 28, np.nan), None),  # under 80 % of 1000
        ((4, 64, 64, 24.0), None),  # a video never goes to a bucket of pictures
    ],
)
def test_the_bucket_of_a_sample(buckets, row, expected):
    index = int(buckets.assign(samples(row), np.zeros((1, 2)))[0])
    found = None if index == NO_BUCKET else buckets[index]
    assert (found and (found.resolution, found.num_frames, found.aspect_ratio)) == expected


def test_who_is_turned_away_tries_the_next_resolution(buckets):
    many = samples(*[(9, 64, 64, 24.0)] * 3, *[(1, 64, 64, np.nan)] * 3)
    draws = np.array([[0.0, 0.9], [0.24, 0.9], [0.25, 0.9], [0.49, 0.9], [0.5, 0.9], [0.9, 0.9]])
    found = [(buckets[i].resolution, buckets[i].num_frames) for i in buckets.assign(many, draws)]
    assert found == [("large", 9), ("large", 9), ("small", 5), ("large", 1), ("small", 1), ("small", 1)]


def test_reachable_stops_at_a_probability_of_one_and_leaves_out_zero():
    lengths = {1: (0.0, 1), 5: (1.0, 1)}
    all_three = [
        resolution(name, pixels, lengths if name == "b" else {1: (0.5, 1), 5: (0.5, 1)})
        for name, pixels in (("a", 4000), ("b", 2000), ("c", 1000))
    ]
    buckets = Buckets(all_three, fps_max=24)
    reachable = buckets.reachable(samples((5, 64, 64, 24.0), (1, 64, 64, np.nan), (5, 30, 30, 24.0)))
    names = [[buckets[i].resolution for i in row if i != NO_BUCKET] for row in reachable]
    assert names == [["a", "b"], ["a", "c"], ["c"]]
