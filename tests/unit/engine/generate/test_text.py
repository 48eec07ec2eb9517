"""Prompts: their embeddings, and the vocabulary of a small model."""

from dataclasses import replace

import pytest
import torch
from tiny_world import demo_settings

from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.engine.components.weights import Component
from opensora_cli.engine.generate import models as generate_models
from opensora_cli.engine.generate import text
from opensora_cli.engine.generate.events import Events
from opensora_cli.engine.generate.models import LoadedModels
from opensora_cli.engine.generate.plan import make_plan
from opensora_cli.engine.generate.text import read_vocabulary, text_embeds

pytestmark = pytest.mark.usefixtures("without_estimates")


@pytest.fixture
def loads(monkeypatch):
    """Return what T5 is loaded for, in time."""
    found, load_t5 = [], generate_models.load_t5
    monkeypatch.setattr(
        generate_models, "load_t5", lambda plan, **options: found.append(plan) or load_t5(plan, **options)
    )
    return found


@pytest.fixture
def plan(world, tmp_path):
    return make_plan(demo_settings(world, tmp_path))


def test_texts_are_encoded_once_for_models_that_stay(plan, reporter, loads, monkeypatch):
    models, record = LoadedModels(), Events(reporter)

    def embeds(plan=plan, **changes):
        settings = plan.settings.replace({key.replace("__", "."): value for key, value in changes.items()})
        [found] = text_embeds(replace(plan, settings=settings), models, record)
        return found.prompt_embeds_2LC

    first = embeds()
    models.release()
    assert torch.equal(embeds(sampling__seed=7), first)
    assert len(loads) == 1
    assert "text" in record.timings_s
    embeds(text__t5_max_length=12)
    monkeypatch.setattr(text.torch, "get_num_threads", lambda: 7)
    embeds()
    embeds(make_plan(plan.settings.replace({"runtime.dtype": "bfloat16"})))
    assert len(loads) == 4
    monkeypatch.setattr(text, "_KEPT_TEXTS", 2)
    embeds(prompt="desert", negative_prompt="night")
    assert [key[1] for key in models.prompts] == [text.full_prompt(plan.settings, "desert"), "night"]


def test_a_text_has_the_same_bits_beside_every_other(plan, reporter):
    settings = plan.settings.replace({"prompt_suffix.add_fps": False, "prompt_suffix.motion_score": None})
    found = []
    for prompt, negative in [("sea", "night"), ("night", "sea"), ("sea", "sea")]:
        both = settings.replace({"prompt": prompt, "negative_prompt": negative})
        [embeds] = text_embeds(replace(plan, settings=both), LoadedModels(), Events(reporter))
        found.append(embeds.prompt_embeds_2LC)
    assert torch.equal(found[0], found[1].flip(0))
    assert torch.equal(found[0][0], found[2][0])
    assert torch.equal(found[2][0], found[2][1])


def test_an_encoder_of_another_width_is_refused(plan, reporter):
    other = replace(plan, settings=plan.settings.replace({"model.vec_in_dim": 24}))
    folder = plan.weights.path(Component.CLIP)
    with pytest.raises(CheckpointError) as caught:
        text_embeds(other, LoadedModels(), Events(reporter))
    assert caught.value.message == f"{folder} encodes to 16 numbers, and the transformer reads model.vec_in_dim=24"


@pytest.mark.parametrize("content", ["", "[]", '{"places": "sea"}', '{"places": [1]}', '{"places": '])
def test_a_broken_vocabulary_is_named(tmp_path, content):
    (tmp_path / "vocabulary.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"vocabulary\.json is broken"):
        read_vocabulary(tmp_path)
