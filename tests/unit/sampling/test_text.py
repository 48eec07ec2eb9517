"""Prompt suffixes."""

from opensora_cli.sampling.text import add_fps_info_to_text, add_motion_score_to_text


def test_prompts_become_sentences_with_a_frame_rate():
    assert add_fps_info_to_text(["raining, sea", " A cat.\n"], 24) == ["raining, sea. 24 FPS.", "A cat. 24 FPS."]


def test_a_frame_rate_is_not_added_twice():
    once = add_fps_info_to_text(["raining, sea"], 24)
    assert add_fps_info_to_text(once, 24) == once
    assert add_fps_info_to_text(["ends with 12 FPS"], 24) == ["ends with 12 FPS."]


def test_other_alphabets_are_sentences_too():
    assert add_fps_info_to_text(["下雨的海 🌊"], 8) == ["下雨的海 🌊. 8 FPS."]


def test_motion_score():
    assert add_motion_score_to_text(["A cat. 24 FPS."], 4) == ["A cat. 24 FPS. 4 motion score."]
