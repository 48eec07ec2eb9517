"""Making fast videos slower: only every second, third, ... frame is shown."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray


def map_target_fps(fps: float, max_fps: float) -> tuple[float, int]:
    """Return the frame rate that a video is reduced to, and every how many-th of its frames that takes.

    A video slower than `max_fps` stays as it is. Any other takes the smallest interval that brings it down to
    `max_fps`, and the rate that this gives is rounded down to a whole number.

    Args:
        fps: frames per second, or NaN where that is unknown: then the rate is 0, and no frame is left out.
        max_fps: frames per second, over 0.
    """
    if math.isnan(fps):
        return 0.0, 1
    if fps < max_fps:
        return fps, 1
    interval = math.ceil(fps / max_fps)
    return float(math.floor(fps / interval)), interval


def frame_intervals(fps: NDArray[np.floating[Any]], max_fps: float) -> NDArray[np.int64]:
    """Return the intervals of `map_target_fps` for many videos at once."""
    known = np.nan_to_num(fps, nan=0.0)
    return np.where(known < max_fps, 1, np.ceil(known / max_fps)).astype(np.int64)
