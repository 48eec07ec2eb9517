"""Models are built from weights of any form and layout."""

import shutil

import pytest
from tiny_weights import bit_equal, converted
from tiny_world import released_settings

from opensora_cli.engine.components.weights import Component
from opensora_cli.engine.generate.load import load_transformer, load_vae
from opensora_cli.engine.generate.plan import make_plan

pytestmark = pytest.mark.usefixtures("without_estimates")

TRANSFORMER, VAE = "Open_Sora_v2.safetensors", "hunyuan_vae.safetensors"


@pytest.mark.parametrize(
    "format",
    [
        "safetensors-shards",
        "torch",
        "dcp",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("torch-shards", "colossalai")),
    ],
)
def test_every_form(world, tmp_path, format):
    weights = tmp_path / "weights"
    shutil.copytree(world.released, weights, ignore=shutil.ignore_patterns("*.safetensors"))
    for name in (TRANSFORMER, VAE):
        shards = {"shard_size": "20KB"} if "shards" in format else {}
        # A name that says nothing: content decides.
        converted(world.released / name, weights / name.removesuffix(".safetensors"), format=format, **shards)
    names = {"files__transformer": "Open_Sora_v2", "files__vae": "hunyuan_vae"}
    plan = make_plan(released_settings(world, tmp_path, runtime__weights=str(weights), **names))
    assert plan.weights.path(Component.VAE) == weights / "hunyuan_vae"
    original = make_plan(released_settings(world, tmp_path))
    for load in (load_transformer, load_vae):
        assert bit_equal(load(plan).state_dict(), load(original).state_dict())


@pytest.mark.parametrize(("qkv", "rotary"), [("fused", "half"), ("fused", "interleaved"), ("split", "interleaved")])
def test_every_layout(world, tmp_path, qkv, rotary):
    weights = shutil.copytree(world.released, tmp_path / "weights")
    (weights / TRANSFORMER).unlink()
    converted(world.released / TRANSFORMER, weights / TRANSFORMER, qkv=qkv, rotary=rotary)
    plan = make_plan(released_settings(world, tmp_path, runtime__weights=str(weights)))
    original = make_plan(released_settings(world, tmp_path))
    assert bit_equal(load_transformer(plan).state_dict(), load_transformer(original).state_dict())


def test_eight_bits(world, tmp_path):
    weights = shutil.copytree(world.released, tmp_path / "weights")
    (weights / TRANSFORMER).unlink()
    converted(world.released / TRANSFORMER, weights / TRANSFORMER, dtype="fp8_e4m3")
    plan = make_plan(released_settings(world, tmp_path, runtime__weights=str(weights)))
    original = load_transformer(make_plan(released_settings(world, tmp_path))).state_dict()
    for name, loaded in load_transformer(plan).state_dict().items():
        assert loaded.dtype == original[name].dtype
        # Three bits after the point: half a step is 1/16 of the largest at most.
        assert (loaded - original[name]).abs().max() <= original[name].abs().max() / 16
