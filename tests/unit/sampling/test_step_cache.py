"""Which steps a cache spares."""

import math

import pytest
import torch

from opensora_cli.core.conditions import condition_mode
from opensora_cli.sampling.guidance import UNGUIDED, Branch, Guidance, branches_needed, guidance_scales
from opensora_cli.sampling.step_cache import cached_steps, one_of_each_phase, relative_change

EVEN = [round(1 - step / 20, 2) for step in range(21)]


def _reused(scales, **options):
    return [step for step, each in enumerate(cached_steps(scales, EVEN, **options)) if each.is_reused]


def test_change_is_that_of_a_path_between_data_and_noise():
    generator = torch.Generator().manual_seed(0)
    data, noise = torch.randn(2, 100_000, generator=generator)
    for t, since in ((0.8, 0.9), (0.5, 0.6), (0.1, 0.4)):
        now, before = ((1 - each) * data + each * noise for each in (t, since))
        assert relative_change(t, since) == pytest.approx(((now - before).norm() / now.norm()).item(), rel=0.02)
    assert relative_change(0.5, 0.6) == pytest.approx(0.2)


def test_steps_are_spared_until_the_latents_have_changed_too_much():
    steady = (UNGUIDED,) * 20
    # A step of 0.05 changes them by 0.06 to 0.1, two by twice as much.
    assert _reused(steady, largest_change=0.06) == []
    assert _reused(steady, largest_change=0.105) == [4, 6, 8, 10, 12]
    # All but those near the noise and near the data.
    assert _reused(steady, largest_change=2.0) == [*range(4, 14)]


def test_nothing_is_reused_that_was_not_computed():
    steady = (UNGUIDED,) * 20
    assert _reused(steady, largest_change=0.105, begun_at=6) == [7, 9, 11, 13]


def test_each_phase_looks_at_its_own_steps():
    mode = condition_mode("t2v")
    scales = guidance_scales(Guidance(), mode=mode, timesteps=tuple(EVEN), num_latent_frames=5)
    steps = cached_steps(scales, EVEN, largest_change=0.205)
    assert [each.phase for each in steps] == [branches_needed(each) for each in scales]
    computed = {}
    for t, each in zip(EVEN, steps, strict=False):
        if each.is_reused:
            assert relative_change(t, computed[each.phase]) < 0.205
        else:
            computed[each.phase] = t
    guided, unguided = (Branch.UNCOND, Branch.COND), (Branch.COND,)
    assert {each.phase for each in steps if each.is_reused} == {guided, unguided}
    assert [branches_needed(each) for each in one_of_each_phase(scales)] == [guided, unguided]
    assert math.isclose(one_of_each_phase(scales)[0].text, 7.5)
