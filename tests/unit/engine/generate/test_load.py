"""Models are built from weights of any form and layout."""

import shutil

import pytest
import torch
from tiny_transformer import transformer
from tiny_weights import bit_equal, converted
from tiny_world import released_settings

from opensora_cli.core.choices import LinearProducts
from opensora_cli.engine.components.architectures import load_autoencoder
from opensora_cli.engine.components.linear_products import LinearProductsReport
from opensora_cli.engine.components.weights import Component
from opensora_cli.engine.estimate.offload import OffloadPlan
from opensora_cli.engine.generate.models import host_modulation, load_transformer, move_except
from opensora_cli.engine.generate.plan import make_plan
from opensora_cli.memory.eight_bit import ProductError, store_in_fp8


def load_vae(plan):
    path, hardware = plan.weights.path(Component.VAE), plan.hardware
    return load_autoencoder(plan.settings.vae, path, device=hardware.device, dtype=hardware.dtype)


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


@pytest.mark.parametrize("in_8_bits", [False, True])
def test_modulation_alone_stays_where_it_is(in_8_bits):
    model = transformer().requires_grad_(False)
    block = model.double_blocks[0]
    if in_8_bits:
        store_in_fp8(block)
    move_except(host_modulation(model, OffloadPlan(modulation_on_host=True)), block, torch.device("meta"))
    here = {name for name, weight in block.named_parameters() if not weight.is_meta}
    kinds = ("weight", "bias", "weight_scale") if in_8_bits else ("weight", "bias")
    assert here == {f"{stream}_mod.lin.{kind}" for stream in ("img", "txt") for kind in kinds}
    move_except([], block, torch.device("meta"))
    assert all(weight.is_meta for weight in block.parameters())


def test_the_report_names_the_worst_layer():
    report = LinearProductsReport.of(LinearProducts.INT8, [ProductError("a", 0.03), ProductError("b", 0.04)])
    assert report.relative_error == pytest.approx((0.5 * (0.03**2 + 0.04**2)) ** 0.5)
    assert report.line() == "2 linear layers multiply in int8: sampled products are off by 3.54%, those of b by 4.00%"
