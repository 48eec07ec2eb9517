"""The mathematics of a training step where the golden file is not sharp: the noise that is left, and the shift."""

import pytest
import torch

from opensora_cli.engine.train.flow import flow_target, get_batch_loss, noisy_latents, shifted_time

SIGMA = 0.2


def pair():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 3, 4, generator=generator), torch.randn(2, 3, 4, generator=generator)


def test_ends():
    data, noise = pair()
    assert torch.allclose(noisy_latents(data, noise, torch.zeros(2), sigma_min=SIGMA), data + SIGMA * noise)
    assert torch.equal(noisy_latents(data, noise, torch.ones(2), sigma_min=SIGMA), noise)


def test_every_sample_has_its_time():
    data, noise = pair()
    mixed = noisy_latents(data, noise, torch.tensor([0.0, 1.0]), sigma_min=0.0)
    assert torch.equal(mixed, torch.stack([data[0], noise[1]]))


def test_the_target_is_the_derivative_by_time():
    data, noise = (value.double() for value in pair())
    t = torch.tensor([0.3, 0.8], dtype=torch.float64, requires_grad=True)
    noisy_latents(data, noise, t, sigma_min=SIGMA).sum().backward()
    target = flow_target(data, noise, sigma_min=SIGMA)
    assert torch.allclose(t.grad, target.sum(dim=(1, 2)))


def test_shift():
    normal = torch.tensor([-2.0, 0.0, 2.0])
    assert torch.allclose(shifted_time(normal, shift=1.0), torch.sigmoid(normal))
    assert shifted_time(normal, shift=3.0)[1].item() == pytest.approx(0.75)


def test_loss_is_taken_in_float32():
    velocity = torch.full((1, 1, 2), 256.0, dtype=torch.bfloat16)
    loss = get_batch_loss(velocity, torch.tensor([[[255.0, 258.0]]]))
    assert (loss.dtype, loss.item()) == (torch.float32, 2.5)
