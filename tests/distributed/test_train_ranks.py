"""Training by several processes: the same steps as one alone, one decision for all, one checkpoint of all."""

import errno
import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import tiny_training
import torch.distributed as dist
from tiny_strategies import Case
from toy_training import ToyTask, toy_trainer

from opensora_cli.checkpoint import shared_folder
from opensora_cli.checkpoint.shared_folder import wrong_files
from opensora_cli.core.exceptions import CheckpointError, OutputError
from opensora_cli.engine.train.checkpoints import CheckpointWriter, choose_checkpoint, restore
from opensora_cli.engine.train.run import train
from opensora_cli.engine.train.trainer import Trainer
from opensora_cli.settings.train import TrainSettings

STEPS = 6


def _trainer(task: ToyTask | None = None) -> Trainer:
    distribution = Case("ddp", dist.get_world_size()).open()
    return toy_trainer(task or ToyTask(), distribution=distribution, micro_batches=4, steps=STEPS)


def _weights(trainer: Trainer) -> dict[str, list[float]]:
    return {name: weight.flatten().tolist() for name, weight in trainer.task.module.named_parameters()}


def _figures(trainer: Trainer, steps: int) -> list[dict[str, float]]:
    return [dict(trainer.do_step().figures) for _ in range(steps)]


def _skipping() -> tuple[list[bool], list[float], tuple[str, ...]]:
    trainer = _trainer(ToyTask(not_finite=(5,)))
    trainer.do_step()
    before = _weights(trainer)
    reports = [trainer.do_step()]
    assert _weights(trainer) == before
    reports += [trainer.do_step() for _ in range(2)]
    return [report.skipped for report in reports], _weights(trainer)["out.bias"], reports[0].paths


def test_what_is_not_finite_on_one_rank_is_skipped_on_all(pool):
    for skipped, bias, paths in (found := pool(2).run(_skipping)):
        assert skipped == [True, False, False]
        # It was the other rank's, and both know whose.
        assert paths == ("toy5.mp4",)
        assert bias == found[0][1]


def _first_half(folder: str) -> str:
    trainer = _trainer()
    _figures(trainer, STEPS // 2)
    with CheckpointWriter(Path(folder)) as writer:
        saved = writer.save(trainer)
    trainer.distribution.barrier()
    return str(saved)


def _to_the_end(folder: str | None) -> tuple[list[dict[str, float]], dict[str, list[float]]]:
    trainer = _trainer()
    if folder is not None:
        restore(trainer, Path(folder))
    return _figures(trainer, STEPS - trainer.step), _weights(trainer)


def test_as_many_ranks_resume_bit_for_bit(pool, tmp_path):
    whole = pool(2).run(_to_the_end, None)
    folder = pool(2).run(_first_half, str(tmp_path))[0]
    assert wrong_files(Path(folder)) == []
    expected = [(figures[STEPS // 2 :], weights) for figures, weights in whole]
    assert pool(2).run(_to_the_end, folder) == expected


def _choose(run: str) -> str:
    distribution = Case("ddp", 2).open()
    try:
        return choose_checkpoint(Path(run), True, distribution=distribution).name
    except CheckpointError as error:
        return error.message


def test_a_broken_file_is_found_whichever_rank_reads_it(pool, tmp_path):
    folder = Path(pool(2).run(_first_half, str(tmp_path))[0])
    for name in ("ema.safetensors", "optimizer/moments.safetensors"):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        for message in pool(2).run(_choose, str(tmp_path)):
            assert f"{folder / name} is not what was written" in message
        (folder / name).write_bytes(content)
    assert pool(2).run(_choose, str(tmp_path)) == ["epoch0-global_step3"] * 2


def _full(folder: str, failing: int, function: str) -> str:
    trainer, real = _trainer(), getattr(shared_folder, function)

    def fail(*given: Any) -> Any:
        if trainer.distribution.rank == failing:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*given)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(shared_folder, function, fail)
        writer = CheckpointWriter(Path(folder))
        writer.save(trainer)
        try:
            writer.wait()
        except OutputError as error:
            return error.message
    return "done"


@pytest.mark.parametrize(("failing", "function"), [(0, "_write"), (1, "_write"), (1, "_hashes"), (0, "replace_folder")])
def test_a_save_that_fails_on_one_rank_fails_on_all(pool, tmp_path, failing, function):
    messages = pool(2).run(_full, str(tmp_path), failing, function)
    prefix, reason = f"cannot write {tmp_path / 'epoch0-global_step0'}: ", "No space left on device"
    assert messages.pop(failing) == prefix + reason
    assert messages == [f"{prefix}rank {failing}: {reason}"]
    assert list(tmp_path.iterdir()) == []


def _settings(output: Path, **changes: object) -> TrainSettings:
    return tiny_training.vae_settings(output).replace(
        {"loop.steps": 8, "loop.micro_batches": 2, "checkpoints.every": 100, "precision.compute": "fp32", **changes}
    )


def _command(settings: TrainSettings, folder: Path, *flags: str) -> list[str]:
    path = folder / "settings.json"
    path.write_text(json.dumps(settings.model_dump(mode="json")))
    return ["train", "--from", str(path), *flags]


def _log(run: Path) -> list[dict[str, float]]:
    names = ("step", "loss", "grad_norm", "learning_rate")
    return [{name: line[name] for name in names} for line in tiny_training.log(run)]


@pytest.mark.slow
def test_two_ranks_save_on_ctrl_c_and_one_resumes(tmp_path, processes, no_ranks_around):
    whole, run = tmp_path / "whole", tmp_path / "run"
    train(_settings(whole, **{"loop.steps": 1, "optimizer.decay_steps": 0}))

    # So many that it does not end by itself.
    long = _settings(run, **{"loop.steps": 100_000, "optimizer.decay_steps": 99_994})
    command = processes.osora(tmp_path, _command(long, tmp_path, "--gpus", "2", "--device", "cpu"))
    deadline = time.monotonic() + 120
    while not (run / "log.jsonl").exists() and command.is_running() and time.monotonic() < deadline:
        time.sleep(0.05)
    command.send(signal.SIGINT)
    code, _, err = command.end(120)
    assert code == 130, err
    assert "continue with --resume" in err
    (folder,) = run.glob("epoch0-global_step*")
    assert wrong_files(folder) == []
    step = int(folder.name.rpartition("step")[2])

    more = _settings(run, **{"loop.steps": step + 2, "optimizer.decay_steps": 1})
    result = train(more, resume=True)
    assert result is not None
    assert result.resumed_from == step
    assert [line["step"] for line in _log(run)] == list(range(1, step + 3))
    # The first steps have the same rates, and so the same losses as one process alone.
    assert _log(run)[0] == pytest.approx(_log(whole)[0], rel=1e-4)
