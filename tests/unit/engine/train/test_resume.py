"""Resumed runs equal uninterrupted ones bit for bit, whatever ended the first part; two never share a folder."""

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
import tiny_training
import torch
from toy_training import Listener

from opensora_cli.checkpoint.shared_folder import wrong_files
from opensora_cli.core.exceptions import CheckpointError, OutputError, RequestError
from opensora_cli.core.limits import ThreadChoice
from opensora_cli.core.locks import LOCK_FILE, locked_file
from opensora_cli.engine.train.early import Resume
from opensora_cli.engine.train.run import train
from opensora_cli.engine.train.state import RunningStates, as_recorded, read_running_states
from opensora_cli.settings.train import TrainSettings

STEPS = 6


def clips(output: Path, **changes: object) -> TrainSettings:
    """An autoencoder on two epochs; two micro-batches an update."""
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


LEARNT = ("step", "epoch", "loss", "adversary_loss", "grad_norm", "psnr", "learning_rate", "skipped")


def log(run: Path) -> list[dict[str, object]]:
    """What the log says of each step, but for how long it took."""
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert all({"step", "loss", "grad_norm", "learning_rate"} <= line.keys() for line in lines)
    return [{name: line.get(name) for name in LEARNT} for line in lines]


def hashes(run: Path, step: int) -> dict[str, str]:
    """Return the hash of each file of a checkpoint."""
    (folder,) = run.glob(f"epoch*-global_step{step}")
    assert wrong_files(folder) == []
    running = json.loads((folder / "running_states.json").read_text())
    return {**running["sha256"], "sampler": running["sampler"]}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert train(clips(folder)).resumed_from is None
    return folder


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


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_six_steps_are_four_and_two_with_workers_or_without(tmp_path, whole, workers):
    run = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt, match=r"step 4 of 6 is saved in .*: continue with --resume"):
        train(clips(run, **{"data.workers": workers}), reporter=tiny_training.StopAfter(4))
    # Mid-epoch: of seven micro-batches an epoch, eight are done.
    assert hashes(run, 4) == hashes(whole, 4)
    result = train(clips(run), resume=Resume())
    assert (result.resumed_from, result.steps) == (4, STEPS)
    # Losses, rates and gradient norms; then weights, averages, moments, and the place in the data.
    assert log(run) == log(whole)
    assert len({line["loss"] for line in log(run)}) == STEPS
    assert hashes(run, STEPS) == hashes(whole, STEPS)
    assert {"model/model-00001-of-00001.safetensors", "ema.safetensors", "adversary.safetensors"} < hashes(
        run, STEPS
    ).keys()


def test_a_resumed_run_removes_the_checkpoints_that_an_ended_one_was_about_to_remove(tmp_path):
    run, both = tmp_path / "run", {"loop.steps": 2, "checkpoints.every": 1}
    train(clips(run, **both))
    assert len(list(run.glob("epoch*"))) == 2
    train(clips(run, **both, **{"checkpoints.keep": 1, "checkpoints.keep_best": False}), resume=Resume())
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
    train(clips(run), resume=Resume())
    assert log(run) == log(whole)
    assert hashes(run, STEPS) == hashes(whole, STEPS)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no flock")
def test_a_folder_that_another_run_uses_is_refused(run):
    with locked_file(run / LOCK_FILE):
        for choice in ({"resume": Resume()}, {"overwrite": True}):
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
    assert log(run) == log(whole)
    assert hashes(run, STEPS) == hashes(whole, STEPS)


def test_a_run_that_is_over_exports_again(run):
    settings = clips(run, **{"loop.steps": 2})
    exported = (run / "vae.safetensors").read_bytes()
    (run / "vae.safetensors").unlink()
    assert train(settings, resume=Resume()).steps == 2
    assert (run / "vae.safetensors").read_bytes() == exported
    with pytest.raises(
        RequestError, match=r"loop\.steps=1 is already done: .*epoch0-global_step2 is of step 2"
    ) as caught:
        train(settings.replace({"loop.steps": 1, "optimizer.decay_steps": 1}), resume=Resume())
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
    train(clips(run, **{"loop.steps": 3, "loop.micro_batches": asked}), resume=Resume(), reporter=listener)
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


def _replace_state(run: Path, name: str, content: bytes, **changes: object) -> None:
    """Replace a file of the checkpoint, with its hash, and values of its running states."""
    (running,) = run.glob("epoch*-global_step2/running_states.json")
    document = json.loads(running.read_text()) | changes
    if name:
        (running.parent / name).write_bytes(content)
        document["sha256"][name] = hashlib.sha256(content).hexdigest()
    running.write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"schema": "osora.train/99"}, r"has the schema 'osora\.train/99', and this version of osora reads 'osora\."),
        ({"sha256": {}}, "sha256 is no mapping of file to hash"),
        ({"sha256": {"ema.safetensors": "0" * 64}}, "has no hash in running_states"),
        ({"sha256": {"ema.safetensors": ""}}, "is no hash of 'ema.safetensors'"),
        ({"sampler": None}, r"running_states\.json is broken: sampler: "),
        ({"done": 7}, r"running_states\.json is broken: done: "),
        ({"global_step": 2**63}, r"running_states\.json is broken: global_step: "),
    ],
)
def test_running_states_that_are_not_understood_are_refused(run, changes, problem):
    _replace_state(run, "", b"", **changes)
    with pytest.raises(CheckpointError, match=problem):
        train(clips(run, **{"loop.steps": 3}), resume=Resume())


def test_a_checkpoint_of_an_earlier_version_names_the_version_that_reads_it(run):
    (path,) = run.glob("epoch*-global_step2/running_states.json")
    document = json.loads(path.read_text()) | {"schema": "osora.running-states/1"}
    del document["sampler"]
    path.write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=r"has no schema osora\.running-states/2: this version") as raised:
        train(clips(run, **{"loop.steps": 3}), resume=Resume())
    assert raised.value.hint == (
        "resume with the version that wrote it, or start again with another --set output=FOLDER"
    )


def test_a_log_that_cannot_be_read_is_refused(run):
    (run / "log.jsonl").write_bytes(b"\xff")
    with pytest.raises(OutputError, match=r"cannot read .*log\.jsonl: "):
        train(clips(run, **{"loop.steps": 3}), resume=Resume())


@pytest.mark.slow
def test_resuming_from_an_older_checkpoint_sets_newer_ones_aside(tmp_path, whole):
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    train(clips(run), resume=Resume(folder=next(run.glob("epoch*-global_step4"))))
    assert log(run) == log(whole)
    assert hashes(run, STEPS) == hashes(whole, STEPS)
    assert [path.name for path in run.glob("aside*")] == ["aside-epoch1-global_step6"]


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
