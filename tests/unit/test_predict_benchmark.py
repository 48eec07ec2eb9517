"""Predicted times beside published ones, and the numbers of the page."""

import re
from pathlib import Path

import predict
import pytest

from opensora_cli.settings.hardware import ATTENTION_EFFICIENCY, PRODUCT_EFFICIENCY, read_machine

PAGE = (Path(__file__).parents[2] / "docs" / "how_to" / "before_you_rent.md").read_text(encoding="utf-8")
GENERATED = re.findall(r"^\| `osora generate .*? --res (\w+) --dry-run --on (\w[\w-]*)` \|", PAGE, re.MULTILINE)
TRAINED = re.findall(
    r"^\| `osora train --config (\w+)(?: --set \S+)* --dry-run --on (\d+)x([\w.-]+)` \|", PAGE, re.MULTILINE
)
CHEAP = [("256px", "1xH100"), ("256px", "8xH100")]


@pytest.mark.slow
def test_the_efficiencies_are_those_that_measured_times_give() -> None:
    gpu = read_machine("H100").gpu
    measured = predict.measured_times()
    fitted = predict.fit(measured[:2], gpu, predict.of_ours)
    assert round(fitted.product_efficiency, 3) == PRODUCT_EFFICIENCY
    assert round(fitted.attention_efficiency, 3) == ATTENTION_EFFICIENCY
    assert all(predict.of_ours(time, gpu) == pytest.approx(time.seconds, rel=0.01) for time in measured)
    assert "\n".join(predict.measured_table(gpu)) in PAGE


@pytest.mark.slow
def test_published_times_of_the_reference_are_predicted_from_two_of_them() -> None:
    gpu = read_machine("H100").gpu
    errors = predict.errors(predict.fit(predict.FITTED_TO, gpu), predict.FITTED_TO)
    assert len(errors) == 3
    assert max(map(abs, errors.values())) < 0.15
    assert "\n".join(predict.truth_table(gpu)) in PAGE


def test_the_page_has_every_row() -> None:
    presets = [
        (resolution, f"{n}x{gpu}") for resolution in ("256px", "768px") for gpu in predict.GPUS for n in (1, 2, 4, 8)
    ]
    assert presets == GENERATED
    stages = [(recipe, n, gpu) for recipe in predict.STAGES for gpu in predict.GPUS for n in ("1", "2", "4", "8")]
    stages += [("stage2", "64", gpu) for gpu in predict.GPUS]
    stages += [("stage1_lora_16gib", "1", gpu) for gpu in ("16GiB.yaml", *predict.GPUS)]
    assert stages == TRAINED


@pytest.mark.parametrize(
    ("resolution", "machine"),
    # One of each GPU: one function makes all rows.
    [*CHEAP, *(pytest.param("768px", f"2x{gpu}", marks=pytest.mark.slow) for gpu in predict.GPUS)],
)
def test_a_row_of_the_page_is_what_the_code_predicts(resolution: str, machine: str) -> None:
    assert predict.generation_row(resolution, machine) in PAGE.splitlines()


@pytest.mark.slow
def test_the_page_has_what_every_two_published_times_give() -> None:
    table = predict.fit_table(read_machine("H100").gpu)
    assert len(table) == 6
    assert "\n".join(table) in PAGE


@pytest.mark.slow
def test_training_rows_of_the_page_are_what_the_code_predicts() -> None:
    assert predict.CARD_OF_16_GIB in PAGE
    table = predict.training_table()
    assert "\n".join(table) in PAGE
