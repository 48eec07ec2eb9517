"""Objective of two adapters on one frozen base: every step trains the critic, and every second step the student."""

import torch
from torch import nn

from opensora_cli.checkpoint.writing import write_weights
from opensora_cli.engine.train.objectives import Objective
from opensora_cli.engine.train.trainer import MODEL, Role
from opensora_cli.settings.train_sections import OptimizerSettings


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(3, 3).requires_grad_(False)
        self.student, self.critic = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, colors_BC, adapter):
        return self.base(colors_BC) + self.get_submodule(adapter)(colors_BC)


class Distillation(Objective):
    def __init__(self):
        critic = OptimizerSettings(learning_rate=1e-2, warmup_steps=0)
        module = Adapted()
        super().__init__(module, roles={"critic": Role(module, critic, owns=lambda name: name.startswith("critic."))})

    @classmethod
    def build(cls, settings, *, distribution, clips, token_weights, reporter):
        return cls()

    @classmethod
    def stand_in(cls, settings):
        return cls(), []

    @classmethod
    def outline(cls, settings):
        with torch.device("meta"):
            return Adapted()

    @classmethod
    def layer_values(cls, settings, shape):
        return 3 * shape.batch_size * shape.num_frames

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


OBJECTIVE = Distillation
