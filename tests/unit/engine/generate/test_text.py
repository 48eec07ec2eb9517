"""Prompts: their embeddings, the cache of these, and the vocabulary of a small model."""

import shutil
from dataclasses import replace

import pytest
import torch
from tiny_world import demo_settings, released_settings

from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.core.files import user_cache
from opensora_cli.engine.components.weights import Component
from opensora_cli.engine.generate import models as generate_models
from opensora_cli.engine.generate.events import Events
from opensora_cli.engine.generate.models import LoadedModels
from opensora_cli.engine.generate.plan import make_plan
from opensora_cli.engine.generate.run import generate
from opensora_cli.engine.generate.text import encode_prompts, name_in_cache, read_vocabulary, text_embeds
from opensora_cli.media.read import read_video

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


def encoded(plan, reporter):
    return text_embeds(plan, LoadedModels(), Events(reporter))


def same(first, second):
    return all(
        torch.equal(one.prompt_embeds_2LC, other.prompt_embeds_2LC)
        and torch.equal(one.pooled_prompt_embeds_2V, other.pooled_prompt_embeds_2V)
        for one, other in zip(first, second, strict=True)
    )


def entries():
    return sorted(user_cache("prompts").glob("*.safetensors"))


def test_a_second_run_loads_no_encoder_and_makes_the_same(world, tmp_path, reporter, loads):
    settings = released_settings(world, tmp_path, negative_prompt="night")
    [first] = generate(settings, reporter=reporter).videos
    assert len(loads) == 1
    assert len(entries()) == 2
    assert not any(note.startswith("prompts:") for note in reporter.notes)
    again = settings.replace({"output.overwrite": True, "output.path": str(tmp_path / "again.mp4")})
    result = generate(again, reporter=reporter)
    assert len(loads) == 1
    assert torch.equal(read_video(first.path).frames_THWC, read_video(result.videos[0].path).frames_THWC)
    assert "prompts: read from the cache (--no-cache encodes them again)" in reporter.notes
    assert "text" in result.timings_s
    generate(again.replace({"runtime.prompt_cache": False}), reporter=reporter)
    assert len(loads) == 2


def test_a_text_has_the_same_bits_beside_every_other(plan, reporter):
    settings = plan.settings.replace({"prompt_suffix.add_fps": False, "prompt_suffix.motion_score": None})
    pairs = [("sea", "night"), ("night", "sea"), ("sea", "sea")]
    models, record = LoadedModels(stay=True), Events(reporter)
    found = []
    for prompt, negative in pairs:
        both = settings.replace({"prompt": prompt, "negative_prompt": negative, "runtime.prompt_cache": False})
        [embeds] = encode_prompts(replace(plan, settings=both), models, record)
        found.append(embeds.prompt_embeds_2LC)
    assert torch.equal(found[0], found[1].flip(0))
    assert torch.equal(found[0][0], found[2][0])
    assert torch.equal(found[2][0], found[2][1])


def test_names_tell_apart_what_has_other_bits(plan, world, tmp_path, monkeypatch):
    def name(plan=plan, text="sea", threads=1, **options):
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        return name_in_cache(plan, text, **options)

    def changed(**changes):
        settings = {key.replace("__", "."): value for key, value in changes.items()}
        return make_plan(plan.settings.replace(settings))

    moved = tmp_path / "moved"
    shutil.copytree(world.demo, moved)
    other_file = changed(runtime__weights=str(moved))
    [config] = other_file.weights.path(Component.CLIP).glob("config.json")
    names = [name(), name(text="rain"), name(threads=2), name(ranks=2), name(other_file)]
    config.touch()
    names += [name(other_file), name(changed(text__t5_max_length=12)), name(changed(text__clip_max_length=12))]
    names += [name(changed(runtime__dtype="bfloat16"))]
    gpu = replace(plan.hardware, device=torch.device("cuda"), device_name="a GPU")
    names += [name(replace(plan, hardware=gpu)), name(replace(plan, hardware=replace(gpu, device_name="another")))]
    assert len(set(names)) == len(names)
    same_bits = changed(sampling__seed=7, video__num_frames=5, memory__offload="model", runtime__attention="math")
    assert name(same_bits) == name()
    # Threads of the CPU matter there alone.
    assert name(replace(plan, hardware=gpu), threads=2) == name(replace(plan, hardware=gpu))
    streamed = replace(plan, offload=replace(plan.offload, stream_text=True))
    assert name(streamed, ranks=2) == name(streamed) == name()


def test_an_encoder_of_another_width_is_refused(plan, reporter):
    other = replace(plan, settings=plan.settings.replace({"model.vec_in_dim": 24}))
    folder = plan.weights.path(Component.CLIP)
    for _ in range(2):  # also where it is read from the cache
        with pytest.raises(CheckpointError) as caught:
            encoded(other, reporter)
        assert caught.value.message == f"{folder} encodes to 16 numbers, and the transformer reads model.vec_in_dim=24"
    assert user_cache("prompts").is_dir()


@pytest.mark.parametrize("content", ["", "[]", '{"places": "sea"}', '{"places": [1]}', '{"places": '])
def test_a_broken_vocabulary_is_named(tmp_path, content):
    (tmp_path / "vocabulary.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"vocabulary\.json is broken"):
        read_vocabulary(tmp_path)
