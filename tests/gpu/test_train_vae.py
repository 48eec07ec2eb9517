"""Autoencoders in training on a CUDA device: the loss and the gradients of a CPU."""

import pytest
import torch
from tiny_autoencoders import NUM_FRAMES, clip_batch, vae_task

from opensora_cli.data.batches import SampleRng

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
        task.begin_step(0)
        # Noise is drawn on the host, whatever the device.
        batch = clip_batch(0, num_frames=NUM_FRAMES[kind])
        (_, loss, figures), (_, opposing, _) = task.losses(batch, SampleRng.of(0, 0))
        (loss + opposing).backward()
        modules = (task.module, task.adversary.module)
        gradient = torch.cat([weight.grad.flatten().cpu() for module in modules for weight in module.parameters()])
        figures = {name: float(value) for name, value in figures.items()}
        found.append((float(loss.detach()), float(opposing.detach()), figures, gradient))
    (loss, opposing, figures, gradient), (cuda_loss, cuda_opposing, cuda_figures, cuda_gradient) = found
    assert cuda_loss == pytest.approx(loss, rel=1e-4)
    assert cuda_opposing == pytest.approx(opposing, rel=1e-4)
    assert cuda_figures == pytest.approx(figures, rel=1e-3, abs=1e-4)
    assert torch.allclose(cuda_gradient, gradient, rtol=1e-2, atol=1e-4 * float(gradient.abs().max()))
