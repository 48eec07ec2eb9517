"""Which model a checkpoint is, and what is reported about it, without reading tensors."""

from pathlib import Path

import pytest
import torch
from tiny_adapters import factors, write_adapter
from tiny_weights import write_holes

from opensora_cli.core.choices import QKV
from opensora_cli.engine.ckpt.inspect import Identity, Inspection, check, identify, inspect, read_released
from opensora_cli.models.mmdit.config import MMDiTConfig
from opensora_cli.models.mmdit.layout import HeadSizes, is_fused, plan_layout, planned_shapes
from opensora_cli.models.mmdit.model import MMDiT
from opensora_cli.models.vae.config import HunyuanVAEConfig
from opensora_cli.models.vae.hunyuan import HunyuanVAE
from opensora_cli.settings.tools import InspectSettings

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


def look(path: Path, **options: object) -> Inspection:
    return inspect(InspectSettings.model_validate({"path": str(path), **options}))


def test_the_released_model_without_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    write_holes(path, read_released("open-sora-v2").shapes, dtype="BF16", metadata={"note": "hello"})
    assert path.stat().st_size > 23 * 10**9
    assert path.stat().st_blocks * 512 < 10**7

    document = look(path).to_json()
    assert document["schema"] == "osora.ckpt.inspect/4"
    assert (document["model"], document["format"]) == ("open-sora-v2", "safetensors")
    assert document["qkv"] == "split"
    assert document["parameters"] == 11_891_390_528
    assert document["dtypes"] == {"bfloat16": 11_891_390_528}
    assert document["metadata"] == {"note": "hello"}
    first = {"name": "img_in.weight", "dtype": "bfloat16", "shape": [3072, 64], "bytes": 393216}
    assert document["tensors"][0] == first


def test_the_scales_of_an_adapter_are_in_the_summary(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapter", factors("block.proj", 6, 5, rank=4), r=4, lora_alpha=2)
    assert "adapter     alpha / rank 0.5" in look(folder).lines()
    assert "model       LoRA in the style of PEFT, rank 4 in 1 layers" in look(folder).lines()
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "use_dora": true}')
    refusal = f"adapter     {folder / 'adapter_config.json'}: an adapter with use_dora cannot be added"
    assert refusal in look(folder / "adapter_model.safetensors").lines()
