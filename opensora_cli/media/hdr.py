"""Conversion of high dynamic range (HDR) frames to the standard range of an sRGB display."""

import numpy as np
import torch
from numpy.typing import NDArray

PQ = 16
"""Code of the perceptual quantizer, SMPTE ST 2084, among the transfer characteristics of ITU-T H.273."""
HLG = 18
"""Code of hybrid log-gamma, ITU-R BT.2100, among the transfer characteristics of ITU-T H.273."""

_WHITE = 203.0
"""Luminance of white in cd/m²; brighter levels are highlights (ITU-R BT.2408)."""
_BRIGHTEST = 1000.0
"""Luminance of the highlights that keep their differences, in cd/m²."""
_KNEE = 0.9
"""Level, of white, from which levels are compressed."""

_BT2020_TO_BT709 = torch.tensor([[1.6605, -0.5876, -0.0728], [-0.1246, 1.1329, -0.0083], [-0.0182, -0.1006, 1.1187]])
"""Change of primaries for linear RGB (ITU-R BT.2087)."""
_BT2020_LUMA = torch.tensor([0.2627, 0.6780, 0.0593])


def to_sdr(levels_HWC: NDArray[np.uint16], *, transfer: int) -> NDArray[np.uint8]:
    """Return an HDR frame as uint8 sRGB (H, W, 3).

    White keeps nearly its level, and brighter levels are compressed into the rest.

    Args:
        levels_HWC: RGB with the primaries of BT.2020, in full range.
        transfer: `PQ` or `HLG`.
    """
    signal = torch.from_numpy(levels_HWC.astype(np.float32)) / 65535
    light = (_pq_light(signal) if transfer == PQ else _hlg_light(signal)) / _WHITE
    light = (light @ _BT2020_TO_BT709.T).clamp(min=0)
    brightest = light.amax(dim=-1, keepdim=True).clamp(min=1e-6)
    light = (light * (_compressed(brightest) / brightest)).clamp(max=1)
    gamma = torch.where(light <= 0.0031308, 12.92 * light, 1.055 * light.clamp(min=1e-6) ** (1 / 2.4) - 0.055)
    sdr: NDArray[np.uint8] = (gamma * 255).round().to(torch.uint8).numpy()
    return sdr


def _pq_light(signal: torch.Tensor) -> torch.Tensor:
    """Return the luminance of PQ levels from 0 to 1, in cd/m²."""
    root = signal ** (32 / 2523)
    ratio = (root - 3424 / 4096).clamp(min=0) / (2413 / 128 - 2392 / 128 * root)
    return 10_000 * ratio ** (16384 / 2610)


def _hlg_light(signal: torch.Tensor) -> torch.Tensor:
    """Return the luminance of HLG levels (H, W, 3) from 0 to 1 on a display of 1,000 cd/m², in cd/m²."""
    a, b, c = 0.17883277, 0.28466892, 0.55991073
    scene = torch.where(signal <= 0.5, signal**2 / 3, (torch.exp((signal - c) / a) + b) / 12)
    luma = (scene @ _BT2020_LUMA)[..., None]
    return 1000 * scene * luma.clamp(min=1e-6) ** 0.2


def _compressed(level: torch.Tensor) -> torch.Tensor:
    """Return levels from 0 to `_BRIGHTEST` / `_WHITE` in the range of 0 to 1, unchanged below `_KNEE`."""
    over = (level - _KNEE).clamp(min=0) / (1 - _KNEE)
    most = (_BRIGHTEST / _WHITE - _KNEE) / (1 - _KNEE)
    return torch.where(level <= _KNEE, level, _KNEE + (1 - _KNEE) * over * (1 + over / most**2) / (1 + over))
