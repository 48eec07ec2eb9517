"""An objective is one file: nothing else of the package depends on which one a run has."""

import re
from pathlib import Path

import pytest
import tiny_training
import torch
from safetensors.torch import load_file

import opensora_cli
from opensora_cli.core.progress import SilentReporter
from opensora_cli.engine.train import objectives
from opensora_cli.engine.train.early import Resume
from opensora_cli.engine.train.plan import plan_training, with_memory
from opensora_cli.engine.train.run import train
from opensora_cli.settings import train as train_settings

COLORS = '''
"""Objective that learns the mean color of clips."""

from opensora_cli.checkpoint.writing import write_weights
from opensora_cli.engine.train.objectives.base import Objective
from opensora_cli.engine.train.trainer import Task


class Colors(Objective):
    weights_file = "colors.safetensors"

    def frozen_parts(self, settings):
        return {}

    def require_frozen(self, settings):
        pass

    def layer_values(self, settings, shape):
        return 3 * shape.batch_size * shape.num_frames

    def stand_in(self, settings):
        import torch

        return MeanColor(torch.nn.Linear(1, 3)), []

    def outline(self, settings):
        import torch

        with torch.device("meta"):
            return torch.nn.Linear(1, 3)

    def build(self, settings, *, distribution, clips, token_weights, reporter):
        import torch

        return MeanColor(torch.nn.Linear(1, 3))


class MeanColor(Task):
    def loss(self, batch, rng):
        colors_BC = batch.pixels_BTHWC.float().mean(dim=(1, 2, 3)) / 255
        return (self.forward(colors_BC.new_ones(len(colors_BC), 1)) - colors_BC).square().mean(), {}

    def tokens(self, batch):
        return len(batch.paths)

    def export(self, weights, folder):
        write_weights(folder / "colors.safetensors", weights, dtype=weights["weight"].dtype)


OBJECTIVE = Colors()
'''


def test_an_objective_is_added_in_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "colors.py").write_text(COLORS)
    monkeypatch.setattr(objectives, "__path__", [*objectives.__path__, str(tmp_path)])
    monkeypatch.setitem(train_settings.TARGETS, "colors", train_settings.TARGETS["vae"])
    settings = tiny_training.vae_settings(tmp_path / "run").replace({"target": "colors"})
    plan = with_memory(plan_training(settings), reporter=SilentReporter())
    assert (plan.parameters, plan.memory.gradients_bytes) == (6, 24)
    with pytest.raises(KeyboardInterrupt, match="step 2 of 4 is saved"):
        train(settings, reporter=tiny_training.StopAfter(2))
    result = train(settings, resume=Resume())
    assert result is not None
    assert (result.target, result.parameters, result.resumed_from) == ("colors", 6, 2)
    (path,) = result.exports
    assert path == tmp_path / "run" / "colors.safetensors"
    assert load_file(path)["weight"].shape == torch.Size([3, 1])


def test_no_module_branches_on_the_target() -> None:
    package = Path(opensora_cli.__file__).parent
    branch = re.compile(r"\.target (is|==|!=|in) |\bmatch .*\.target\b|TrainTarget|TARGETS\[")
    found = [
        (str(path.relative_to(package)), line.strip())
        for folder in ("engine/train", "engine/encode", "engine/data", "engine/mem_profile", "settings", "cli")
        for path in sorted((package / folder).rglob("*.py"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if branch.search(line)
    ]
    assert found == [
        ("settings/train.py", "return TARGETS[self.target].trains_transformer"),
        ("settings/train.py", "yield from TARGETS[self.target].rules(self)"),
    ]
