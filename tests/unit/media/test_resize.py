"""References are resized as the released weights saw them."""

import pytest
import torch
from PIL import Image

from opensora_cli.core.choices import Fit
from opensora_cli.media.resize import fit_frames


def gradient(num_frames: int, height: int, width: int) -> torch.Tensor:
    """Columns grow from left to right in red, rows from top to bottom in green, frames in blue."""
    frames = torch.zeros(num_frames, height, width, 3, dtype=torch.uint8)
    frames[..., 0] = torch.linspace(0, 255, width).round().to(torch.uint8)
    frames[..., 1] = torch.linspace(0, 255, height).round().to(torch.uint8)[:, None]
    frames[..., 2] = (torch.arange(num_frames) * 10).to(torch.uint8)[:, None, None]
    return frames


@pytest.mark.parametrize("num_frames", [1, 2])
@pytest.mark.parametrize("fit", list(Fit))
def test_the_right_size_already_is_left_exactly_alone(num_frames: int, fit: Fit) -> None:
    frames = gradient(num_frames, 48, 64)
    pixels = fit_frames(frames, height=48, width=64, fit=fit)
    torch.testing.assert_close(((pixels + 1) * 127.5).permute(1, 2, 3, 0), frames.float(), atol=1e-4, rtol=0)


def test_crop_keeps_the_middle_and_all_of_the_other_side() -> None:
    pixels = fit_frames(gradient(2, 48, 96), height=48, width=48, fit="crop")
    expected = gradient(2, 48, 96)[:, :, 24:72].permute(3, 0, 1, 2).float() / 127.5 - 1
    torch.testing.assert_close(pixels, expected)


def test_pad_keeps_everything_between_black_bars() -> None:
    frames = torch.full((1, 48, 96, 3), 255, dtype=torch.uint8)
    pixels = fit_frames(frames, height=48, width=48, fit="pad")
    assert (pixels[:, :, 12:36] == 1).all()
    assert (pixels[:, :, :12] == -1).all()
    assert (pixels[:, :, 36:] == -1).all()


def test_stretch_uses_the_whole_frame() -> None:
    pixels = fit_frames(gradient(2, 48, 96), height=48, width=48, fit="stretch")
    assert pixels[0, 0, 0, 0] < -0.97
    assert pixels[0, 0, 0, -1] > 0.97


def test_pictures_are_resized_bicubically_with_antialiasing() -> None:
    generator = torch.Generator().manual_seed(0)
    picture = torch.randint(0, 256, (60, 90, 3), dtype=torch.uint8, generator=generator)
    pixels = fit_frames(picture[None], height=20, width=20, fit="crop")
    resized = Image.fromarray(picture.numpy()).resize((30, 20), Image.Resampling.BICUBIC).crop((5, 0, 25, 20))
    expected = torch.tensor(list(resized.get_flattened_data())).view(20, 20, 3).permute(2, 0, 1) / 127.5 - 1
    torch.testing.assert_close(pixels[:, 0], expected)


def test_clips_are_resized_bilinearly_without_antialiasing() -> None:
    generator = torch.Generator().manual_seed(0)
    clip = torch.randint(0, 256, (2, 60, 60, 3), dtype=torch.uint8, generator=generator)
    pixels = fit_frames(clip, height=20, width=20, fit="crop")
    # A third of the size: the new sample points are the centres of 3 x 3 fields, and nothing else of them counts.
    expected = clip[:, 1::3, 1::3].permute(3, 0, 1, 2).float() / 127.5 - 1
    torch.testing.assert_close(pixels, expected)
    assert not torch.allclose(fit_frames(clip, height=20, width=20, fit="crop", picture=True), pixels, atol=0.1)
