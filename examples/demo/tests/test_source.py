"""Scenes as a source of clips, and the recipes that train on them."""

import re

import pytest
import torch

from demo_world.scene_clips import SceneClip
from demo_world.settings import RECIPES, Recipe, SceneSettings, TextRecipe, list_recipes, load_recipe
from demo_world.source import SceneSource
from opensora_cli.core.conditions import CONDITION_MODES
from opensora_cli.core.exceptions import MediaError, RequestError
from opensora_cli.data.batches import ClipRequest, EpochPlan, MicroBatch

MIXED = SceneSettings(count=40, size=32, num_frames=5, batch_size=3, picture_share=0.25, picture_batch_size=5)


def all_batches(plan: EpochPlan) -> list[MicroBatch]:
    return [plan.batch(position, number=position, epoch=0) for position in range(len(plan))]


def test_scenes_are_shared_out_between_clips_and_pictures() -> None:
    source = SceneSource(MIXED, 0)
    plan = source.plan_epoch(0)
    assert plan.samples_of_buckets.tolist() == [30, 10]
    batches = all_batches(plan)
    assert sorted(len(batch.samples) for batch in batches) == [3] * 10 + [5] * 2
    assert len({sample for batch in batches for sample in batch.samples}) == 40
    pictures = [
        {each for batch in all_batches(source.plan_epoch(epoch)) if batch.bucket == 1 for each in batch.samples}
        for epoch in (0, 1)
    ]
    assert pictures[0] != pictures[1]


def test_a_scene_is_the_same_every_time_and_a_picture_is_its_first_frame() -> None:
    source = SceneSource(MIXED, 3)
    clip, picture = (source.request(7, bucket=bucket, number=bucket, place=0) for bucket in (0, 1))
    assert (clip.path, clip.num_frames, clip.fps) == ("scene:3/7", 5, 12.0)
    assert (picture.num_frames, picture.fps) == (1, 0.0)
    assert clip == source.request(7, bucket=0, number=9, place=2)
    assert source.read(clip).shape == (5, 32, 32, 3)
    assert torch.equal(source.read(clip)[:1], source.read(picture))


def test_every_request_of_the_epochs_is_listed_once() -> None:
    source = SceneSource(MIXED, 0)
    requests = [*source.requests()]
    assert len(requests) == len({*requests}) == 2 * 40
    found: set[ClipRequest] = set()
    for epoch in range(20):
        for batch in all_batches(source.plan_epoch(epoch)):
            found |= {source.request(each, bucket=batch.bucket, number=0, place=0) for each in batch.samples}
    assert found == {*requests}
    assert len([*SceneSource(MIXED.replace({"picture_share": 0.0}), 0).requests()]) == 40
    alone = SceneSettings(count=8, num_frames=1, picture_share=0.0)
    assert [request.num_frames for request in SceneSource(alone, 0).requests()] == [1] * 8


def test_held_out_scenes_fill_the_batches_and_have_names_of_their_own() -> None:
    scenes = MIXED.replace({"count": 1000, "batch_size": 2, "picture_batch_size": 3}).held_out(4)
    assert scenes.count == 48
    (request, *_) = SceneSource(scenes, 3, held_out=True).requests()
    assert request.path == "held-out:3/0"
    clip = SceneClip(seed=3, number=7, held_out=True)
    assert SceneClip.named(clip.name) == clip
    assert SceneClip.named("a/scene:3/7") is None
    with pytest.raises(MediaError, match="is not the name of a scene"):
        SceneSource(MIXED, 0).read(ClipRequest(**{**vars_of(request), "path": "a.mp4"}))


def vars_of(request: ClipRequest) -> dict[str, object]:
    return {name: getattr(request, name) for name in ClipRequest.__slots__}


def test_other_scenes_have_another_fingerprint() -> None:
    sources = [SceneSource(MIXED, 0), SceneSource(MIXED, 1), SceneSource(MIXED, 0, held_out=True)]
    sources.append(SceneSource(MIXED.replace({"size": 64}), 0))
    assert len({source.fingerprint for source in sources}) == 4


def test_every_recipe_loads_and_they_follow_each_other() -> None:
    recipes = {name: load_recipe(name) for name in list_recipes()}
    text = recipes.pop("demo_text")
    assert isinstance(text, TextRecipe)
    trained = {name: recipe.settings for name, recipe in recipes.items() if isinstance(recipe, Recipe)}
    demo, short, decoder, vae = (trained[name] for name in ("demo", "demo_short", "demo_decoder", "demo_vae"))
    assert vae.init == f"{trained['demo_vae_pictures'].output}/vae.safetensors"
    assert decoder.init == f"{vae.output}/vae.safetensors"
    assert demo.init == f"{short.output}/transformer.safetensors"
    assert demo.weights == short.weights == (decoder.output, text.output)
    assert demo.vae == short.vae == decoder.vae == vae.vae
    assert demo.model == short.model
    # The last ones begin with the embedded weights.
    for name in ("demo_finish", "demo_turbo", "demo_turbo_dmd"):
        assert (trained[name].init, trained[name].weights) == ("demo", ("demo",))
    assert trained["demo_turbo_dmd"].lora.init == f"{trained['demo_turbo'].output}/lora"
    sizes = text.text_encoders
    assert (demo.text.t5_max_length, demo.text.clip_max_length) == (sizes.t5_max_length, sizes.clip_max_length)
    assert (demo.model.context_in_dim, demo.model.vec_in_dim) == (sizes.t5_width, sizes.clip_width)
    assert set(demo.train_mmdit.mode_weights.by_mode()) == set(CONDITION_MODES)


@pytest.mark.parametrize(
    ("recipe", "assignments", "message"),
    [
        ("demo_shrt", [], "recipe 'demo_shrt' is not one of demo, "),
        ("demo", ["demo.scenes.count=5", "demo.scenes.batch_size=6"], "scenes.count=5 has 5 clips"),
        ("demo", ["demo.thing_weigth=2"], "demo.thing_weigth (from --set) is not a setting"),
        ("demo_vae", ["demo.scenes.num_frames=16"], "clips of 16 frames do not suit vae.kind"),
        ("demo_vae", ["lora.rank=4"], "lora.rank=4"),
        ("demo_text", ["text_encoders.t5_heads=3"], "text_encoders.t5_heads=3 must divide text_encoders.t5_width=128"),
    ],
)
def test_wrong_requests(recipe: str, assignments: list[str], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        load_recipe(recipe, assignments)
    assert message in caught.value.message


def test_every_recipe_that_the_page_names_is_there() -> None:
    page = (RECIPES.parent / "README.md").read_text(encoding="utf-8")
    named = re.findall(r"^python examples/demo/train.py --recipe (\w+)$", page, re.MULTILINE)
    assert sorted(named) == list_recipes()
