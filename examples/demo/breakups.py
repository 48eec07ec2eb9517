"""Detector of moving things that come apart in a video.

The thing's pixels are found by its color. In an unbroken video their outline, moved along, is nearly the same in
neighboring frames and near the mean outline of the whole video. How near depends on the shape, because wings beat and
rain hides parts, so that the limits are measured on rendered clips that the autoencoder has encoded and decoded.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from demo_world.scenes import Colour, Scene, Shape

Mask = NDArray[np.bool_]
"""(H, W) or (T, H, W): pixels of the thing."""

# By how much the channels of a paint exceed its other channels, of 255: more than anything in the places does.
_CHANNELS: Mapping[Colour, tuple[tuple[int, ...], tuple[int, ...], float]] = {
    Colour.RED: ((0,), (1, 2), 115),
    Colour.YELLOW: ((0, 1), (2,), 125),
    Colour.GREEN: ((1,), (0, 2), 85),
    Colour.BLUE: ((2,), (0, 1), 90),
}
_SHIFTS = range(-2, 3)
_SLACK = 0.8
"""A video is broken if its similarity is below this share of the lowest of the rendered clips."""


class Steadiness(NamedTuple):
    """Similarity of a thing's outlines in a video, the lowest over its frames, each from 0 to 1."""

    neighbors: float
    """Overlap (intersection over union) with the outline of the frame before."""
    mean: float
    """Overlap with the mean outline."""
    area: float
    """Area as a share of the median area."""


def thing_mask(clip_THWC: NDArray[np.uint8], colour: Colour) -> Mask:
    """Return the pixels, (T, H, W), that have the paint of this color."""
    high, low, least = _CHANNELS[colour]
    channels = clip_THWC.astype(np.int16)
    lead = channels[..., list(high)].min(axis=-1) - channels[..., list(low)].max(axis=-1)
    mask: Mask = lead > least
    return mask


def steadiness(mask_THW: Mask) -> Steadiness:
    """Return the similarity of a thing's outlines in the frames (T, H, W) of a video; 0 if a frame lacks the thing."""
    areas = mask_THW.sum(axis=(1, 2))
    if areas.min() == 0:
        return Steadiness(0.0, 0.0, 0.0)
    centered = [_centered(mask_HW) for mask_HW in mask_THW]
    outline_HW: Mask = np.mean(centered, axis=0) > 0.5
    return Steadiness(
        neighbors=min(_overlap(one, other) for one, other in zip(centered[1:], centered, strict=False)),
        mean=min(_overlap(one, outline_HW) for one in centered),
        area=float(areas.min() / np.median(areas)),
    )


def lowest_steadiness(clips: Sequence[NDArray[np.uint8]], scenes: Sequence[Scene]) -> dict[Shape, Steadiness]:
    """Return for each shape the lowest figures of unbroken clips (T, H, W, 3) of these scenes."""
    found: dict[Shape, list[Steadiness]] = {}
    for clip_THWC, scene in zip(clips, scenes, strict=True):
        if scene.thing is not None:
            mask_THW = thing_mask(clip_THWC, scene.thing.colour)
            found.setdefault(scene.thing.shape, []).append(steadiness(mask_THW))
    return {shape: Steadiness(*map(min, zip(*every, strict=True))) for shape, every in found.items()}


def is_broken(clip_THWC: NDArray[np.uint8], scene: Scene, lowest: Mapping[Shape, Steadiness]) -> bool:
    """Return whether the thing of the scene comes apart in a video (T, H, W, 3).

    `lowest` has the figures of unbroken clips. A scene without a thing is not broken.
    """
    if scene.thing is None:
        return False
    found = steadiness(thing_mask(clip_THWC, scene.thing.colour))
    return any(figure < _SLACK * least for figure, least in zip(found, lowest[scene.thing.shape], strict=True))


def _centered(mask_HW: Mask) -> Mask:
    """Return the mask with its centroid moved to the middle."""
    height, width = mask_HW.shape
    rows, columns = np.nonzero(mask_HW)
    return np.roll(mask_HW, (height // 2 - round(rows.mean()), width // 2 - round(columns.mean())), axis=(0, 1))


def _overlap(one_HW: Mask, other_HW: Mask) -> float:
    """Return intersection over union at the best of a few shifts."""

    def overlap(shift: tuple[int, int]) -> float:
        moved = np.roll(one_HW, shift, axis=(0, 1))
        return float((moved & other_HW).sum() / max((moved | other_HW).sum(), 1))

    return max(overlap((down, right)) for down in _SHIFTS for right in _SHIFTS)
