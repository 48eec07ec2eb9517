"""Loss weights of the tokens that show the moving thing of a scene."""

import numpy as np
import torch

from demo_world.scene_clips import SceneClip
from demo_world.thing_weights import ThingWeights, thing_weights
from opensora_cli.data.batches import ClipBatch, ClipRequest
from opensora_cli.settings.components import VAESettings

GRID, FRAMES, FPS = (4, 8, 8), 13, 12.0


def first_clip(*, thing: bool) -> SceneClip:
    """The first clip with a moving thing, or without one."""
    clips = (SceneClip(seed=0, number=number) for number in range(100))
    return next(clip for clip in clips if clip.thing_cover(size=32, num_frames=FRAMES, fps=FPS).any() == thing)


def weights(*clips: SceneClip, weight: float = 3.0) -> torch.Tensor:
    return thing_weights([clip.name for clip in clips], weight=weight, grid=GRID, num_frames=FRAMES, fps=FPS)


def test_a_scene_without_a_thing_counts_alike_everywhere():
    assert weights(first_clip(thing=False)).equal(torch.ones(1, 4 * 8 * 8))


def test_tokens_of_the_thing_count_more_and_follow_it():
    clip = first_clip(thing=True)
    tokens = weights(clip).view(GRID)

    assert set(tokens.unique().tolist()) == {1.0, 3.0}
    # What the thing covers in the last frame is in tokens of the last latent frame, and as much in the first.
    cover = clip.thing_cover(size=32, num_frames=FRAMES, fps=FPS) > 60
    for frame, latent in ((0, 0), (FRAMES - 1, 3)):
        rows, columns = np.nonzero(cover[frame])
        assert (tokens[latent, rows // 4, columns // 4] == 3).all()
    assert not tokens[0].equal(tokens[3])


def test_each_clip_has_weights_of_its_own():
    both = weights(first_clip(thing=False), first_clip(thing=True))
    assert both[0].equal(torch.ones(256))
    assert both[1].equal(weights(first_clip(thing=True))[0])


def test_weights_of_a_micro_batch():
    clip = first_clip(thing=True)
    batch = ClipBatch(
        number=0,
        epoch=0,
        requests=(ClipRequest(path=clip.name, num_frames=9, height=64, width=64, fps=FPS),),
        pixels_BTHWC=None,
        cached=None,
    )
    found = ThingWeights(3.0, VAESettings().grid)(batch, GRID)
    assert found.equal(weights(clip))
