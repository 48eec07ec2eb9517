"""What ships with the presets says what counting says, and saves it."""

import json
from collections.abc import Iterator

import pytest
import torch
from estimate_table import TABLE, known_after_plans

from opensora_cli.engine.components.hardware import GIB, Hardware
from opensora_cli.engine.estimate.fake_tensors import Need
from opensora_cli.engine.estimate.remembered import known_needs, remembered
from opensora_cli.engine.generate.plan import Plan
from opensora_cli.engine.generate.planning import make_plan
from opensora_cli.settings.load import load_preset


@pytest.fixture
def table() -> Iterator[dict[str, Need]]:
    """Gives what is known to a new process."""
    known_needs.cache_clear()
    yield known_needs()
    known_needs.cache_clear()


def planned(preset: str, device: str, free: int, **changes: object) -> Plan:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    hardware = Hardware(torch.device(device), device, dtype, free, free)
    settings = load_preset(preset, prompt="raining, sea").replace({k.replace("__", "."): v for k, v in changes.items()})
    return make_plan(settings, hardware=hardware, tries_device=False)


@pytest.mark.parametrize(
    ("preset", "device", "gib"),
    [
        ("demo", "cpu", 4),
        pytest.param("256px", "cpu", 24, marks=pytest.mark.slow),
        ("256px", "cuda", 24),
        pytest.param("768px", "cpu", 1, marks=pytest.mark.slow),
        ("768px", "cuda", 24),
        pytest.param("high_compression", "cuda", 80, marks=pytest.mark.slow),
        pytest.param("t2i2v_256px", "cuda", 24, marks=pytest.mark.slow),
    ],
)
def test_a_preset_is_planned_without_counting(preset: str, device: str, gib: int, table: dict[str, Need]) -> None:
    known = len(table)
    planned(preset, device, gib * GIB)
    if device == "cuda":
        planned(preset, device, gib * GIB, parallel__gpus=8)
    assert len(table) == known
    planned(preset, device, gib * GIB, text__t5_max_length=100)
    assert len(table) > known


def test_the_table_says_what_counting_says(table: dict[str, Need]) -> None:
    from_table = planned("demo", "cpu", 4 * GIB)
    table.clear()
    assert planned("demo", "cpu", 4 * GIB).stages == from_table.stages
    assert table


@pytest.mark.slow
def test_the_whole_table_says_what_counting_says(table: dict[str, Need]) -> None:
    shipped = json.loads(TABLE.read_text(encoding="utf-8"))
    assert {key: list(need) for key, need in known_after_plans().items()} == shipped


def test_what_was_counted_is_not_counted_again(table: dict[str, Need]) -> None:
    counted = []

    @remembered
    def count(shape: tuple[int, ...], dtype: torch.dtype) -> Need:
        counted.append((shape, dtype))
        return Need(shape[0], dtype.itemsize)

    for _ in range(2):
        assert count((3, 4), torch.float32) == Need(3, 4)
        assert count((3, 4), torch.bfloat16) == Need(3, 2)
        assert count((4, 3), torch.float32) == Need(4, 4)
    assert len(counted) == 3
