"""Another layout for an MMDiT that has not been read."""

import pytest
import torch
from tiny_transformer import transformer
from tiny_weights import bit_equal, held, read

from opensora_cli.checkpoint.lazy import LazyTensor
from opensora_cli.core.choices import QKV, Rotary
from opensora_cli.core.exceptions import CheckpointError, RequestError
from opensora_cli.engine.ckpt.convert import change_layout
from opensora_cli.engine.ckpt.inspect import find_layout
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
@pytest.mark.parametrize("rotary", Rotary)
def test_loading_understands_every_layout(weights, model, qkv, rotary):
    entries, metadata = change_layout(model, {}, qkv=qkv, rotary=rotary)
    loaded = dict(converter(CONFIG, interleaved=rotary is Rotary.INTERLEAVED)(read(entries)))
    assert bit_equal(loaded, weights)
    assert metadata == {"osora.rotary": rotary.value}
    if (qkv is QKV.FUSED) == (rotary is Rotary.INTERLEAVED):
        assert bit_equal(dict(converter(CONFIG)(read(entries))), weights)


def test_what_is_not_asked_for_stays(model):
    fused, metadata = change_layout(model, {"format": "pt"}, qkv=QKV.FUSED)
    assert metadata == {"format": "pt", "osora.rotary": "half"}
    shapes = {name: entry.shape for name, entry in fused.items()}
    assert find_layout(shapes, metadata) == (QKV.FUSED, Rotary.HALF)
    # Without its metadata the same file is taken for one like Flux's.
    assert find_layout(shapes, {}) == (QKV.FUSED, Rotary.INTERLEAVED)


def test_names_may_have_a_prefix_and_other_tensors_stay(model):
    entries = {f"net.{name}": entry for name, entry in model.items()} | {
        "text.layers.0.q_proj.weight": LazyTensor.of(torch.ones(7, 5)),
        "step": LazyTensor.of(torch.tensor(3)),
    }
    changed, _ = change_layout(entries, {}, qkv=QKV.FUSED, rotary=Rotary.INTERLEAVED)
    assert "net.single_blocks.1.linear1.bias" in changed
    assert all(changed[name] is entries[name] for name in ("text.layers.0.q_proj.weight", "step"))


class TestRefused:
    def test_another_model(self):
        entries = {"encoder.q_proj.weight": LazyTensor.of(torch.ones(4, 4))}
        with pytest.raises(RequestError, match=r"--qkv=fused and --rotary=half is for an MMDiT") as caught:
            change_layout(entries, {}, qkv=QKV.FUSED, rotary=Rotary.HALF)
        assert caught.value.exit_code == 2
        assert find_layout({"encoder.q_proj.weight": (4, 4)}, {}) is None

    @pytest.mark.parametrize(
        ("name", "tensor", "qkv", "rotary"),
        [
            ("double_blocks.0.img_attn.k_proj.weight", torch.ones(36, 48), QKV.FUSED, None),
            ("single_blocks.0.v_mlp.weight", torch.ones(48, 48), QKV.FUSED, None),
            ("double_blocks.0.img_attn.q_proj.weight", torch.ones(50, 48), None, Rotary.INTERLEAVED),
            ("double_blocks.0.img_attn.qkv.weight", torch.ones(144, 48), QKV.SPLIT, None),
            ("double_blocks.0.img_attn.q_proj.weight_scale", torch.ones(()), QKV.FUSED, None),
        ],
    )
    def test_sizes_that_contradict_each_other(self, model, name, tensor, qkv, rotary):
        model[name] = LazyTensor.of(tensor)
        rotary = rotary or Rotary.HALF
        with pytest.raises(CheckpointError, match=r"do not fit the model's hidden_size=48 and head_dim=12") as caught:
            change_layout(model, {"osora.rotary": "half"}, qkv=qkv, rotary=rotary)
        assert name.rpartition(".")[0].rpartition(".")[0] in caught.value.message
