"""How far a video is from another."""

import pytest
import torch

from opensora_cli.engine.bench_generate.likeness import latents_error, likeness
from opensora_cli.media.similarity import HIGHEST_PSNR_DB, psnr_db, ssim

FRAMES = torch.randint(0, 256, (3, 16, 20, 3), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
LATENTS = torch.randn(4, 2, 3, 3, generator=torch.Generator().manual_seed(2))


def test_the_same_video_is_the_same() -> None:
    found = likeness([LATENTS], FRAMES, [LATENTS.clone()], FRAMES.clone())
    assert found.is_same
    assert (found.psnr_db, found.ssim, found.latents_error) == (HIGHEST_PSNR_DB, pytest.approx(1.0), 0.0)


def test_means_over_frames_and_a_frame_is_counted_each() -> None:
    other = FRAMES // 2
    counted: list[int] = []
    found = likeness([LATENTS], other, [LATENTS], FRAMES, on_frame=lambda: counted.append(1))
    pairs = list(zip(other, FRAMES, strict=True))
    assert found.psnr_db == pytest.approx(sum(psnr_db(*pair) for pair in pairs) / 3)
    assert found.ssim == pytest.approx(sum(ssim(*pair) for pair in pairs) / 3)
    assert not found.is_same
    assert len(counted) == 3


def test_the_error_is_that_of_all_segments_together() -> None:
    exact = [LATENTS, 2 * LATENTS]
    assert latents_error([LATENTS, 3 * LATENTS], exact) == pytest.approx(1 / 5**0.5)
    assert latents_error([torch.ones(2)], [torch.zeros(2)]) == pytest.approx(2**0.5)


def test_latents_alone_that_differ_are_not_the_same() -> None:
    assert not likeness([LATENTS + 1e-6], FRAMES, [LATENTS], FRAMES).is_same


def test_small_frames_have_no_ssim() -> None:
    assert likeness([LATENTS], FRAMES[:, :8], [LATENTS], FRAMES[:, :8]).ssim is None
