"""What a caption is followed by when the transformer learns from it: its frame rate, and how much moves."""

import math


def training_caption(
    caption: str, *, fps: float, motion_score: float | None, add_fps: bool = True, add_motion_score: bool = True
) -> str:
    """Return the caption followed by " {fps} FPS, {motion score} motion score.", or by what is known of the two.

    Unlike a prompt (see `sampling.text`) it is joined by a comma, and the caption's own end is left as it is: so the
    released model was trained.

    Args:
        caption: as it is in the table.
        fps: frames per second of the clip as it is shown; 0 for a picture, which gets none.
        motion_score: 1 (still) to 7 (very lively), rounded to a whole number, halves upwards; None: unknown.
        add_fps: whether the frame rate is said.
        add_motion_score: whether the motion score is said.
    """
    suffixes = []
    if add_fps and fps > 0:
        suffixes.append(f"{fps:g} FPS")
    if add_motion_score and motion_score is not None:
        suffixes.append(f"{math.floor(motion_score + 0.5)} motion score")
    return f"{caption} {', '.join(suffixes)}." if suffixes else caption
