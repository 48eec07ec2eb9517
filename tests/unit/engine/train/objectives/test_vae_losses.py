"""The autoencoder's losses, and the weight of the adversarial term."""

import pytest
import torch

from opensora_cli.engine.train.objectives.vae import (
    adaptive_weight,
    gradient_error,
    kl_divergence,
    psnr,
)


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
