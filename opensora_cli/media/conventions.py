"""Conventions that reading and writing must share, so that written frames are read back as they were."""

from av.video.reformatter import Interpolation

EXACT_COLORS = (
    Interpolation.AREA
    | Interpolation.FULL_CHR_H_INT
    | Interpolation.FULL_CHR_H_INP
    | Interpolation.ACCURATE_RND
    | Interpolation.BITEXACT
)
"""Flags of color conversions. Without them, each round trip darkens a picture by one level, and the result depends on
the processor."""

SHORTEST_MS = 11
"""Shortest duration of a frame of an animation that browsers show."""
