"""The plain terms, against hand calculations and what is known of them."""

import math

import pytest
import torch

from opensora_cli.engine.train.objectives.vae_losses import kl_divergence, psnr, reconstruction_error


def test_reconstruction_error():
    pixels = torch.tensor([0.0, 0.5, -1.0, 1.0])
    loss, squared = reconstruction_error(pixels + torch.tensor([0.1, -0.3, 0.0, 0.4]), pixels, squared_weight=2.0)
    assert float(squared) == pytest.approx((0.01 + 0.09 + 0.16) / 4)
    assert float(loss) == pytest.approx(0.2 + 2.0 * 0.065)


@pytest.mark.parametrize(("error", "decibels"), [(2.0, 0.0), (0.2, 20.0), (0.02, 40.0)])
def test_psnr(error, decibels):
    assert float(psnr(torch.tensor(error).square())) == pytest.approx(decibels, abs=1e-4)


class TestKL:
    def test_the_standard_normal_distribution_has_none(self):
        assert float(kl_divergence(torch.zeros(2, 4), torch.zeros(2, 4))) == 0.0

    def test_by_hand(self):
        # Each value's own divergence: (m² + s² - 1 - log s²) / 2; the mean of both.
        mean, logvar = torch.tensor([1.0, 0.0]), torch.tensor([0.0, math.log(4.0)])
        assert float(kl_divergence(mean, logvar)) == pytest.approx(0.5 * (0.5 + 0.5 * (3.0 - math.log(4.0))))

    def test_as_torch_has_it(self):
        generator = torch.Generator().manual_seed(0)
        mean, logvar = (torch.randn(3, 5, generator=generator) for _ in range(2))
        ours = torch.distributions.Normal(mean, torch.exp(0.5 * logvar))
        standard = torch.distributions.Normal(torch.zeros(3, 5), torch.ones(3, 5))
        expected = torch.distributions.kl_divergence(ours, standard).mean()
        assert float(kl_divergence(mean, logvar)) == pytest.approx(float(expected), rel=1e-6)
