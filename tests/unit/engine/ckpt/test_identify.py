"""Which model a checkpoint is."""

import pytest
import torch

from opensora_cli.core.choices import QKV
from opensora_cli.engine.ckpt.identify import Identity, check, identify, read_released
from opensora_cli.models.mmdit.config import MMDiTConfig
from opensora_cli.models.mmdit.layout import HeadSizes, is_fused, plan_layout, planned_shapes
from opensora_cli.models.mmdit.model import MMDiT
from opensora_cli.models.vae.config import HunyuanVAEConfig
from opensora_cli.models.vae.hunyuan import HunyuanVAE

MODELS = {
    "open-sora-v2": lambda: MMDiT(MMDiTConfig()),
    "open-sora-v2-dc-ae": lambda: MMDiT(MMDiTConfig(in_channels=128, patch_size=1)),
    "flux1-dev": lambda: MMDiT(MMDiTConfig(guidance_embed=True, cond_embed=False)),
    "hunyuan-vae": lambda: HunyuanVAE(HunyuanVAEConfig()),
}


def shapes_of(model):
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def in_other_layout(shapes):
    qkv = QKV.SPLIT if is_fused(shapes) else QKV.FUSED
    return planned_shapes(plan_layout(shapes, HeadSizes.of_shapes(shapes), qkv=qkv, reorder=False), shapes)


@pytest.mark.parametrize("name", MODELS)
def test_tables_have_the_names_and_shapes_of_our_models(name):
    with torch.device("meta"):
        model = MODELS[name]()
    released = read_released(name).shapes
    ours = shapes_of(model)
    assert (in_other_layout(released) if name == "flux1-dev" else released) == ours
    assert check(ours, read_released(name)) == []
    assert identify(ours).name == name


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("open-sora-v2", "Open-Sora 2.0 video transformer, fused q/k/v"),
        ("flux1-dev", "FLUX.1 [dev] image transformer, split q/k/v"),
    ],
)
def test_released_models_are_known_in_the_other_layout(name, title):
    shapes = in_other_layout(read_released(name).shapes)
    assert shapes.keys() != read_released(name).shapes.keys()
    assert identify(shapes) == Identity(name=name, title=title, prefix="")
    assert check(shapes, read_released(name)) == []


def test_prefixes_are_found_and_named():
    shapes = {f"module.{key}": shape for key, shape in read_released("hunyuan-vae").shapes.items()}
    identity = identify(shapes)
    assert (identity.name, identity.prefix) == ("hunyuan-vae", "module.")
    problems = check(shapes, read_released("hunyuan-vae"))
    assert problems[0] == "names begin with module.: take it off with --rename module.="
    assert problems[1].startswith("248 missing (encoder.conv_in.conv.weight, encoder.conv_in.conv.bias, ")


def test_other_transformers_are_described_by_their_sizes():
    config = MMDiTConfig(hidden_size=48, num_heads=4, axes_dim=(4, 4, 4), depth=1, depth_single_blocks=3)
    with torch.device("meta"):
        shapes = shapes_of(MMDiT(config))
    title = "MMDiT of 1 double-stream and 3 single-stream blocks, hidden size 48, 4 heads, 64 input channels, {} q/k/v"
    assert identify(shapes) == Identity(name=None, title=title.format("split"), prefix="")
    assert identify(in_other_layout(shapes)) == Identity(name=None, title=title.format("fused"), prefix="")


@pytest.mark.parametrize("shapes", [{}, {"weight": (3, 4)}, {"encoder.weight": ()}])
def test_unknown(shapes):
    assert identify(shapes) is None
