"""The first line of every plan."""

import pytest

from opensora_cli.engine.estimate.predicted_time import ATTENTION, COPIES, PRODUCTS, Seconds
from opensora_cli.engine.estimate.verdict import HostMemory, PredictedTime, verdict_line
from opensora_cli.settings.hardware import read_machine

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
