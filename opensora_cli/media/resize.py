"""Resizing of pictures and clips to the size of a model."""

import numpy as np
import torch
from PIL import Image

from opensora_cli.core.choices import Fit


def fit_frames(
    frames_THWC: torch.Tensor, *, height: int, width: int, fit: Fit | str = Fit.CROP, picture: bool | None = None
) -> torch.Tensor:
    """Resize uint8 RGB frames as the reference does. Returns float32 (C, T, height, width) in [-1, 1].

    `crop` covers the target and cuts the middle out, `pad` fits inside it on black, `stretch` ignores the shape.
    Pictures are resized bicubically with antialiasing and rounded to eight bits before the crop. Clips are resized
    bilinearly without antialiasing and not rounded. The released weights were trained on both. `picture` selects the
    way; None treats one frame as a picture.
    """
    num_frames, source_height, source_width, _ = frames_THWC.shape
    as_picture = num_frames == 1 if picture is None else picture
    resized_height, resized_width = _resized_size(source_height, source_width, height, width, Fit(fit))
    resize = _resize_pictures if as_picture else _resize_clip
    levels_TCHW = resize(frames_THWC, resized_height, resized_width)
    # Interpolation between equal levels may round slightly beyond them.
    pixels_TCHW = (levels_TCHW / 127.5 - 1).clamp(-1, 1)
    # The reference rounds half of an odd margin to even for pictures, and down for clips.
    margins = abs(height - resized_height), abs(width - resized_width)
    top, left = (round(margin / 2) if as_picture else margin // 2 for margin in margins)
    if fit == Fit.PAD:
        canvas_TCHW = pixels_TCHW.new_full((num_frames, pixels_TCHW.shape[1], height, width), -1.0)
        canvas_TCHW[:, :, top : top + resized_height, left : left + resized_width] = pixels_TCHW
        pixels_TCHW = canvas_TCHW
    else:
        pixels_TCHW = pixels_TCHW[:, :, top : top + height, left : left + width]
    return pixels_TCHW.transpose(0, 1).contiguous()


def _resized_size(source_height: int, source_width: int, height: int, width: int, fit: Fit) -> tuple[int, int]:
    if fit == Fit.STRETCH:
        return height, width
    scale_to_height, scale_to_width = height / source_height, width / source_width
    height_decides = scale_to_height > scale_to_width if fit == Fit.CROP else scale_to_height < scale_to_width
    if height_decides:
        return height, max(1, round(source_width * scale_to_height))
    return max(1, round(source_height * scale_to_width)), width


def _resize_pictures(frames_THWC: torch.Tensor, height: int, width: int) -> torch.Tensor:
    pictures = (Image.fromarray(frame.numpy()) for frame in frames_THWC)
    arrays = [np.asarray(picture.resize((width, height), Image.Resampling.BICUBIC)) for picture in pictures]
    return torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2).float()


def _resize_clip(frames_THWC: torch.Tensor, height: int, width: int) -> torch.Tensor:
    # Resize frame by frame because two float copies of a large clip would each take four times its bytes.
    resized = [
        torch.nn.functional.interpolate(
            frame.permute(2, 0, 1)[None].float(), size=(height, width), mode="bilinear", align_corners=False
        )
        for frame in frames_THWC
    ]
    return torch.cat(resized)


def to_uint8(pixels_CTHW: torch.Tensor) -> torch.Tensor:
    """Return pixels as uint8 (T, H, W, C) on the CPU, clamped to [-1, 1]."""
    channels, frames, height, width = pixels_CTHW.shape
    levels_THWC = torch.empty(frames, height, width, channels, dtype=torch.uint8)
    # Convert frame by frame because intermediate copies are at least four times as large as the result.
    for pixels_CHW, levels_HWC in zip(pixels_CTHW.unbind(1), levels_THWC, strict=True):
        levels_HWC.copy_(pixels_CHW.float().clamp(-1, 1).add(1).mul(127.5).round().to(torch.uint8).permute(1, 2, 0))
    return levels_THWC


def enlarged(frames_THWC: torch.Tensor, *, longest_side: int) -> torch.Tensor:
    """Return uint8 RGB frames, enlarged bicubically by the largest whole factor within `longest_side`."""
    height, width = frames_THWC.shape[1:3]
    factor = max(1, longest_side // max(height, width))
    levels_TCHW = frames_THWC.permute(0, 3, 1, 2).float()
    larger_TCHW = torch.nn.functional.interpolate(levels_TCHW, scale_factor=float(factor), mode="bicubic")
    return larger_TCHW.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous()
