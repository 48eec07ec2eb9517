"""Which modes a clip is trained in, and how often."""

import numpy as np
import pytest

from opensora_cli.core.conditions import CONDITION_MODES, ReferenceLengths
from opensora_cli.engine.encode.clips import (
    encoded_parts,
    fitting_modes,
    pick_mode,
)

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
