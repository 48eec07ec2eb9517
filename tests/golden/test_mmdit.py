"""The MMDiT against numbers and weights of the reference implementation."""

import pytest
import torch

from opensora_cli.models.mmdit.config import MMDiTConfig
from opensora_cli.models.mmdit.layout import converter
from opensora_cli.models.mmdit.model import MMDiT


def convert(file):
    config = file.sizes(MMDiTConfig)
    interleaved = not file.config["use_liger_rope"]
    return config, dict(converter(config, interleaved=interleaved)(file.params))


def velocity(file):
    config, weights = convert(file)
    model = MMDiT(config)
    model.load_state_dict(weights)
    given = file.inputs
    with torch.no_grad():
        return model(
            given["img"],
            position_ids_BN3=given["img_ids"],
            timesteps_B=given["timesteps"],
            prompt_embeds_BLC=given["txt"],
            pooled_prompt_embeds_BV=given["y_vec"],
            conditioning_BNK=given.get("cond"),
            embedded_guidance_B=given.get("guidance"),
        )


@pytest.mark.parametrize("name", ["mmdit_video", "mmdit_image"])
def test_velocity(golden, assert_close, name):
    file = golden(name)
    assert_close(velocity(file), file.outputs["velocity"])


def test_conversion_is_bit_for_bit(golden):
    ours = convert(golden("mmdit_image"))[1]
    expected = golden("mmdit_image_converted").params
    assert ours.keys() == expected.keys()
    different = [key for key in expected if not torch.equal(ours[key], expected[key])]
    assert not different


def test_our_own_layout_passes_unchanged(golden):
    file = golden("mmdit_image_converted")
    config = file.sizes(MMDiTConfig)
    passed = dict(converter(config)(file.params))
    assert passed.keys() == file.params.keys()
    assert all(passed[key] is file.params[key] for key in passed)
