"""Our T5 and CLIP against those of transformers, on small random weights."""

import pytest
import torch
import transformers
from closeness import assert_close
from torch import nn
from transformers.models.t5.modeling_t5 import T5Attention, T5LayerNorm

from opensora_cli.checkpoint.load import load_into_module
from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.engine.components.architectures import on_meta
from opensora_cli.models.text.clip import ClipTextModel, clip_weights
from opensora_cli.models.text.sizes import ClipSizes, T5Sizes
from opensora_cli.models.text.t5 import FusedRMSNorm, T5Model, position_buckets, t5_weights

HALVES = [torch.bfloat16, torch.float16]
WIDTH = 64


def t5_norm(dtype):
    norm = T5LayerNorm(WIDTH, eps=3e-5).to(dtype)
    nn.init.normal_(norm.weight, mean=1.0, std=0.2, generator=torch.Generator().manual_seed(0))
    return norm


def like(theirs):
    """Return our norm with the weight of theirs."""
    norm = FusedRMSNorm(WIDTH, eps=theirs.variance_epsilon)
    norm.weight = theirs.weight
    return norm


def numbers(dtype):
    return (torch.randn(5, 7, WIDTH, generator=torch.Generator().manual_seed(1)) * 30).to(dtype)


class TestNorm:
    @pytest.mark.parametrize("given", [torch.float32, *HALVES])
    @pytest.mark.parametrize("weight", [torch.float32, *HALVES])
    def test_it_computes_what_t5_does(self, given, weight):
        theirs, x = t5_norm(weight), numbers(given)
        expected, found = theirs(x), like(theirs)(x)
        assert found.dtype is expected.dtype
        # T5 rounds half precision before the scale too.
        step = torch.finfo(found.dtype).eps
        assert ((found.double() - expected.double()).abs() <= 2 * step * expected.double().abs() + 1e-7).all()


@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (8, 20), (6, 5)])
def test_buckets_are_those_of_t5(num_buckets, max_distance):
    length = 300
    positions = torch.arange(length)
    expected = T5Attention._relative_position_bucket(
        positions[None] - positions[:, None], num_buckets=num_buckets, max_distance=max_distance
    )
    found = position_buckets(length, num_buckets=num_buckets, max_distance=max_distance, device=torch.device("cpu"))
    assert torch.equal(found[positions[None] - positions[:, None] + length - 1], expected)


def filled(model):
    """Return a model with weights that are all random, also where it starts with ones and zeros."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(mean=float(weight.ndim == 1), std=0.2, generator=generator)
    return model.eval()


def ours(model_class, sizes_class, theirs, folder, *, convert, dtype=torch.float32, keep_fp32=()):
    """Return our model of the sizes and weights that theirs writes."""
    theirs.save_pretrained(folder)
    with on_meta():
        model = model_class(sizes_class.of(folder))
    options = {"device": "cpu", "dtype": dtype, "keep_fp32": keep_fp32, "convert": convert}
    load_into_module(model, folder / "model.safetensors", **options)
    return model


T5S = [
    {"d_kv": 8, "d_ff": 24, "num_heads": 3},
    {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 11, "layer_norm_epsilon": 1e-2},
]
IDS = torch.arange(74).view(2, 37) % 31


@pytest.mark.parametrize("changes", T5S)
def test_states_of_t5(tmp_path, changes):
    config = {"vocab_size": 31, "d_model": 32, "d_kv": 4, "d_ff": 16, "num_layers": 3, "num_heads": 2, **changes}
    theirs = filled(transformers.T5EncoderModel(transformers.T5Config(**config, feed_forward_proj="gated-gelu")))
    model = ours(T5Model, T5Sizes, theirs, tmp_path, convert=t5_weights)
    assert model.state_dict().keys() == theirs.state_dict().keys() - {"encoder.embed_tokens.weight"}
    with torch.no_grad():
        assert_close(model(IDS), theirs(input_ids=IDS).last_hidden_state)


@pytest.mark.parametrize("dtype", HALVES)
def test_states_of_t5_in_half_precision(tmp_path, dtype):
    config = transformers.T5Config(
        vocab_size=31, d_model=64, d_kv=16, d_ff=96, num_layers=3, num_heads=4, feed_forward_proj="gated-gelu"
    )
    exact = filled(transformers.T5EncoderModel(config)).double()
    exact.float().save_pretrained(tmp_path)
    theirs = transformers.T5EncoderModel.from_pretrained(tmp_path, dtype=dtype).eval()
    keep_fp32 = ["*.wo.weight"] if dtype is torch.float16 else []
    model = ours(T5Model, T5Sizes, theirs, tmp_path, convert=t5_weights, dtype=dtype, keep_fp32=keep_fp32)
    with torch.no_grad():
        expected = exact.double()(input_ids=IDS).last_hidden_state
        found, plain = (states.double() - expected for states in (model(IDS), theirs(input_ids=IDS).last_hidden_state))
    assert model(IDS).dtype is dtype
    assert found.norm() <= 1.2 * plain.norm()
    assert found.norm() <= 32 * torch.finfo(dtype).eps * expected.norm()


CLIPS = [
    {"eos_token_id": 3},
    {"eos_token_id": 2},  # OpenAI's, which means the largest id
    {"eos_token_id": 30, "num_attention_heads": 1, "layer_norm_eps": 1e-2},  # no text has it
]


@pytest.mark.parametrize("changes", CLIPS)
def test_pooled_output_of_clip(tmp_path, changes):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = transformers.CLIPTextConfig(vocab_size=31, max_position_embeddings=40, **sizes | changes)
    theirs = filled(transformers.CLIPTextModel(config))
    model = ours(ClipTextModel, ClipSizes, theirs, tmp_path, convert=clip_weights)
    assert model.state_dict().keys() == theirs.state_dict().keys()
    ids = IDS.masked_fill(IDS == 30, 5)
    with torch.no_grad():
        expected = theirs(input_ids=ids)
        assert_close(model(ids), expected.pooler_output)
    assert not torch.equal(expected.pooler_output[0], expected.pooler_output[1])


@pytest.mark.parametrize(
    ("sizes_class", "config", "message"),
    [
        (T5Sizes, {"feed_forward_proj": "relu"}, "feed_forward_proj='relu': Input should be 'gated-gelu'"),
        (T5Sizes, {"relative_attention_max_distance": 8}, "32 buckets reach over a distance of 8"),
        (T5Sizes, {"layer_norm_epsilon": "small"}, "layer_norm_epsilon='small': Input should be a valid number"),
        (ClipSizes, {"hidden_act": "sine"}, "hidden_act='sine': Input should be 'quick_gelu'"),
        (ClipSizes, {"hidden_size": 30, "num_attention_heads": 4}, "4 heads do not divide a width of 30"),
        (ClipSizes, {"text_config": {"layer_norm_eps": -1}}, "layer_norm_eps=-1: Input should be greater"),
    ],
)
def test_what_a_configuration_cannot_mean_is_refused(tmp_path, sizes_class, config, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        sizes_class.from_config(config, path=tmp_path / "config.json")
    assert str(tmp_path) in caught.value.message
