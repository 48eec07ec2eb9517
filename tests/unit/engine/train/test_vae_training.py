"""Autoencoders of every kind, trained for some steps on clips and pictures, alone and against a discriminator."""

import pytest
import torch
from tiny_autoencoders import OPTIMIZER, mixed_batches, vae_task, vae_trainer

DISCRIMINATOR = {"weight": 0.05, "width": 8, "layers": 2, "learning_rate": 1e-3}


def copy_of(module):
    return {name: weight.detach().clone() for name, weight in module.named_parameters()}


def equal(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("kind", [pytest.param("hunyuan", marks=pytest.mark.slow), "dc_ae"])
def test_the_discriminator_starts_at_its_step(kind):
    decaying = OPTIMIZER.replace({"weight_decay": 0.1})
    task = vae_task(kind, optimizer=decaying, discriminator={**DISCRIMINATOR, "start_step": 3})
    trainer = vae_trainer(task, mixed_batches(kind), steps=6, optimizer=decaying)
    learner, first = trainer.learners["adversary"], copy_of(task.adversary.module)
    for step in range(6):
        before = copy_of(task.adversary.module)
        figures = trainer.do_step().figures
        started = step >= 3
        assert equal(copy_of(task.adversary.module), before) is not started
        assert ("adversary_loss" in figures) is started
        assert ("adversarial_weight" in figures) is started
        counts = {float(optimizer.state[weight]["step"]) for _, weight, optimizer in learner.trained() if started}
        assert counts == ({step - 2} if started else set())
        if step == 2:
            assert equal(before, first)
