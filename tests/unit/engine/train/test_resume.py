"""Resumed runs are bitwise identical to uninterrupted ones; two runs never share a folder."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import alternating
import psutil
import pytest
import tiny_distillation
import tiny_training
import torch
from tiny_source import Colors
from toy_training import Listener

from opensora_cli.checkpoint.shared_folder import wrong_files
from opensora_cli.core.exceptions import CheckpointError, OutputError, RequestError
from opensora_cli.core.limits import ThreadChoice
from opensora_cli.core.locks import LOCK_FILE, locked_file
from opensora_cli.engine.train import objectives
from opensora_cli.engine.train.checkpoints import RunningStates, read_running_states
from opensora_cli.engine.train.run import as_recorded, train
from opensora_cli.settings import train as train_settings
from opensora_cli.settings.train import TrainSettings

STEPS = 6
TIMED = {"seconds", "seconds_per_step", "samples_per_s", "tokens_per_s", "data_wait", "peak_resident_gib"}


def clips(output: Path, **changes: object) -> TrainSettings:
    """An autoencoder on two epochs; two micro-batches an update, and a discriminator from step 3 on."""
    return tiny_training.vae_settings(output).replace(
        {
            "loop.steps": STEPS,
            "loop.micro_batches": 2,
            "checkpoints.every": 2,
            "checkpoints.keep": 9,
            "data.table": tiny_training.table_of(7, output.parent),
            "data.buckets": tiny_training.buckets(5, batch_size=1),
            "train_vae.discriminator": {"weight": 0.05, "start_step": 3, "width": 8, "layers": 1},
            **changes,
        }
    )


def own_clips(output: Path) -> TrainSettings:
    changes = {"data.table": None, "checkpoints.every": 2, "validation.every": 2}
    return tiny_training.vae_settings(output).replace(changes)


def two_adapters(output: Path) -> TrainSettings:
    return tiny_training.vae_settings(output).replace({"target": "alternating"})


class Row(NamedTuple):
    """Run, the step after which Ctrl-C comes, and what only a program gives."""

    settings: Callable[[Path], TrainSettings]
    stop: int
    given: Mapping[str, Any] = MappingProxyType({})


ROWS = {
    # In the middle of an epoch: of seven micro-batches an epoch, eight are done.
    "autoencoder": Row(clips, 4),
    "adapters that alternate": Row(two_adapters, 3),
    "clips of a program": Row(own_clips, 2, {"source": Colors(), "held_out": Colors(fingerprint="held out")}),
    "distill": Row(tiny_distillation.settings_of, 2),
    "dmd": Row(lambda output: tiny_distillation.settings_of(output, target="dmd"), 2),
}
FAST = ("autoencoder", "adapters that alternate")


def log(run: Path) -> list[dict[str, object]]:
    """Return the lines of the log without times."""
    return [{key: value for key, value in line.items() if key not in TIMED} for line in tiny_training.log(run)]


def hashes(run: Path, step: int) -> dict[str, object]:
    """Return the hash of each file of a checkpoint, and its place in the data."""
    (folder,) = run.glob(f"epoch*-global_step{step}")
    assert wrong_files(folder) == []
    running = json.loads((folder / "running_states.json").read_text())
    return {**running["sha256"], "sampler": running["sampler"]}


def assert_same(run: Path, whole: Path, steps: int) -> None:
    """Compare losses, rates, norms, validations; weights, averages, moments, place in the data; and exports."""
    assert log(run) == log(whole)
    assert hashes(run, steps) == hashes(whole, steps)
    exports = [path.relative_to(whole) for path in (*whole.glob("*.safetensors"), *whole.glob("lora/*"))]
    assert exports
    assert all((run / name).read_bytes() == (whole / name).read_bytes() for name in exports)


@pytest.fixture(scope="module", autouse=True)
def _alternating():
    """Add the objective of `alternating.py`."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(objectives, "__path__", [*objectives.__path__, str(Path(alternating.__file__).parent)])
        target = train_settings.TARGETS["vae"]._replace(weights_file="student.safetensors")
        patched.setitem(train_settings.TARGETS, "alternating", target)
        yield


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a run that nothing interrupted."""

    @cache
    def trained(name: str) -> Path:
        folder = tmp_path_factory.mktemp("whole") / "run"
        assert train(ROWS[name].settings(folder), **ROWS[name].given).resumed_from is None
        return folder

    return trained


@pytest.fixture
def whole(uninterrupted: Callable[[str], Path]) -> Path:
    """The uninterrupted run of the autoencoder."""
    return uninterrupted("autoencoder")


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two steps, for tests to copy."""
    folder = tmp_path_factory.mktemp("short") / "run"
    train(clips(folder, **{"loop.steps": 2}))
    return folder


@pytest.fixture
def run(tmp_path: Path, short: Path) -> Path:
    """A copy of the short run."""
    return Path(shutil.copytree(short, tmp_path / "run"))


