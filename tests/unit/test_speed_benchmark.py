"""The benchmark of speed: the plain way computes the same, pairs take turns, and a missed goal is an exit code."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import speed
import speed_pairs
import torch
from closeness import assert_close
from plain_mmdit import plain_forward
from speed_pairs import Row, compared
from tiny_transformer import inputs, transformer


def test_the_plain_transformer_is_ours() -> None:
    model = transformer()
    given = inputs(model)
    packed = given.pop("packed_latents_BND")
    with torch.inference_mode():
        assert_close(plain_forward(model, packed, **given), model(packed, **given), tolerance=1e-5)


def test_pairs_take_turns_after_one_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    clock = [0.0]

    def way(name: str, seconds: float) -> None:
        order.append(name)
        clock[0] += seconds

    monkeypatch.setattr(speed_pairs.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(speed_pairs.time, "process_time", lambda: clock[0])
    row = compared("a", lambda: way("plain", 3.0), lambda: way("ours", 2.0), pairs=3, goal=1.6)
    assert order == ["plain", "ours", "plain", "ours", "ours", "plain", "plain", "ours"]
    assert row.faster == row.faster_processor == 1.5
    assert not row.is_reached


@pytest.mark.parametrize(("goal", "code"), [(1.4, 0), (1.6, 1), (None, 0)])
def test_rows_are_printed_and_written(
    goal: float | None, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(options: object) -> Iterator[Row]:
        yield Row(
            name="x", plain_s=3.0, ours_s=2.0, faster=1.5, spread=(1.4, 1.6), faster_processor=1.45, goal=goal, note="n"
        )

    monkeypatch.setitem(speed.PARTS, "loop", speed.Part("what", measure))
    assert speed.main(["--part", "loop", "--json", str(tmp_path / "found.json")]) == code
    _, line = capsys.readouterr().out.splitlines()
    assert line.split()[:6] == ["loop", "x", "3.000", "2.000", "1.50", "1.40-1.60"]
    document = json.loads((tmp_path / "found.json").read_text())
    assert document["schema"] == "osora.bench.speed/1"
    assert [(each["part"], each["faster"], each["goal"]) for each in document["rows"]] == [("loop", 1.5, goal)]


@pytest.mark.slow
def test_the_loop_comes_to_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    speed.main(["--part", "loop", "--part", "fast", "--steps", "3", "--pairs", "1"])
    _, *rows, fast = capsys.readouterr().out.splitlines()
    assert [row.split()[2] for row in rows] == ["t2v,", "i2v_head,"]
    assert all(float(row.rsplit(maxsplit=1)[1]) < 1e-4 for row in rows)
    assert "for 9" in fast
