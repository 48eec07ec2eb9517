"""What the discriminator answers, and what it minimises."""

import pytest
import torch
from closeness import assert_close
from torch import nn

from opensora_cli.engine.train.objectives.vae_terms import PatchDiscriminator3d, hinge_loss


@pytest.fixture
def discriminator():
    torch.manual_seed(0)
    return PatchDiscriminator3d(width=8, layers=3)


@pytest.mark.parametrize(
    ("shape", "patches"),
    [((17, 32, 32), (3, 4, 4)), ((1, 32, 48), (1, 4, 6)), ((5, 20, 12), (1, 3, 2)), ((1, 1, 1), (1, 1, 1))],
)
def test_every_size_has_an_answer(discriminator, shape, patches):
    assert discriminator(torch.randn(2, 3, *shape)).shape == (2, 1, *patches)


def test_a_sample_does_not_see_the_others(discriminator):
    clips = torch.randn(3, 3, 5, 16, 16, generator=torch.Generator().manual_seed(1))
    alone = torch.cat([discriminator(clip[None]) for clip in clips])
    assert_close(discriminator(clips), alone)
    assert alone.flatten(1).std(dim=0).max() > 1e-4


def test_a_patch_sees_its_surroundings_only(discriminator):
    # Norms see the whole clip; without them, a far corner cannot matter.
    for layer in discriminator.modules():
        if isinstance(layer, nn.GroupNorm):
            layer.forward = lambda hidden: hidden
    clip = torch.randn(1, 3, 33, 96, 96, generator=torch.Generator().manual_seed(1))
    changed = clip.clone()
    changed[:, :, -1, -1, -1] += 100.0
    moved = (discriminator(clip) != discriminator(changed))[0, 0]
    assert moved[-1, -1, -1]
    assert not moved[0].any()
    assert not moved[:, 0].any()


class TestHinge:
    @pytest.mark.parametrize(
        ("real", "made", "expected"),
        [(0.0, 0.0, 1.0), (1.0, -1.0, 0.0), (3.0, -7.0, 0.0), (-1.0, 1.0, 2.0), (0.5, 0.25, 0.5 * (0.5 + 1.25))],
    )
    def test_values(self, real, made, expected):
        assert float(hinge_loss(torch.full((2, 1, 3), real), torch.full((4,), made))) == pytest.approx(expected)
