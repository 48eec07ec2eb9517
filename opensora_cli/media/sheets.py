"""Pictures composed of others: frames of a clip side by side, and many clips on a sheet."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image, ImageDraw

_STRIP_FRAMES = 3
_GAP = 8
_SMALLEST_LETTERS = 10
_EMPTY_SIZE = (64, 192)
BACKGROUND, _LETTERS = (32, 32, 32), (240, 240, 240)


def enlarged(frames_THWC: torch.Tensor, *, longest_side: int) -> torch.Tensor:
    """Return uint8 RGB frames, enlarged bicubically by the largest whole factor within `longest_side`."""
    height, width = frames_THWC.shape[1:3]
    factor = max(1, longest_side // max(height, width))
    levels_TCHW = frames_THWC.permute(0, 3, 1, 2).float()
    larger_TCHW = torch.nn.functional.interpolate(levels_TCHW, scale_factor=float(factor), mode="bicubic")
    return larger_TCHW.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def film_strip(frames_THWC: torch.Tensor) -> torch.Tensor:
    """Return the first, middle and last of uint8 RGB frames side by side; fewer for a shorter clip."""
    count = len(frames_THWC)
    chosen = torch.linspace(0, count - 1, min(count, _STRIP_FRAMES)).round().long()
    return torch.cat([*frames_THWC[chosen]], dim=1)


def contact_sheet(cells: Sequence[tuple[str, torch.Tensor | None]]) -> torch.Tensor:
    """Return uint8 RGB pictures (H, W, 3) on about a square, each below the lines of its label; None stays empty."""
    sizes = [tuple(picture_HWC.shape[:2]) for _, picture_HWC in cells if picture_HWC is not None] or [_EMPTY_SIZE]
    height, width = (max(size[axis] for size in sizes) for axis in range(2))
    letters = max(_SMALLEST_LETTERS, height // 9)
    label_height = max(label.count("\n") + 1 for label, _ in cells) * (letters + 6)
    cell_height, cell_width = height + label_height + _GAP, width + _GAP
    columns = max(1, min(len(cells), round(math.sqrt(len(cells) * cell_height / cell_width))))
    rows = math.ceil(len(cells) / columns)
    sheet = Image.new("RGB", (columns * cell_width + _GAP, rows * cell_height + _GAP), BACKGROUND)
    draw = ImageDraw.Draw(sheet)
    for index, (label, picture_HWC) in enumerate(cells):
        left, top = _GAP + index % columns * cell_width, _GAP + index // columns * cell_height
        draw.text((left, top), label, fill=_LETTERS, font_size=letters)
        if picture_HWC is not None:
            sheet.paste(Image.fromarray(picture_HWC.numpy()), (left, top + label_height))
    return torch.from_numpy(np.array(sheet))
