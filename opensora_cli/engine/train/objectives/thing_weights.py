"""A loss that counts the moving thing of a procedural scene more: few tokens show it, and captions are mostly of it."""

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from opensora_cli.data.scene_clips import SceneClip

_PIXELS_PER_TOKEN = 4
_VISIBLE = 12
"""Of 255, summed over the colours: what differs by less than that is not seen."""


def weighted_loss(velocity_BND: Tensor, target_BND: Tensor, weights_BN: Tensor) -> Tensor:
    """Return the mean squared error of packed latents over the micro-batch, each token by its weight, in fp32."""
    error_BN = (velocity_BND.float() - target_BND.float()).square().mean(dim=2)
    weights_BN = weights_BN.to(error_BN)
    return (error_BN * weights_BN).sum() / weights_BN.sum()


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
    shown = [_thing_tokens(scene, grid, num_frames, fps) for scene in scenes]
    return 1.0 + (weight - 1.0) * torch.stack(shown).float()


def _thing_tokens(name: str, grid: tuple[int, int, int], num_frames: int, fps: float) -> Tensor:
    scene = SceneClip.named(name)
    # A stand-in, by which memory is predicted: not cached, since its tensors may be fake, and later ones may not.
    return torch.zeros(math.prod(grid), dtype=torch.bool) if scene is None else _covered(scene, grid, num_frames, fps)


@lru_cache(maxsize=2**14)
def _covered(scene: SceneClip, grid: tuple[int, int, int], num_frames: int, fps: float) -> Tensor:
    frames, height, width = grid
    cover_THW = scene.thing_cover(size=_PIXELS_PER_TOKEN * max(height, width, 8), num_frames=num_frames, fps=fps)
    seen_THW = torch.from_numpy(cover_THW > _VISIBLE).float()
    if num_frames > 1:  # a causal autoencoder's first latent frame is of the first frame alone
        per_frame = (num_frames - 1) // (frames - 1)
        later_THW = seen_THW[1:].view(frames - 1, per_frame, *seen_THW.shape[1:]).amax(dim=1)
        seen_THW = torch.cat([seen_THW[:1], later_THW])
    return functional.adaptive_max_pool2d(seen_THW, (height, width)).bool().flatten()
