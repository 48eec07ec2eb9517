"""Suffixes of prompts."""

from opensora_cli.sampling.text import add_fps_info_to_text, add_motion_score_to_text


def test_a_sentence_gets_one_rate_and_then_a_score():
    prompts = ["a boat", " a boat. ", "a boat. 24 FPS."]
    rated = add_fps_info_to_text(prompts, 12)
    assert rated == ["a boat. 12 FPS.", "a boat. 12 FPS.", "a boat. 24 FPS."]
    assert add_motion_score_to_text(rated[:1], 4) == ["a boat. 12 FPS. 4 motion score."]
