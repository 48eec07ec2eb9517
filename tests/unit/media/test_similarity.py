"""PSNR and SSIM against their formulas, written out."""

import math

import pytest
import torch

from opensora_cli.media.similarity import HIGHEST_PSNR_DB, psnr_db, ssim


def random_picture(height: int, width: int, *, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8)


def ssim_by_loops(first: torch.Tensor, second: torch.Tensor) -> float:
    """Wang et al. 2004, equation 13, window by window."""
    weights = torch.tensor([math.exp(-((i - 5) ** 2 + (j - 5) ** 2) / 4.5) for i in range(11) for j in range(11)])
    weights = (weights / weights.sum()).double().view(11, 11)
    luma = torch.tensor([0.299, 0.587, 0.114]).double()
    x, y = first.double() @ luma, second.double() @ luma
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    values = []
    for top in range(x.shape[0] - 10):
        for left in range(x.shape[1] - 10):
            a, b = (picture[top : top + 11, left : left + 11] for picture in (x, y))
            mean_a, mean_b = (weights * a).sum(), (weights * b).sum()
            var_a, var_b = (weights * (a - mean_a) ** 2).sum(), (weights * (b - mean_b) ** 2).sum()
            cov = (weights * (a - mean_a) * (b - mean_b)).sum()
            luminance = (2 * mean_a * mean_b + c1) / (mean_a**2 + mean_b**2 + c1)
            values.append(luminance * (2 * cov + c2) / (var_a + var_b + c2))
    return float(torch.stack(values).mean())


@pytest.mark.parametrize("seed", [0, 1])
def test_ssim_is_that_of_the_paper(seed: int) -> None:
    picture = random_picture(14, 17, seed=seed)
    other = (picture.float() * 0.7 + random_picture(14, 17, seed=seed + 9).float() * 0.3).to(torch.uint8)
    assert 0.1 < ssim(picture, other) < 0.99
    assert ssim(picture, picture) == pytest.approx(1.0)
    assert psnr_db(picture, picture) == HIGHEST_PSNR_DB
    assert ssim(picture, other) == pytest.approx(ssim_by_loops(picture, other), abs=1e-6)


def test_psnr_of_one_level_everywhere() -> None:
    dark = torch.full((4, 4, 3), 50, dtype=torch.uint8)
    assert psnr_db(dark, dark + 1) == pytest.approx(20 * math.log10(255))
    # uint8 differences must not wrap around.
    assert psnr_db(dark + 1, dark) == psnr_db(dark, dark + 1)
    assert psnr_db(torch.zeros_like(dark), torch.full_like(dark, 255)) == 0
