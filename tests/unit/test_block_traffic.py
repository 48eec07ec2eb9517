"""Kernels and bytes of a block: no more than the page has."""

import json
import re
from pathlib import Path

import block_traffic
import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "explanations" / "speed.md").read_text(encoding="utf-8")


def test_blocks_start_no_more_kernels_and_move_no_more_bytes_than_the_page_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert block_traffic.main(["--json", str(tmp_path / "found.json")]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 + 4
    blocks = json.loads((tmp_path / "found.json").read_text())["blocks"]
    assert len(blocks) == 4
    for each in blocks:
        row = re.search(
            rf"^\| {each['kind']}, {each['preset']} \| (\d+) \| ([\d.]+) \| ([\d.]+) \|", PAGE, re.MULTILINE
        )
        assert row is not None
        assert each["kernels"] <= int(row[1])
        assert each["moved_bytes"] <= (float(row[2]) + 0.005) * 1e9
        assert each["least_bytes"] == pytest.approx(float(row[3]) * 1e9, rel=0.01)


def test_a_single_block_moves_at_least_its_weights_and_tokens() -> None:
    tokens, width = 33 * 12 * 21 + 512, 3072
    # Read are the tokens for q, for k, for v and MLP, and five times as wide at the end; written are q, k, v, four
    # times as much for the MLP, and the end; and attention moves four times as much again.
    values = (3 + 5 + 2 + 5 + 1 + 4) * tokens * width
    weights = (2 + 5 + 5 + 3) * width**2
    assert block_traffic.traffic("single", "256px").least_bytes == pytest.approx(2 * (values + weights), rel=1e-3)
