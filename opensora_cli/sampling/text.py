"""Suffixes of prompts for the released model: frame rate and motion score.

The model was trained on captions with these suffixes. Negative prompts have none.
"""

import re
from collections.abc import Sequence

_ENDS_WITH_FPS = re.compile(r"\d+ FPS\.$")


def add_fps_info_to_text(text: Sequence[str], fps: int = 16) -> list[str]:
    """Return each prompt as a sentence followed by " {fps} FPS.", unless it already ends with a frame rate."""
    sentences = (prompt.strip() for prompt in text)
    sentences = (sentence if sentence.endswith(".") else f"{sentence}." for sentence in sentences)
    return [sentence if _ENDS_WITH_FPS.search(sentence) else f"{sentence} {fps} FPS." for sentence in sentences]


def add_motion_score_to_text(text: Sequence[str], motion_score: int) -> list[str]:
    """Return each prompt followed by " {motion_score} motion score.", from 1 (still) to 7 (very lively).

    Call it after `add_fps_info_to_text`. The presets use 4.
    """
    return [f"{prompt} {motion_score} motion score." for prompt in text]
