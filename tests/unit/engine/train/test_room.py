"""A CPU's memory is compared with what a step takes before each step: nothing is lost where there is too little."""

from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_training
import torch
from safetensors.torch import load_file

from opensora_cli.core.exceptions import HardwareError
from opensora_cli.core.private_memory import PrivateMemory
from opensora_cli.core.progress import SilentReporter
from opensora_cli.engine.train import room, run
from opensora_cli.engine.train.early import Resume
from opensora_cli.engine.train.room import STEP, Room, first_step_bytes
from opensora_cli.engine.train.run import train
from opensora_cli.engine.train.strategy.distribution import Distribution
from opensora_cli.settings.train import TrainSettings

PLENTY = 2**60
CPU = Distribution(torch.device("cpu"))
ESTIMATE = SimpleNamespace(
    at_peak={"weights": 1, "average": 2, "frozen parts": 4, "optimizer": 8, "gradients": 16, "buffers": 32}
    | {"activations": 64},
)


class Machine:
    """A process that holds 100 bytes of its own and 10 of files, and in which the highest peak and what is free are
    set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.highest: Iterator[int] = repeat(110)
        self.free: Iterator[int] = repeat(PLENTY)
        monkeypatch.setattr(room, "_read_process", lambda: (100, 10, next(self.highest)))
        monkeypatch.setattr(
            room, "read_private_memory", lambda: PrivateMemory(free_bytes=next(self.free), total_bytes=PLENTY)
        )


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def settings_of(folder: Path, **changes: object) -> TrainSettings:
    return tiny_training.vae_settings(folder).replace(changes)


def taken(settings: TrainSettings, *, has_moments: bool = False) -> int:
    return first_step_bytes(settings, has_moments=has_moments, reporter=SilentReporter())


def assert_same_weights(run: Path, other: Path) -> None:
    paths = [path.relative_to(run) for path in run.glob("epoch0-global_step4/**/*.safetensors")]
    assert paths
    for path in paths:
        expected = load_file(other / path)
        assert all(torch.equal(value, expected[key]) for key, value in load_file(run / path).items())


class TestFirstStep:
    def test_it_is_not_estimated_where_there_is_plenty(self, machine, tmp_path, monkeypatch):
        monkeypatch.delattr(room, "estimate_training")
        assert taken(settings_of(tmp_path)) == 0

    @pytest.mark.parametrize(("has_moments", "expected"), [(False, 120), (True, 112)])
    def test_what_is_loaded_before_it_does_not_count(self, machine, tmp_path, monkeypatch, has_moments, expected):
        machine.free = repeat(0)
        monkeypatch.setattr(room, "estimate_training", lambda settings, *, rank, activations: ESTIMATE)
        assert taken(tiny_training.mmdit_settings(tmp_path), has_moments=has_moments) == expected

    def test_it_does_not_begin_where_it_does_not_fit(self, machine, tmp_path, monkeypatch):
        machine.free = repeat(119)
        monkeypatch.setattr(room, "estimate_training", lambda settings, *, rank, activations: ESTIMATE)
        message = r"^a step needs 120 bytes more memory, and by now 119 bytes are free$"
        with pytest.raises(HardwareError, match=message) as caught:
            train(settings_of(tmp_path))
        assert caught.value.exit_code == 4
        assert caught.value.hint.startswith("start again with --overwrite, and close what else takes memory")
        assert list(tmp_path.glob("epoch*")) == []

    @pytest.mark.slow
    def test_its_estimate_leaves_no_trace(self, machine, tmp_path):
        machine.free = repeat(10**6)
        before = torch.get_rng_state()
        needed = taken(settings_of(tmp_path))
        assert 10**4 < needed < 10**6
        assert torch.equal(torch.get_rng_state(), before)
        train(settings_of(tmp_path / "estimated"))
        machine.free = repeat(PLENTY)
        train(settings_of(tmp_path / "plenty"))
        assert_same_weights(tmp_path / "estimated", tmp_path / "plenty")
        machine.free = repeat(needed - 1)
        with pytest.raises(HardwareError, match=r"^a step needs .* more memory"):
            train(settings_of(tmp_path / "short"))


class TestRoom:
    def lack(self, machine: Machine, *looks: tuple[str, int, int], first: int = 0) -> list[bool]:
        """Look before each of these, with the highest peak until then and what is free; return what did not fit."""
        tried = Room(CPU, ranks_per_node=1, first_step_bytes=first)
        machine.highest = iter([highest for _, highest, _ in looks])
        machine.free = iter([free for _, _, free in looks])
        return [tried.lack(what) is not None for what, _, _ in looks]

    def test_the_first_step_takes_what_was_estimated(self, machine):
        assert self.lack(machine, (STEP, 900, 50), first=50) == [False]
        assert self.lack(machine, (STEP, 900, 49), first=50) == [True]

    def test_the_next_ones_take_what_they_have_taken(self, machine):
        # The peak of loading says nothing of them.
        assert self.lack(machine, (STEP, 900, 0), (STEP, 900, 0)) == [False, False]
        # Of 910 bytes 10 are pages of files, and 100 are held.
        assert self.lack(machine, (STEP, 900, 0), (STEP, 910, 800)) == [False, False]
        assert self.lack(machine, (STEP, 900, 0), (STEP, 910, 799)) == [False, True]

    def test_a_validation_takes_as_much_as_a_step_or_as_it_has_taken(self, machine):
        step, first = (STEP, 110, 0), ("a validation", 910, PLENTY)
        assert self.lack(machine, step, ("a validation", 910, 799)) == [False, True]
        assert self.lack(machine, step, first, (STEP, 1910, 800)) == [False] * 3
        assert self.lack(machine, step, first, (STEP, 1910, 800), ("a validation", 1910, 1799)) == [False] * 3 + [True]

    def test_a_gpu_is_left_to_its_allocator(self, machine):
        machine.free = repeat(0)
        gpu = Distribution(torch.device("cuda"))
        assert Room(gpu, ranks_per_node=1, first_step_bytes=50).lack(STEP) is None


class Validation:
    """One that is due after two steps, and takes nothing."""

    def __init__(self) -> None:
        self.done: list[int] = []

    def is_due(self, step: int) -> bool:
        return step == 2

    def run(self, step: int, trainer: object) -> dict[str, float]:
        self.done.append(step)
        return {"loss": 1.0}


class TestRun:
    """Runs of four steps, of which the first is seen to take 990 bytes."""

    def fill_up(self, machine: Machine, *, after: int) -> None:
        machine.highest = iter([110, *[1100] * 9])
        # The first look is for whether there is plenty.
        machine.free = iter([PLENTY] * (1 + after) + [989] * 9)

    @pytest.mark.parametrize("steps", [1, pytest.param(3, marks=pytest.mark.slow)])
    def test_memory_that_others_take_ends_it_with_a_checkpoint(self, machine, tmp_path, steps):
        self.fill_up(machine, after=steps)
        message = "^a step needs 990 bytes more memory, and by now 989 bytes are free$"
        with pytest.raises(HardwareError, match=message) as caught:
            train(settings_of(tmp_path / "run"))
        assert caught.value.exit_code == 4
        assert caught.value.hint.startswith("--resume from the last checkpoint, and close what else takes memory")
        assert [path.name for path in tmp_path.glob("run/epoch*")] == [f"epoch0-global_step{steps}"]
        machine.highest, machine.free = repeat(110), repeat(PLENTY)
        train(settings_of(tmp_path / "run"), resume=Resume())
        train(settings_of(tmp_path / "whole"))
        assert_same_weights(tmp_path / "run", tmp_path / "whole")

    def test_after_the_last_step_nothing_more_is_needed(self, machine, tmp_path):
        self.fill_up(machine, after=4)
        assert train(settings_of(tmp_path)).steps == 4

    def test_a_validation_is_left_to_the_resumed_run(self, machine, tmp_path, monkeypatch):
        validation = Validation()
        monkeypatch.setattr(run, "open_validation", lambda *args, **options: validation)
        self.fill_up(machine, after=2)
        with pytest.raises(HardwareError, match=r"^a validation needs 990 bytes more memory"):
            train(settings_of(tmp_path))
        assert validation.done == []
        assert [path.name for path in tmp_path.glob("epoch*")] == ["epoch0-global_step2"]
        machine.highest, machine.free = repeat(110), repeat(PLENTY)
        train(settings_of(tmp_path), resume=Resume())
        assert validation.done == [2]
