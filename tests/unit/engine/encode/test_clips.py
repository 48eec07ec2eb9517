"""Training clips: their encoders, captions and condition modes, and the parts that are encoded alone."""

import numpy as np
import pytest
import tiny_frozen
import tiny_training
import torch
from mapped_memory import are_mapped, needs_maps
from safetensors.torch import load_file, save_file

from opensora_cli.core.conditions import CONDITION_MODES, ReferenceLengths
from opensora_cli.engine.encode import clips
from opensora_cli.engine.encode.clips import load_encoders, training_caption
from opensora_cli.sampling.conditioning import encoded_parts, fitting_modes, pick_mode
from opensora_cli.settings.train_sections import MMDiTTrainSettings

CPU = torch.device("cpu")
ALL = dict.fromkeys(CONDITION_MODES, 1.0)
RELEASED = ReferenceLengths()


@pytest.mark.parametrize(
    ("num_latent_frames", "causal", "left_out"),
    [
        (33, True, set()),
        (18, True, set()),
        (17, True, {"v2v_head_easy", "v2v_tail_easy"}),
        (17, False, set()),
        (16, False, {"v2v_head_easy", "v2v_tail_easy"}),
        (10, True, {"v2v_head_easy", "v2v_tail_easy"}),
        (9, True, {name for name in ALL if name.startswith("v2v")}),
        (9, False, {"v2v_head_easy", "v2v_tail_easy"}),
        (3, True, {name for name in ALL if name.startswith("v2v")}),
        (2, True, {"i2v_loop", *(name for name in ALL if name.startswith("v2v"))}),
        (1, True, set(ALL) - {"t2v"}),
    ],
)
def test_modes_that_would_give_all_are_left_out(num_latent_frames, causal, left_out):
    fitting = fitting_modes(ALL, num_latent_frames=num_latent_frames, causal=causal, lengths=RELEASED)
    assert {mode.name for mode in fitting} == set(ALL) - left_out


def test_a_picture_is_t2v_though_that_mode_has_no_weight():
    fitting = fitting_modes({"i2v_head": 1.0}, num_latent_frames=1, causal=True, lengths=RELEASED)
    assert [mode.name for mode in fitting] == ["t2v"]


def test_modes_come_by_weight():
    weights = {"t2v": 1.0, "i2v_head": 5.0, "i2v_loop": 0.0, "i2v_tail": 2.0}
    rng = np.random.default_rng(0)
    modes = fitting_modes(weights, num_latent_frames=9, causal=True)
    sampled = [pick_mode(modes, rng).name for _ in range(4000)]
    counts = {name: sampled.count(name) for name in set(sampled)}
    assert counts.keys() == {"t2v", "i2v_head", "i2v_tail"}
    # Within four standard deviations of 500, 2500 and 1000.
    assert counts["t2v"] == pytest.approx(500, abs=84)
    assert counts["i2v_head"] == pytest.approx(2500, abs=123)
    assert counts["i2v_tail"] == pytest.approx(1000, abs=110)


@pytest.mark.parametrize(
    ("mode", "causal", "parts"),
    [
        ("t2v", True, []),
        ("i2v_loop", True, [(False, 1), (True, 1)]),
        ("i2v_loop", False, [(False, 1), (True, 1)]),
        ("v2v_tail", True, [(True, 33)]),
        ("v2v_head_easy", True, [(False, 65)]),
        ("v2v_tail", False, []),
    ],
)
def test_what_is_encoded_on_its_own(mode, causal, parts):
    found = encoded_parts(CONDITION_MODES[mode], causal=causal, temporal_compression=4)
    assert [(part.from_end, part.num_frames) for part in found] == parts


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


@needs_maps
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_mapped_layers_give_the_embeddings_of_cast_ones(stored, tmp_path, monkeypatch):
    weights = tiny_frozen.save_frozen_parts(tmp_path)
    file = weights / "t5" / "model.safetensors"
    save_file({name: tensor.to(stored) for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})
    settings, loaded = tiny_training.mmdit_settings("unused", weights), []

    def load_t5(*args, **options):
        loaded.append(plain_load_t5(*args, **options))
        return loaded[-1]

    plain_load_t5 = clips.load_t5
    monkeypatch.setattr(clips, "load_t5", load_t5)
    encoders = load_encoders(settings, device=CPU)
    whole = plain_load_t5(weights / "t5", max_length=settings.text.t5_max_length, device=CPU, dtype=torch.float32)
    for _ in range(2):
        assert torch.equal(encoders.prompt_embeds("a boat on the sea"), whole.encode(["a boat on the sea"])[0])
        [t5] = loaded
        assert are_mapped(t5.blocks.parameters(), file)
        assert {weight.dtype for weight in t5.blocks.parameters()} == {stored}
