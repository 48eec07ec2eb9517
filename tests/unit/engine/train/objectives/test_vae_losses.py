"""The autoencoder's losses, and the weight of the adversarial term."""

import pytest
import torch
from torch import nn

from opensora_cli.engine.train.objectives.vae import (
    adaptive_weight,
    gradient_error,
    gradient_norm,
    kl_divergence,
    psnr,
    reconstruction_error,
    with_gradient,
)


def test_reconstruction_error():
    pixels = torch.tensor([0.0, 0.5, -1.0, 1.0])
    loss, squared = reconstruction_error(pixels + torch.tensor([0.1, -0.3, 0.0, 0.4]), pixels, squared_weight=2.0)
    assert float(squared) == pytest.approx((0.01 + 0.09 + 0.16) / 4)
    assert float(loss) == pytest.approx(0.2 + 2.0 * 0.065)


def test_gradient_error_is_that_of_edges():
    clip = torch.rand(2, 3, 4, 6, 8, generator=torch.Generator().manual_seed(0))
    assert float(gradient_error(clip + 0.5, clip)) == pytest.approx(0.0, abs=1e-6)
    edge = clip.clone()
    edge[..., 4:] += 0.7  # between columns 3 and 4, of seven neighbours in a row
    assert float(gradient_error(edge, clip)) == pytest.approx(0.7 / 7)
    assert float(gradient_error(edge.mT, clip.mT)) == pytest.approx(0.7 / 7)


@pytest.mark.parametrize(("error", "decibels"), [(2.0, 0.0), (0.2, 20.0), (0.02, 40.0)])
def test_psnr(error, decibels):
    assert float(psnr(torch.tensor(error).square())) == pytest.approx(decibels, abs=1e-4)


def test_kl_divergence_is_that_of_torch():
    generator = torch.Generator().manual_seed(0)
    mean, logvar = (torch.randn(3, 5, generator=generator) for _ in range(2))
    ours = torch.distributions.Normal(mean, torch.exp(0.5 * logvar))
    standard = torch.distributions.Normal(torch.zeros(3, 5), torch.ones(3, 5))
    expected = torch.distributions.kl_divergence(ours, standard).mean()
    assert float(kl_divergence(mean, logvar)) == pytest.approx(float(expected), rel=1e-6)


def test_weight():
    assert float(adaptive_weight(torch.tensor(3.0), torch.tensor(2.0))) == pytest.approx(3.0 / 2.0001)
    assert float(adaptive_weight(torch.tensor(0.5), torch.tensor(0.0))) == pytest.approx(0.5 / 1e-4)
    assert float(adaptive_weight(torch.tensor(9.0), torch.tensor(0.0))) == 1e4
    assert torch.isnan(adaptive_weight(torch.tensor(torch.nan), torch.tensor(1.0)))


def test_the_gradient_norm_is_that_by_the_weight_and_accumulates_nothing():
    layer = nn.Conv3d(4, 3, 3, padding=1)
    hidden = torch.randn(2, 4, 5, 6, 7, generator=torch.Generator().manual_seed(0), requires_grad=True)
    made = layer(hidden)
    norm = gradient_norm(made, layer.weight, torch.ones_like(made))
    assert layer.weight.grad is None
    made.sum().backward()
    assert float(norm) == pytest.approx(float(layer.weight.grad.norm()), rel=1e-6)


def test_a_known_gradient_goes_on_as_if_it_had_been_differentiated():
    weight = torch.tensor([1.0, -2.0, 3.0], requires_grad=True)
    direct = (weight * 2.0).pow(3).sum()
    output = weight * 2.0
    leaf = output.detach().requires_grad_()
    value = leaf.pow(3).sum()
    (gradient,) = torch.autograd.grad(value, leaf)
    joined = with_gradient(output, value=value, gradient=gradient)
    assert float(joined.detach()) == float(direct.detach())
    (expected,) = torch.autograd.grad(direct * 0.5, weight)
    (found,) = torch.autograd.grad(joined * 0.5, weight)
    assert torch.equal(found, expected)
