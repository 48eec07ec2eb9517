"""Records of a run: lines of the log, TensorBoard's events, seconds of parts."""

import json
import math
import os
from contextlib import contextmanager

import pytest
import tiny_training
import torch
from toy_training import Listener, ToyTask, toy_trainer

from opensora_cli.core.exceptions import FileProblem, HardwareError
from opensora_cli.engine.train import metrics as metrics_module
from opensora_cli.engine.train.distribution import Distribution
from opensora_cli.engine.train.metrics import Metrics, remove_records, truncate_log
from opensora_cli.engine.train.trainer import PARTS, Clock, StepReport

CPU = torch.device("cpu")


class Ticking:
    """A clock that advances by one second at every call."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 1.0
        return self.now


def report(step, *, loss=1.0, skipped=False, grad_norm=None, **seconds):
    return StepReport(
        step=step,
        epoch=0,
        figures={} if skipped else {"loss": loss, **({} if grad_norm is None else {"grad_norm": grad_norm})},
        learning_rate=0.1,
        samples=4,
        tokens=40,
        seconds={"total": 2.0, **seconds},
        skipped=skipped,
        paths=("a.mp4", "b.mp4"),
    )


def metrics(output, *, every=2, reporter=None, distribution=None, target="vae", **watching):
    """Return the metrics of a run of ten steps."""
    settings = getattr(tiny_training, f"{target}_settings")(output).replace(
        {"loop.steps": 10, "loop.log_every": every, **{f"watching.{name}": value for name, value in watching.items()}}
    )
    distribution = distribution or Distribution(CPU)
    return Metrics(settings, distribution=distribution, output=output, reporter=reporter or Listener())


def read(path):
    def refuse(constant):
        raise ValueError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


@contextmanager
def disk_full_at(size):
    """Let files grow to so many bytes and no further, as on a disk that fills up in the middle of a line."""
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


class TestLines:
    def test_means_speed_and_time_left(self, tmp_path):
        asked = []

        def mfu(samples, tokens, seconds):
            asked.append((samples, tokens, seconds))
            return 0.25

        lines = metrics(tmp_path)
        lines._mfu = mfu
        lines.on_step(report(1, loss=1.0, data=0.25, forward=1.0))
        lines.on_step(report(2, loss=3.0, data=0.5, checkpoint=1.0))
        [line] = read(tmp_path / "log.jsonl")
        assert asked[-1] == (8, 80, 3.0)
        assert line["loss"] == 2.0
        # Four seconds for two steps, of which one went into a checkpoint.
        assert (line["seconds_per_step"], line["samples_per_s"], line["tokens_per_s"]) == (2.0, 2.667, 26.7)
        assert (line["data_wait"], line["mfu"]) == (0.25, 0.25)
        assert line["seconds"] == {"data": 0.375, "forward": 0.5, "checkpoint": 0.5, "other": 0.625}

    def test_skipped_steps_are_logged_and_in_no_mean(self, tmp_path):
        shown = Listener()
        lines = metrics(tmp_path, reporter=shown)
        lines.on_step(report(1, skipped=True))
        assert shown.warnings == ["step 1: loss or gradient is not finite, the step is skipped: a.mp4, b.mp4"]
        lines.on_step(report(2, loss=3.0))
        lines.on_validation(2, {"loss": 0.5, "psnr": 30.0})
        skipped, line, validation = read(tmp_path / "log.jsonl")
        assert skipped == {"step": 1, "event": "skipped", "samples": ["a.mp4", "b.mp4"]}
        assert (line["loss"], line["skipped"]) == (3.0, 1)
        assert validation == {"step": 2, "event": "validation", "loss": 0.5, "psnr": 30.0}

    def test_the_terminal_has_two_short_lines_without_a_second_remaining_time(self, tmp_path, monkeypatch):
        monkeypatch.setattr(metrics_module, "peak_memory_gib", lambda device: {"peak_allocated_gib": 123.45})
        shown = Listener()
        lines = metrics(tmp_path, reporter=shown)
        lines._mfu = lambda *_: 0.4
        for step in (123455, 123456, 123457):
            lines.on_step(report(step, loss=0.123456, grad_norm=1.23456, data=0.5))
        assert shown.notes == [
            "step 123,456  loss 0.1235  learning rate 0.1  2 s/step",
            "  gradient norm 1.235  MFU 40.0%  data wait 25.0%  memory 123.5 GiB",
        ]

    def test_numbers_that_are_not_finite_are_null(self, tmp_path):
        lines = metrics(tmp_path, every=1)
        lines.on_step(report(1, loss=math.nan, data=math.inf))
        lines.on_validation(1, {"loss": -math.inf, "psnr": 30.0})
        line, validation = read(tmp_path / "log.jsonl")
        assert (line["loss"], line["seconds"]["data"], line["learning_rate"]) == (None, None, 0.1)
        assert validation == {"step": 1, "event": "validation", "loss": None, "psnr": 30.0}

    def test_a_disk_that_was_full_loses_no_line(self, tmp_path):
        path, shown = tmp_path / "log.jsonl", Listener()
        lines = metrics(tmp_path, reporter=shown, every=1)
        lines.on_step(report(1))
        size = path.stat().st_size
        with disk_full_at(size + 30):
            for step in (2, 3):
                lines.on_step(report(step))
            assert path.stat().st_size == size + 30
        lines.on_step(report(4))
        assert [line["step"] for line in read(path)] == [1, 2, 3, 4]
        assert shown.warnings == [f"cannot write {path}: File too large: training continues"]
        with disk_full_at(size):
            lines.on_step(report(5))
            lines.close()
        assert [line["step"] for line in read(path)] == [1, 2, 3, 4]
        assert len(shown.warnings) == 2

    def test_a_pipe_is_not_cut_but_refused(self, tmp_path):
        os.mkfifo(tmp_path / "log.jsonl")
        with pytest.raises(FileProblem, match=r"log\.jsonl is not a file: it is a pipe"):
            truncate_log(tmp_path, step=2)


def events(folder):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator").EventAccumulator(
        str(folder)
    )
    accumulator.Reload()
    return {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]
    }


class TestTensorBoard:
    def run(self, folder, first, last, *, loss):
        lines = metrics(folder, every=1, tensorboard=True)
        lines.start(first)
        for step in range(first + 1, last + 1):
            lines.on_step(report(step, loss=loss, data=0.5, skipped=step == 2))
            if step % 2 == 0:
                lines.on_validation(step, {"loss": loss / 2})
        lines.close()

    def test_resumed_runs_have_each_step_once(self, tmp_path):
        pytest.importorskip("tensorboard")
        self.run(tmp_path, 0, 6, loss=1.0)
        self.run(tmp_path, 3, 5, loss=4.0)
        found = events(tmp_path / "tensorboard")
        assert found["train/loss"] == [(1, 1.0), (3, 1.0), (4, 4.0), (5, 4.0)]
        assert found["validation/loss"] == [(2, 0.5), (4, 2.0)]
        assert found["seconds/data"] == [(step, 0.5) for step in range(1, 6)]
        assert found["train/learning_rate"] == [(step, pytest.approx(0.1)) for step in range(1, 6)]
        assert "train/step" not in found

    def test_a_missing_library_is_named(self, tmp_path, monkeypatch):
        monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
        with pytest.raises(HardwareError, match="needs TensorBoard") as raised:
            metrics(tmp_path, tensorboard=True)
        assert raised.value.hint == "in osora's checkout: pip install -c constraints.txt '.[train]'"


class TestTimers:
    def test_parts_add_up_to_the_step(self, tmp_path):
        lines = metrics(tmp_path, every=3)
        trainer = toy_trainer(ToyTask(), micro_batches=2)
        trainer._clock = Clock(now=Ticking())
        for _ in range(3):
            lines.on_step(trainer.do_step())
        [line] = read(tmp_path / "log.jsonl")
        assert set(line["seconds"]) == {"data", "forward", "backward", "exchange", "optimizer", "other"}
        assert set(line["seconds"]) <= {*PARTS, "other"}
        assert math.isclose(sum(line["seconds"].values()), line["seconds_per_step"], abs_tol=1e-5)
        # Each block takes one tick; there are two micro-batches.
        assert (line["seconds"]["data"], line["seconds"]["exchange"], line["seconds"]["optimizer"]) == (2, 2, 1)


class TestOpening:
    @pytest.mark.parametrize("rank", [0, 1])
    def test_the_main_rank_alone_writes(self, tmp_path, rank):
        distribution, shown = Distribution(CPU), Listener()
        distribution.rank = rank
        opened = metrics(tmp_path, distribution=distribution, reporter=shown, every=1)
        assert opened.clock._mark is torch.profiler.record_function
        opened.start(0)
        opened.on_step(report(1))
        opened.on_validation(1, {"loss": 0.5})
        opened.close()
        names = sorted(path.name for path in tmp_path.iterdir())
        assert (names, bool(shown.notes)) == (([], False) if rank else (["log.jsonl"], True))

    def test_marks_for_a_gpu_are_refused_on_a_cpu(self, tmp_path):
        settings = tiny_training.vae_settings(tmp_path).replace({"device": "auto", "watching.nvtx": True})
        with pytest.raises(HardwareError, match=r"^watching\.nvtx=true needs a GPU"):
            Metrics(settings, distribution=Distribution(CPU), output=tmp_path, reporter=Listener())

    def test_records_are_truncated_and_removed(self, tmp_path):
        (tmp_path / "log.jsonl").write_text('{"step": 2}\n{"step": 4}\n{"step": 5, "lo')
        for name in ("tensorboard", "samples"):
            (tmp_path / name).mkdir()
        truncate_log(tmp_path, step=3)
        assert (tmp_path / "log.jsonl").read_text() == '{"step": 2}\n'
        remove_records(tmp_path)
        assert [*tmp_path.iterdir()] == []
        truncate_log(tmp_path, step=0)
