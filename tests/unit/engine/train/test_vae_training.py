"""Autoencoders of every kind, trained for some steps on clips and pictures, alone and against a discriminator."""

import pytest
import torch
from tiny_autoencoders import OPTIMIZER, UNCLIPPED, mixed_batches, vae_task, vae_trainer

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


def test_accumulated_gradients_are_those_of_the_mean():
    """The balance is of each micro-batch alone: two of them in one update give the mean of their gradients."""
    gradients = []
    for micro_batches in (1, 2):
        task = vae_task("hunyuan", optimizer=UNCLIPPED, discriminator=DISCRIMINATOR)
        batches = mixed_batches("hunyuan")
        trainer = vae_trainer(task, batches, steps=2, micro_batches=micro_batches, optimizer=UNCLIPPED)
        found = []
        for learner in trainer.learners.values():
            learner.update = lambda: None
        for _ in range(2 // micro_batches):
            trainer.do_step()
            found.append(
                {
                    f"{name}.{parameter}": weight.grad.clone()
                    for name, learner in trainer.learners.items()
                    for parameter, weight in learner.weights.items()
                }
            )
        gradients.append(found)
    (first, second), (both,) = gradients
    largest = max(float(gradient.abs().max()) for gradient in both.values())
    assert both.keys() == first.keys()
    assert any(name.startswith("adversary.") for name in both)
    for name, gradient in both.items():
        mean = 0.5 * (first[name] + second[name])
        assert torch.allclose(gradient, mean, rtol=1e-4, atol=1e-6 * largest), name
