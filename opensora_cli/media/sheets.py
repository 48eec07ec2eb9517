"""Several pictures on one: the frames of a clip side by side, and many clips on a sheet."""

import torch

_STRIP_FRAMES = 3


def enlarged(frames_THWC: torch.Tensor, *, longest_side: int) -> torch.Tensor:
    """Return uint8 RGB frames by a whole number of times larger, so that no side is over `longest_side` pixels if it
    was not before; between the pixels bicubically.
    """
    height, width = frames_THWC.shape[1:3]
    factor = max(1, longest_side // max(height, width))
    levels_TCHW = frames_THWC.permute(0, 3, 1, 2).float()
    larger_TCHW = torch.nn.functional.interpolate(levels_TCHW, scale_factor=float(factor), mode="bicubic")
    return larger_TCHW.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def film_strip(frames_THWC: torch.Tensor) -> torch.Tensor:
    """Return the first, the middle and the last of uint8 RGB frames side by side; fewer where there are fewer."""
    count = len(frames_THWC)
    chosen = torch.linspace(0, count - 1, min(count, _STRIP_FRAMES)).round().long()
    return torch.cat([*frames_THWC[chosen]], dim=1)
