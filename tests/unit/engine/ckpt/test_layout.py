"""Another layout for an MMDiT that has not been read."""

import pytest
import torch
from tiny_transformer import transformer
from tiny_weights import bit_equal, held, read

from opensora_cli.checkpoint.lazy import LazyTensor
from opensora_cli.core.choices import QKV
from opensora_cli.core.exceptions import CheckpointError, RequestError
from opensora_cli.engine.ckpt.convert import change_layout
from opensora_cli.models.mmdit.layout import converter

MODEL = transformer(depth=1, single=2, hidden=48, mlp_ratio=2.0, axes_dim=(4, 4, 4))
CONFIG = MODEL.config


@pytest.fixture
def weights():
    return MODEL.state_dict()


@pytest.fixture
def model(weights):
    return held(weights)


@pytest.mark.parametrize("qkv", QKV)
def test_loading_understands_every_layout(weights, model, qkv):
    assert bit_equal(dict(converter(CONFIG)(read(change_layout(model, qkv)))), weights)


def test_names_may_have_a_prefix_and_other_tensors_stay(model):
    entries = {f"net.{name}": entry for name, entry in model.items()} | {
        "text.layers.0.q_proj.weight": LazyTensor.of(torch.ones(7, 5)),
        "step": LazyTensor.of(torch.tensor(3)),
    }
    changed = change_layout(entries, QKV.FUSED)
    assert "net.single_blocks.1.linear1.bias" in changed
    assert all(changed[name] is entries[name] for name in ("text.layers.0.q_proj.weight", "step"))


class TestRefused:
    def test_another_model(self):
        entries = {"encoder.q_proj.weight": LazyTensor.of(torch.ones(4, 4))}
        with pytest.raises(RequestError, match=r"--qkv=fused is for an MMDiT") as caught:
            change_layout(entries, QKV.FUSED)
        assert caught.value.exit_code == 2

    @pytest.mark.parametrize(
        ("name", "tensor", "qkv"),
        [
            ("double_blocks.0.img_attn.k_proj.weight", torch.ones(36, 48), QKV.FUSED),
            ("single_blocks.0.v_mlp.weight", torch.ones(48, 48), QKV.FUSED),
            ("double_blocks.0.img_attn.q_proj.weight", torch.ones(50, 48), QKV.FUSED),
            ("double_blocks.0.img_attn.qkv.weight", torch.ones(144, 48), QKV.SPLIT),
            ("double_blocks.0.img_attn.q_proj.weight_scale", torch.ones(()), QKV.FUSED),
        ],
    )
    def test_sizes_that_contradict_each_other(self, model, name, tensor, qkv):
        model[name] = LazyTensor.of(tensor)
        with pytest.raises(CheckpointError, match=r"do not fit the model's hidden_size=48 and head_dim=12") as caught:
            change_layout(model, qkv)
        assert name.rpartition(".")[0].rpartition(".")[0] in caught.value.message
