"""Captions for training."""

import pytest

from opensora_cli.engine.encode.clips import training_caption
from opensora_cli.settings.train_objectives import MMDiTTrainSettings


@pytest.mark.parametrize(
    ("caption", "fps", "motion_score", "changes", "expected"),
    [
        ("A cat.", 24.0, 4.0, {}, "A cat. 24 FPS, 4 motion score."),
        ("A cat.", 24.0, None, {}, "A cat. 24 FPS."),
        ("A cat.", 23.976, 3.5, {}, "A cat. 23.976 FPS, 4 motion score."),
        ("A cat.", 12.5, 3.49, {}, "A cat. 12.5 FPS, 3 motion score."),
        ("A cat.", 0.0, 2.0, {}, "A cat. 2 motion score."),
        ("A cat.", 0.0, None, {}, "A cat."),
        ("raining, sea", 24, 4, {}, "raining, sea 24 FPS, 4 motion score."),
        ("x", 24, 4, {"add_fps": False}, "x 4 motion score."),
        ("x", 24, 4, {"add_motion_score": False}, "x 24 FPS."),
        ("x", 24, 4, {"add_fps": False, "add_motion_score": False}, "x"),
    ],
)
def test_rate_and_motion_score_follow_the_caption(caption, fps, motion_score, changes, expected):
    settings = MMDiTTrainSettings(**changes)
    assert training_caption(caption, fps=fps, motion_score=motion_score, settings=settings) == expected
