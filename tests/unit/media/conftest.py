"""Small moving pictures to write and read."""

import pytest
import torch


@pytest.fixture
def moving_frames() -> torch.Tensor:
    """(9, 64, 96, 3) uint8: smooth waves, so that lossy codecs keep them; frames 3, 4 and 5 are the same."""
    rows, columns = torch.meshgrid(torch.arange(64.0), torch.arange(96.0), indexing="ij")
    frames = [
        torch.stack(
            [
                128 + 100 * torch.sin((columns + 4 * index) / 15),
                128 + 100 * torch.cos(rows / 11 + index / 3),
                60 + rows + columns,
            ],
            dim=-1,
        )
        for index in range(9)
    ]
    clip = torch.stack(frames).round().to(torch.uint8)
    clip[4] = clip[5] = clip[3]
    return clip
