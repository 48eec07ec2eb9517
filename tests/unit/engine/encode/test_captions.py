"""What captions are followed by."""

import pytest

from opensora_cli.engine.encode.encoding import training_caption


@pytest.mark.parametrize(
    ("fps", "motion_score", "expected"),
    [
        (24.0, 4.0, "A cat. 24 FPS, 4 motion score."),
        (24.0, None, "A cat. 24 FPS."),
        (23.976, 3.5, "A cat. 23.976 FPS, 4 motion score."),
        (12.5, 3.49, "A cat. 12.5 FPS, 3 motion score."),
        (0.0, 2.0, "A cat. 2 motion score."),
        (0.0, None, "A cat."),
    ],
)
def test_rate_and_motion_are_said_where_they_are_known(fps, motion_score, expected):
    assert training_caption("A cat.", fps=fps, motion_score=motion_score) == expected


def test_a_caption_keeps_its_own_end():
    assert training_caption("raining, sea", fps=24, motion_score=4) == "raining, sea 24 FPS, 4 motion score."


def test_each_may_be_left_out():
    assert training_caption("x", fps=24, motion_score=4, add_fps=False) == "x 4 motion score."
    assert training_caption("x", fps=24, motion_score=4, add_motion_score=False) == "x 24 FPS."
    assert training_caption("x", fps=24, motion_score=4, add_fps=False, add_motion_score=False) == "x"
