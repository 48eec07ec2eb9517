"""What computes the attention of a run: timed once, the same on all ranks, and that of the run that it goes on from."""

from dataclasses import replace

import pytest
import torch
from shared_models import plan_without_estimate

from opensora_cli.core.progress import SilentReporter
from opensora_cli.engine.components.attention import AttentionPlan
from opensora_cli.engine.components.attention_times import AttentionShape
from opensora_cli.engine.generate import chosen_attention
from opensora_cli.engine.generate.chosen_attention import attention_shape, with_timed_attention
from opensora_cli.engine.generate.saved_latents import open_latents, save_latents
from opensora_cli.parallel.mesh import MeshShape
from opensora_cli.settings.load import load_preset

UNDECIDED = AttentionPlan(backend="sdpa", reason="to be timed", candidates=("sdpa", "math"))
SETTINGS = load_preset("demo", prompt="raining, sea").replace({"runtime.device": "cpu"})


def plan_of(**changes):
    plan = plan_without_estimate(SETTINGS.replace(changes))
    return replace(plan, attention=UNDECIDED, draft=replace(plan, attention=UNDECIDED))


@pytest.fixture
def timed(monkeypatch):
    """Let math be the fastest, and return the shapes that are timed."""
    shapes = []

    def times(planned, use, shape, *, note):
        shapes.append(shape)
        return AttentionPlan(backend="math", reason="timed")

    monkeypatch.setattr(chosen_attention, "timed_attention", times)
    return shapes


def test_every_part_of_a_run_has_what_is_the_fastest_for_its_shape(timed):
    plan = with_timed_attention(plan_of(), SilentReporter())
    assert (plan.attention.backend, plan.draft.attention.backend) == ("math", "math")
    assert timed == [attention_shape(SETTINGS, MeshShape(), plan.latent_shape)] * 2


def test_what_is_asked_for_is_not_timed(timed):
    plan = with_timed_attention(plan_of(**{"runtime.attention": "sdpa"}), SilentReporter())
    assert plan.attention is UNDECIDED
    assert timed == []


@pytest.mark.parametrize(
    ("before", "reason", "backend"),
    [("bf16_products", "auto: as in the run that this one goes on from", "bf16_products"), ("flash9", "timed", "math")],
)
def test_a_run_that_goes_on_stays_with_its_attention_where_that_works(timed, before, reason, backend):
    attention = with_timed_attention(plan_of(), SilentReporter(), before=before).attention
    assert (attention.backend, attention.reason) == (backend, reason)


def test_saved_latents_name_what_computed_them(tmp_path):
    path, latents = tmp_path / "a.latents.safetensors", torch.zeros(16, 1, 2, 2)
    save_latents(path, latents, SETTINGS, steps=1, attention="math")
    assert open_latents(path).attention == "math"
    save_latents(path, latents, SETTINGS)
    assert open_latents(path).attention is None


@pytest.mark.parametrize(
    ("mesh", "shape"),
    [
        (MeshShape(), AttentionShape(24, 1024, 1024, 128)),
        (MeshShape(ulysses=5), AttentionShape(5, 1024, 1024, 128)),
        (MeshShape(tensor=2, ulysses=2), AttentionShape(6, 1024, 1024, 128)),
        (MeshShape(ring=3), AttentionShape(24, 342, 342, 128, in_parts=True)),
    ],
)
def test_the_shape_is_that_of_the_rank_with_most(mesh, shape):
    settings = load_preset("256px", prompt="raining, sea")
    assert settings.text.t5_max_length == 512
    assert attention_shape(settings, mesh, (16, 2, 32, 32)) == shape
