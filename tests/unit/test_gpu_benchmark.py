"""The benchmark for a GPU, run with tiny sizes on the CPU: every part, what is skipped, and what fails."""

import json
from pathlib import Path

import gpu
import pytest
import torch
from gpu_bench import Bench, tried

CPU = ["--tiny", "--device", "cpu"]
FAIL_ON_A_CPU = {"settings": ["fp8 products", "compiled, fp8 products"]}


@pytest.fixture(autouse=True)
def single_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def figures(tmp_path: Path, *arguments: str) -> dict:
    """Return what a call has written, part by part."""
    out = tmp_path / "gpu.json"
    gpu.main([*CPU, "--out", str(out), *arguments])
    document = json.loads(out.read_text())
    assert document["schema"] == "osora.bench.gpu/1"
    return {part["part"]: part for part in document["parts"]}


@pytest.mark.slow
def test_every_part_runs(tmp_path: Path) -> None:
    parts = figures(tmp_path)
    assert list(parts) == list(gpu.PARTS)
    assert {name: part["reason"] for name, part in parts.items() if part["status"] != "done"} == {}
    for name, part in parts.items():
        assert part["rows"], name
        failed = [row["what"] for row in part["rows"] if "failed" in row]
        # What GPUs alone have.
        assert name == "rates" or failed == FAIL_ON_A_CPU.get(name, []), name


def test_an_evaluation_is_timed_beside_the_plain_one(tmp_path: Path) -> None:
    part = figures(tmp_path, "--part", "rates", "--part", "256px")["256px"]
    assert part["status"] == "done", part["reason"]
    ours, plain, batched, evaluations = part["rows"]
    assert (ours["what"], plain["what"], batched["what"]) == ("ours", "plain, 1 branches", "plain, 3 branches")
    for row in (ours, plain, batched):
        assert row["seconds"] > 0
        assert row["of_product_rate"] > 0
    assert (evaluations["ours"], evaluations["plain"]) == (80 / 50, 3)


def test_a_part_that_has_no_time_is_skipped_and_what_was_measured_is_written(tmp_path: Path) -> None:
    parts = figures(tmp_path, "--minutes", "0", "--part", "rates", "--part", "256px")
    assert [part["status"] for part in parts.values()] == ["skipped", "skipped"]
    assert parts["256px"]["reason"] == "0 s were left, and it is to have 25"


def test_a_part_that_fails_leaves_its_rows_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(bench: Bench):
        yield {"what": "before"}
        raise RuntimeError("the kernel is wrong")

    def working(bench: Bench):
        # What was measured is there already.
        assert json.loads((tmp_path / "gpu.json").read_text())["parts"][0]["rows"] == [{"what": "before"}]
        yield {"what": "after"}

    monkeypatch.setattr(gpu, "PARTS", {"a": gpu.Part("a", failing, 0), "b": gpu.Part("b", working, 0)})
    assert gpu.main([*CPU, "--out", str(tmp_path / "gpu.json")]) == 1
    first, second = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert (first["status"], first["reason"]) == ("failed", "RuntimeError: the kernel is wrong")
    assert first["rows"] == [{"what": "before"}]
    assert "test_gpu_benchmark" in first["traceback"]
    assert (second["status"], second["rows"]) == ("done", [{"what": "after"}])


def test_a_row_that_fails_has_its_reason() -> None:
    assert tried("a", lambda: {"seconds": 1}) == {"what": "a", "seconds": 1}
    assert tried("b", lambda: {"x": 1 / 0}) == {"what": "b", "failed": "ZeroDivisionError: division by zero"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_ends_with_4(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--out", str(tmp_path / "gpu.json")]) == 4
    assert "--device cpu --tiny" in capsys.readouterr().err
    assert not (tmp_path / "gpu.json").exists()
