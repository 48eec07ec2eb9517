"""The benchmark of speed: the plain way computes the same, pairs take turns, and a missed goal is an exit code."""

import pytest
import speed
import speed_pairs
import torch
from closeness import assert_close
from plain_mmdit import plain_forward
from speed_pairs import compared
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


@pytest.mark.slow
def test_the_loop_comes_to_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    speed.main(["--part", "loop", "--part", "fast", "--steps", "3", "--pairs", "1"])
    _, *rows, fast = capsys.readouterr().out.splitlines()
    assert [row.split()[2] for row in rows] == ["t2v,", "i2v_head,"]
    assert all(float(row.rsplit(maxsplit=1)[1]) < 1e-4 for row in rows)
    assert "for 9" in fast
