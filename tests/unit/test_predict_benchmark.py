"""Predicted times beside published ones, and the numbers of the page."""

from pathlib import Path

import predict
import pytest

from opensora_cli.settings.hardware import ATTENTION_EFFICIENCY, PRODUCT_EFFICIENCY, read_machine

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "how_to" / "before_you_rent.md").read_text(encoding="utf-8")
ACCURACY = (DOCS / "explanations" / "predictions.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_efficiencies_are_those_that_measured_times_give() -> None:
    gpu = read_machine("H100").gpu
    measured = predict.measured_times()
    fitted = predict.fit(measured[:2], gpu, predict.of_ours)
    assert round(fitted.product_efficiency, 3) == PRODUCT_EFFICIENCY
    assert round(fitted.attention_efficiency, 3) == ATTENTION_EFFICIENCY
    assert all(predict.of_ours(time, gpu) == pytest.approx(time.seconds, rel=0.01) for time in measured)
    assert "\n".join(predict.measured_table(gpu)) in ACCURACY


@pytest.mark.slow
def test_published_times_of_the_reference_are_predicted_from_two_of_them() -> None:
    gpu = read_machine("H100").gpu
    errors = predict.errors(predict.fit(predict.FITTED_TO, gpu), predict.FITTED_TO)
    assert len(errors) == 3
    assert max(map(abs, errors.values())) < 0.15
    assert "\n".join(predict.truth_table(gpu)) in ACCURACY


def test_the_page_has_every_row() -> None:
    rows = [line.split(" | ")[0] for line in PAGE.splitlines()]
    assert [rows.count(f"| {gpu}") for gpu in predict.GPUS] == [2] * len(predict.GPUS)
    assert [rows.count(f"| `{recipe}`") for recipe in (*predict.STAGES, "stage1_lora_16gib")] == [4, 4, 5, 1]


@pytest.mark.parametrize(
    ("resolution", "gpu"),
    [("256px", "H100"), *(pytest.param("768px", gpu, marks=pytest.mark.slow) for gpu in predict.GPUS)],
)
def test_a_row_of_the_page_is_what_the_code_predicts(resolution: str, gpu: str) -> None:
    assert predict.generation_row(resolution, gpu) in PAGE.splitlines()


@pytest.mark.slow
def test_training_rows_of_the_page_are_what_the_code_predicts() -> None:
    assert "\n".join(predict.training_table()) in PAGE
