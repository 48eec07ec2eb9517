"""Layouts of q, k, v and the rotary embedding, on weights that have not been read: bit for bit the reference's."""

import pytest
import torch

from opensora_cli.checkpoint.lazy import LazyTensor
from opensora_cli.core.choices import QKV
from opensora_cli.engine.ckpt.convert import change_layout
from opensora_cli.engine.ckpt.inspect import check, identify, read_released

RELEASED = {
    "open-sora-v2": "Open_Sora_v2.safetensors",
    "open-sora-v2-dc-ae": "Open_Sora_v2_Video_DC_AE.safetensors",
    "flux1-dev": "flux1-dev.safetensors",
    "flux1-dev-ae": "flux1-dev-ae.safetensors",
    "hunyuan-vae": "hunyuan_vae.safetensors",
    "dc-ae": "F32T4C128_AE.safetensors",
}


def entries(params):
    return {f"param.{name}": LazyTensor.of(tensor) for name, tensor in params.items()}


def assert_bit_equal(found, expected):
    assert found.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(found[name].read(), expected[name].read())]
    assert not different


def test_image_model_becomes_the_converted_one_and_back(golden):
    original, converted = (entries(golden(name).params) for name in ("mmdit_image", "mmdit_image_converted"))
    there = change_layout(original, QKV.SPLIT)
    assert_bit_equal(there, converted)
    assert_bit_equal(change_layout(there, QKV.SPLIT), converted)
    assert_bit_equal(change_layout(there, QKV.FUSED), original)
    assert_bit_equal(change_layout(converted, QKV.FUSED), original)
    assert_bit_equal(change_layout(original, QKV.FUSED), original)


@pytest.mark.parametrize("name", RELEASED)
def test_released_tables(golden_json, name):
    shapes = {key: tuple(shape) for key, shape in golden_json("checkpoint_keys")[RELEASED[name]].items()}
    assert check(shapes, read_released(name)) == []
    found = identify(shapes)
    assert (found.name, found.prefix) == (name, "")