@pytest.mark.parametrize(
    ("name", "workers"),
    [
        *(pytest.param(name, 0, marks=() if name in FAST else pytest.mark.slow) for name in ROWS),
        pytest.param("autoencoder", 2, marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_run_ends_as_if_nothing_had_happened(tmp_path, uninterrupted, name, workers):
    run, row = tmp_path / "run", ROWS[name]
    settings = row.settings(run)
    steps = settings.loop.steps
    first, reporter = settings.replace({"data.workers": workers}), tiny_training.StopAfter(row.stop)
    with pytest.raises(KeyboardInterrupt, match=rf"step {row.stop} of {steps} is saved in .*: continue with --resume"):
        train(first, **row.given, reporter=reporter)
    result = train(settings, **row.given, resume=True)
    assert (result.target, result.resumed_from, result.steps) == (settings.target, row.stop, steps)
    assert len({line["loss"] for line in log(run) if "loss" in line}) >= steps // 2
    assert_same(run, uninterrupted(name), steps)


def test_a_resumed_run_removes_the_checkpoints_that_an_ended_one_was_about_to_remove(tmp_path):
    run, both = tmp_path / "run", {"loop.steps": 2, "checkpoints.every": 1}
    train(clips(run, **both))
    assert len(list(run.glob("epoch*"))) == 2
    train(clips(run, **both, **{"checkpoints.keep": 1}), resume=True)
    assert [folder.name for folder in run.glob("epoch*")] == ["epoch0-global_step2"]


def test_a_resumed_run_has_the_threads_of_its_beginning_or_a_warning(run):
    """Sums are rounded by how many threads share them."""
    states = next(run.glob("epoch*")) / "running_states.json"
    assert json.loads(states.read_text())["threads"] == torch.get_num_threads()
    recorded = {**json.loads(states.read_text()), "threads": 2}
    states.write_text(json.dumps(recorded))
    running, settings = read_running_states(states.parent), clips(run)
    free, listener = ThreadChoice(count=1, reason="1 core", is_free=True), Listener()
    assert as_recorded(running, settings, free, data_ranks=1, reporter=listener)[1].count == 2
    assert listener.warnings == []
    named = ThreadChoice(count=1, reason="OMP_NUM_THREADS")
    assert as_recorded(running, settings, named, data_ranks=1, reporter=listener) == (settings, named)
    (warning,) = listener.warnings
    assert "had 2 threads, and from now on 1 (OMP_NUM_THREADS)" in warning
    assert "with --threads 2 they are bitwise identical" in warning


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no process groups")
@pytest.mark.parametrize(
    ("number", "times", "in_background"),
    [
        (signal.SIGTERM, 1, False),
        # As `timeout` sends it: to the process, and to its group.
        (signal.SIGTERM, 2, True),
        (signal.SIGINT, 2, False),
        # As Slurm's --signal=USR1.
        (signal.SIGUSR1, 2, True),
        # As a shell whose terminal is gone.
        (signal.SIGHUP, 2, False),
    ],
)
def test_a_run_whose_group_was_asked_to_end_is_resumed_bit_for_bit(tmp_path, whole, number, times, in_background):
    run = tmp_path / "run"
    before = signal.getsignal(signal.SIGINT)
    if in_background:  # a shell has it ignored there
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = _start(clips(run, **{"data.workers": 2}), tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)
    _wait_for(run, steps=2, process=process)
    workers = psutil.Process(process.pid).children(recursive=True)
    assert len(workers) >= 2
    for _ in range(times):
        os.killpg(process.pid, number)
    errors = process.communicate(timeout=60)[1].decode()
    assert process.returncode == 130, errors
    assert "continue with --resume" in errors
    assert "Traceback" not in errors
    assert [each for each in workers if each.is_running() and each.status() != psutil.STATUS_ZOMBIE] == []
    assert max(_step_of(path) for path in run.glob("epoch*")) >= 2
    train(clips(run), resume=True)
    assert_same(run, whole, STEPS)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no flock")
def test_a_folder_that_another_run_uses_is_refused(run):
    with locked_file(run / LOCK_FILE):
        for choice in ({"resume": True}, {"overwrite": True}):
            with pytest.raises(OutputError, match=r"run is in use by another run: process \d+ on "):
                train(clips(run), **choice)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_runs_that_are_killed_four_times_are_resumed_bit_for_bit(tmp_path, whole, seed):
    run, rng = tmp_path / "run", random.Random(seed)
    settings, survived = clips(run, **{"checkpoints.every": 1}), 0
    for _ in range(4):
        process = _start(settings, tmp_path, flags=_flags_to_continue(run))
        before = _steps_logged(run)
        deadline = time.monotonic() + 120
        # At least to where it does steps, and then some.
        while _steps_logged(run) <= min(before, STEPS - 2) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.15))
        if process.poll() is not None:
            survived += 1
            assert process.returncode == 0, process.stderr.read().decode()
        process.kill()
        process.wait()
        for checkpoint in run.glob("epoch*"):
            assert wrong_files(checkpoint) == [], checkpoint
    assert survived < 4, "no run was killed before its end"
    process = _start(settings, tmp_path, flags=_flags_to_continue(run))
    assert process.wait(120) == 0, process.stderr.read().decode()
    assert not list(run.glob(".saving-*"))
    assert_same(run, whole, STEPS)


def test_a_run_that_is_over_exports_again(run):
    settings = clips(run, **{"loop.steps": 2})
    exported = (run / "vae.safetensors").read_bytes()
    (run / "vae.safetensors").unlink()
    assert train(settings, resume=True).steps == 2
    assert (run / "vae.safetensors").read_bytes() == exported
    with pytest.raises(
        RequestError, match=r"loop\.steps=1 is already done: .*epoch0-global_step2 is of step 2"
    ) as caught:
        train(settings.replace({"loop.steps": 1, "optimizer.decay_steps": 1}), resume=True)
    assert caught.value.hint == "use a number over 2: --set loop.steps=N"


@pytest.mark.parametrize(
    ("asked", "taken", "warning"),
    [
        (None, 2, "loop.micro_batches=2, as the run began, not 1"),
        pytest.param(4, 4, "an update has 4 micro-batches from now on, instead of 2", marks=pytest.mark.slow),
    ],
)
def test_micro_batches_stay_as_the_run_began_unless_others_are_set(run, asked, taken, warning):
    listener = Listener()
    train(clips(run, **{"loop.steps": 3, "loop.micro_batches": asked}), resume=True, reporter=listener)
    assert listener.warnings == [warning]
    (folder,) = run.glob("epoch*-global_step3")
    running = json.loads((folder / "running_states.json").read_text())
    assert running["micro_batches"] == taken
    assert json.loads((run / "settings.json").read_text())["loop"]["micro_batches"] == taken
    # No micro-batch is skipped at the change, and none is repeated.
    assert running["sampler"]["number"] == 2 * 2 + taken


def test_ranks_that_cannot_share_the_recorded_number_need_another(tmp_path):
    settings, threads = tiny_training.vae_settings(tmp_path), ThreadChoice(count=1, reason="one")
    running = RunningStates(global_step=1, skipped_in_a_row=0, micro_batches=3, sampler={})
    with pytest.raises(RequestError, match="2 data-parallel ranks cannot share") as caught:
        as_recorded(running, settings, threads, data_ranks=2, reporter=Listener())
    assert "--set loop.micro_batches=4" in caught.value.hint


def _replace_state(run: Path, **changes: object) -> None:
    """Replace values of the running states of a checkpoint."""
    (running,) = run.glob("epoch*-global_step2/running_states.json")
    document = json.loads(running.read_text()) | changes
    running.write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"schema": "osora.train/99"}, r"has the schema 'osora\.train/99', and this version of osora reads 'osora\."),
        ({"sha256": {}}, "sha256 is no mapping of file to hash"),
        ({"sha256": {"ema.safetensors": "0" * 64}}, "ema.safetensors is not what was written"),
        ({"sha256": {"ema.safetensors": ""}}, "is no hash of 'ema.safetensors'"),
        ({"sampler": None}, r"running_states\.json is broken: sampler: "),
        ({"done": 7}, r"running_states\.json is broken: done: "),
        ({"global_step": 2**63}, r"running_states\.json is broken: global_step: "),
    ],
)
def test_running_states_that_are_not_understood_are_refused(run, changes, problem):
    _replace_state(run, **changes)
    with pytest.raises(CheckpointError, match=problem):
        train(clips(run, **{"loop.steps": 3}), resume=True)


