"""Loss weights for the moving thing of a scene: few tokens show it, and captions mostly describe it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from demo_world.scene_clips import SceneClip
from opensora_cli.core.conditions import LatentGrid
from opensora_cli.data.batches import ClipBatch

_PIXELS_PER_TOKEN = 4
_VISIBLE = 12
"""Smallest visible difference, of 255 and summed over the colors."""


@dataclass(frozen=True, slots=True)
class ThingWeights:
    """Weights of the tokens of scenes in the loss: `weight` for those that show the moving thing, and 1 for others."""

    weight: float
    grid: LatentGrid

    def __call__(self, batch: ClipBatch, tokens: tuple[int, int, int]) -> Tensor:
        """Return the weights (B,N) of a micro-batch; see `thing_weights`."""
        num_frames = self.grid.num_frames(tokens[0])
        return thing_weights(
            batch.paths, weight=self.weight, grid=tokens, num_frames=num_frames, fps=batch.requests[0].fps or 1.0
        )


def thing_weights(
    scenes: Sequence[str], *, weight: float, grid: tuple[int, int, int], num_frames: int, fps: float
) -> Tensor:
    """Return `weight` for the tokens that show the moving thing of their scene, and 1 for the others, (B,N).

    Args:
        scenes: names of procedural scenes, as `SceneClip` gives them; what has another name shows no thing.
        weight: at least 1.
        grid: tokens of a clip: frames, height and width.
        num_frames: frames of each clip.
        fps: frames per second; of pictures anything over 0.
    """
    shown = [_covered(scene, grid, num_frames, fps) for scene in scenes]
    return 1.0 + (weight - 1.0) * torch.stack(shown).float()


@lru_cache(maxsize=2**14)
def _covered(name: str, grid: tuple[int, int, int], num_frames: int, fps: float) -> Tensor:
    scene = SceneClip.named(name)
    if scene is None:
        return torch.zeros(math.prod(grid), dtype=torch.bool)
    frames, height, width = grid
    cover_THW = scene.thing_cover(size=_PIXELS_PER_TOKEN * max(height, width, 8), num_frames=num_frames, fps=fps)
    seen_THW = torch.from_numpy(cover_THW > _VISIBLE).float()
    if num_frames > 1:  # a causal autoencoder's first latent frame is of the first frame alone
        per_frame = (num_frames - 1) // (frames - 1)
        later_THW = seen_THW[1:].view(frames - 1, per_frame, *seen_THW.shape[1:]).amax(dim=1)
        seen_THW = torch.cat([seen_THW[:1], later_THW])
    return functional.adaptive_max_pool2d(seen_THW, (height, width)).bool().flatten()
