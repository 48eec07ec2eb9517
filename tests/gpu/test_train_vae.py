"""Autoencoders in training on a CUDA device: the loss and the gradients of a CPU, and steps that lower it."""

import pytest
import torch
from tiny_autoencoders import NUM_FRAMES, VAES, clip_batch, mixed_batches, vae_task, vae_trainer

from opensora_cli.core.progress import SilentReporter
from opensora_cli.engine.train.objectives.task import SampleRng
from opensora_cli.engine.train.objectives.vae import build_vae_task
from opensora_cli.engine.train.precision import Precision
from opensora_cli.engine.train.strategy.distribution import Distribution
from opensora_cli.settings.train import TrainSettings

DISCRIMINATOR = {"weight": 0.05, "width": 8, "layers": 2}


@pytest.mark.parametrize("kind", NUM_FRAMES)
def test_loss_and_gradients_are_those_of_a_cpu(kind, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    found = []
    for device in ("cpu", "cuda"):
        task = vae_task(kind, squared_error_weight=1.0, discriminator=DISCRIMINATOR)
        task.module.to(device)
        task.adversary.module.to(device)
        task.begin_step(0, None)
        # Noise is drawn on the host, whatever the device.
        loss, figures = task.loss(clip_batch(0, num_frames=NUM_FRAMES[kind]), SampleRng.of(0, 0))
        loss.backward()
        opposing, _ = task.adversary.loss()
        opposing.backward()
        modules = (task.module, task.adversary.module)
        gradient = torch.cat([weight.grad.flatten().cpu() for module in modules for weight in module.parameters()])
        figures = {name: float(value) for name, value in figures.items()}
        found.append((float(loss.detach()), float(opposing.detach()), figures, gradient))
    (loss, opposing, figures, gradient), (cuda_loss, cuda_opposing, cuda_figures, cuda_gradient) = found
    assert cuda_loss == pytest.approx(loss, rel=1e-4)
    assert cuda_opposing == pytest.approx(opposing, rel=1e-4)
    assert cuda_figures == pytest.approx(figures, rel=1e-3, abs=1e-4)
    assert torch.allclose(cuda_gradient, gradient, rtol=1e-2, atol=1e-4 * float(gradient.abs().max()))


@pytest.mark.parametrize("kind", ["hunyuan", "dc_ae"])
def test_it_learns(kind):
    task = vae_task(kind, squared_error_weight=1.0, discriminator={**DISCRIMINATOR, "start_step": 25})
    task.module.to("cuda")
    task.adversary.module.to("cuda")
    trainer = vae_trainer(task, mixed_batches(kind), steps=30, distribution=Distribution(torch.device("cuda")))
    figures = [trainer.do_step().figures for _ in range(30)]
    losses = [each["loss"] for each in figures[:25]]
    assert sum(losses[-6:]) < 0.8 * sum(losses[:6])
    assert ["adversary_loss" in each for each in figures].count(True) == 5


def test_a_decoder_is_trained_alone():
    settings = TrainSettings.model_validate(
        {
            "target": "vae",
            "init": "demo",
            "vae": VAES["hunyuan"].model_dump(),
            "data": {"scenes": {"size": 32, "num_frames": 5, "batch_size": 2}},
            "train_vae": {"decoder_only": True},
        }
    )
    device = torch.device("cuda")
    task = build_vae_task(settings, device=device, reporter=SilentReporter())
    Distribution(device).shard(task.module)
    task.begin_step(0, None)
    with Precision(settings.precision, device).autocast():
        loss, _ = task.loss(clip_batch(0, num_frames=5, size=32), SampleRng.of(0, 0))
    loss.backward()
    learnt = {name.partition(".")[0] for name, weight in task.module.named_parameters() if weight.grad is not None}
    assert learnt == {"decoder", "post_quant_conv"}