@pytest.mark.slow
def test_resuming_from_an_older_checkpoint_sets_newer_ones_aside(tmp_path, whole):
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    train(clips(run), resume=next(run.glob("epoch*-global_step4")))
    assert_same(run, whole, STEPS)
    assert [path.name for path in run.glob("aside*")] == ["aside-1-epoch1-global_step6"]


def _flags_to_continue(run: Path) -> list[str]:
    if any(run.glob("epoch*")):
        return ["--resume"]
    # Killed before the first checkpoint, there may be a log.
    return ["--overwrite"]


def _start(settings: TrainSettings, folder: Path, *, flags: Sequence[str] = ()) -> "subprocess.Popen[bytes]":
    path = folder / "settings.json"
    path.write_text(json.dumps(settings.model_dump(mode="json")))
    command = [sys.executable, "-m", "opensora_cli", "train", "--from", str(path), "--quiet"]
    return subprocess.Popen(
        [*command, *flags],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


def _steps_logged(run: Path) -> int:
    path = run / "log.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("step")[2])


def _wait_for(run: Path, *, steps: int, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + 240
    while _steps_logged(run) < steps or not any(run.glob("epoch*")):
        assert process.poll() is None, process.communicate()[1].decode()
        assert time.monotonic() < deadline
        time.sleep(0.01)
