"""The benchmark of training: both loops do the same work, and its table tells what was found."""

import copy
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def on_one_thread() -> Iterator[None]:
    """Work this small is slower on several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def benchmark() -> Iterator[ModuleType]:
    """The script, which finds others beside it when it is run."""
    sys.path.insert(0, str(BENCHMARKS))
    import train

    yield train
    sys.path.remove(str(BENCHMARKS))
    del sys.modules["train"]


def flops(step: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops()


@pytest.mark.slow
def test_both_loops_do_the_same_work(benchmark: ModuleType) -> None:
    device = torch.device("cpu")
    settings = benchmark.demo_settings(batch_size=1, compute="fp32")
    batches, empty = benchmark.encoded_batches(settings, device)
    trainer = benchmark.make_trainer(settings, benchmark.FixedBatches(batches), device)
    model = copy.deepcopy(trainer.task.module)
    plain = benchmark.PlainLoop(model, batches, empty=empty, settings=settings, device=device)
    assert flops(trainer.do_step) == flops(plain.step) > 10**9
    weights = dict(trainer.task.module.named_parameters())
    # The first update of AdamW is as large as its rate, wherever there is a gradient.
    for name, weight in model.named_parameters():
        ours, theirs = weights[name], weight
        assert bool(ours.grad is None) == bool(theirs.grad is None)
        assert ours.grad is None or bool(ours.grad.any()) == bool(theirs.grad.any())
    assert len(trainer.ema) == len(plain.averages) == len(weights)
    # Of one clip each, by times and noise of its own.
    losses = [plain.step() for _ in range(15)]
    theirs = [trainer.do_step().figures["loss"] for _ in range(15)]
    assert median(losses) == pytest.approx(median(theirs), rel=0.3)


@pytest.mark.slow
def test_everything_is_measured_and_printed(
    benchmark: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--batch-size", "1", "--block", "1", "--rounds", "2", "--data-steps", "1", "--workers", "1"]
    code = benchmark.main([*small, "--json", str(tmp_path / "found.json")])
    figures = json.loads((tmp_path / "found.json").read_text())
    assert figures["schema"] == "osora.bench.train/1"
    precisions = ["fp32", "bf16"] if torch.cuda.is_available() else ["fp32"]
    assert [each["compute"] for each in figures["throughput"]] == precisions
    assert 0 <= figures["data"]["wait"] < 1
    found = [each["slower"] for each in figures["throughput"]]
    found += [figures["data"]["wait"]]
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 1 + len(found)
    for line, share in zip(printed[1:], found, strict=True):
        assert f" {share:.1%} " in line
    assert code == int(any(share > most for share, most in zip(found[-2:], (0.01, 0.05), strict=True)))
