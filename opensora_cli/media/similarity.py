"""Similarity of two pictures: PSNR and SSIM."""

import math

import torch
from torch import Tensor
from torch.nn import functional

HIGHEST_PSNR_DB = 99.0
"""PSNR of identical pictures, whose true value is infinite."""
SSIM_WINDOW = 11
"""Side of the window of SSIM in pixels, and the shortest side of a picture."""

_SIGMA = 1.5
_LUMINANCE_CONSTANT = (0.01 * 255) ** 2
_CONTRAST_CONSTANT = (0.03 * 255) ** 2
_LUMA = (0.299, 0.587, 0.114)


def psnr_db(picture_HWC: Tensor, other_HWC: Tensor) -> float:
    """Return the peak signal-to-noise ratio of two uint8 RGB pictures, in dB, over all values; 99 at most."""
    error = (picture_HWC.double() - other_HWC.double()).square().mean().item()
    return min(10 * math.log10(255**2 / error), HIGHEST_PSNR_DB) if error else HIGHEST_PSNR_DB


def ssim(picture_HWC: Tensor, other_HWC: Tensor) -> float:
    """Return the structural similarity of the luma (BT.601) of two uint8 RGB pictures, 1 for identical ones.

    It is the mean over all places of an 11x11 Gaussian window of sigma 1.5 inside the picture, as in Wang et al. 2004,
    "Image quality assessment: from error visibility to structural similarity". Both sides have at least 11 pixels.
    """
    first_HW, second_HW = _luma(picture_HWC), _luma(other_HWC)
    moments = torch.stack((first_HW, second_HW, first_HW**2, second_HW**2, first_HW * second_HW))
    mean_1, mean_2, square_1, square_2, product = _blurred(moments)
    covariance = product - mean_1 * mean_2
    variances = square_1 - mean_1**2 + square_2 - mean_2**2
    luminance = (2 * mean_1 * mean_2 + _LUMINANCE_CONSTANT) / (mean_1**2 + mean_2**2 + _LUMINANCE_CONSTANT)
    structure = (2 * covariance + _CONTRAST_CONSTANT) / (variances + _CONTRAST_CONSTANT)
    return float((luminance * structure).mean())


def _luma(picture_HWC: Tensor) -> Tensor:
    return picture_HWC.double() @ picture_HWC.new_tensor(_LUMA, dtype=torch.float64)


def _blurred(pictures_NHW: Tensor) -> Tensor:
    """Return the Gaussian means (N,H-10,W-10) around each pixel."""
    offsets = torch.arange(SSIM_WINDOW, dtype=pictures_NHW.dtype, device=pictures_NHW.device) - SSIM_WINDOW // 2
    window = torch.softmax(-(offsets**2) / (2 * _SIGMA**2), dim=0)
    rows_N1HW = functional.conv2d(pictures_NHW.unsqueeze(1), window.view(1, 1, -1, 1))
    return functional.conv2d(rows_N1HW, window.view(1, 1, 1, -1)).squeeze(1)
