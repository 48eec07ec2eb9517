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
"""Objective of two adapters on one frozen base: every step trains the critic, and every second step the student."""

import torch
from torch import nn

from opensora_cli.checkpoint.writing import write_weights
from opensora_cli.engine.train.objectives.base import MODEL, Role, Task
from opensora_cli.settings.train_loop import OptimizerSettings


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(3, 3).requires_grad_(False)
        self.student, self.critic = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, colors_BC, adapter):
        return self.base(colors_BC) + self.get_submodule(adapter)(colors_BC)


class Distillation(Task):
    def __init__(self):
        critic = OptimizerSettings(learning_rate=1e-2, warmup_steps=0)
        module = Adapted()
        super().__init__(module, roles={"critic": Role(module, critic, owns=lambda name: name.startswith("critic."))})

    def begin_step(self, step):
        self._step = step

    def loss(self, batch, rng):
        colors_BC = self._colors(batch)
        made_BC = self.forward(colors_BC + 0.1 * torch.randn(colors_BC.shape, generator=rng.torch), "student")
        with torch.no_grad():
            judged_BC = self.module(made_BC, "critic")
        return (made_BC - judged_BC).square().mean(), {}

    def losses(self, batch, rng):
        if self._step % 2 == 0:
            yield MODEL, *self.loss(batch, rng)
        colors_BC = self._colors(batch)
        with torch.no_grad():
            made_BC = self.module(colors_BC, "student")
        judged_BC = self.roles["critic"].forward(made_BC, "critic")
        yield "critic", (judged_BC - colors_BC).square().mean(), {}

    def tokens(self, batch):
        return len(batch.paths)

    def export(self, weights, folder):
        student = {name: weight for name, weight in weights.items() if name.startswith("student.")}
        write_weights(folder / "student.safetensors", student, dtype=torch.float32)

    def _colors(self, batch):
        return batch.pixels_BTHWC.float().mean(dim=(1, 2, 3)) / 255


def build(settings, *, distribution, clips, token_weights, reporter):
    return Distillation()


def stand_in(settings):
    return Distillation(), []


def outline(settings):
    with torch.device("meta"):
        return Adapted()


def layer_values(settings, shape):
    return 3 * shape.batch_size * shape.num_frames


def measured_steps(settings):
    return (0, 1)
'''


def test_an_objective_of_two_adapters_that_alternate_is_one_file(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "colors.py").write_text(COLORS)
    monkeypatch.setattr(objectives, "__path__", [*objectives.__path__, str(tmp_path)])
    target = train_settings.TARGETS["vae"]._replace(weights_file="student.safetensors")
    monkeypatch.setitem(train_settings.TARGETS, "colors", target)
    settings = tiny_training.vae_settings(tmp_path / "run").replace({"target": "colors", "loop.log_every": 1})
    plan = with_memory(plan_training(settings), reporter=SilentReporter())
    assert (plan.parameters, plan.memory.gradients_bytes) == (24, 96)

    whole = train(settings.replace({"output": str(tmp_path / "whole")}))
    with pytest.raises(KeyboardInterrupt, match="step 3 of 4 is saved"):
        train(settings, reporter=tiny_training.StopAfter(3))
    resumed = train(settings, resume=Resume())
    assert (resumed.target, resumed.parameters, resumed.resumed_from) == ("colors", 24, 3)
    assert resumed.exports == (tmp_path / "run" / "student.safetensors",)
    assert load_file(resumed.exports[0]).keys() == {"student.weight", "student.bias"}
    for name in ("model/model-00001-of-00001", "optimizer/moments", "optimizer/critic_moments"):
        found, expected = (load_file(each.checkpoint / f"{name}.safetensors") for each in (resumed, whole))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in found)
    updates = {
        name: float(load_file(whole.checkpoint / f"optimizer/{name}.safetensors")[key])
        for name, key in (("moments", "step.student.bias"), ("critic_moments", "step.critic.bias"))
    }
    assert updates == {"moments": 2.0, "critic_moments": 4.0}


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
    assert found == [("settings/train.py", "return TARGETS[self.target]")]
