"""Our norm for T5 against that of transformers."""

import pytest
import torch
import transformers
from closeness import assert_close
from torch import nn
from transformers.models.t5.modeling_t5 import T5LayerNorm

from opensora_cli.models.text.t5 import FusedRMSNorm, fuse_t5_norms

HALVES = [torch.bfloat16, torch.float16]
WIDTH = 64


def t5_norm(dtype):
    norm = T5LayerNorm(WIDTH, eps=3e-5).to(dtype)
    nn.init.normal_(norm.weight, mean=1.0, std=0.2, generator=torch.Generator().manual_seed(0))
    return norm


def numbers(dtype):
    return (torch.randn(5, 7, WIDTH, generator=torch.Generator().manual_seed(1)) * 30).to(dtype)


@pytest.mark.parametrize("given", [torch.float32, *HALVES])
@pytest.mark.parametrize("weight", [torch.float32, *HALVES])
def test_it_computes_what_t5_does(given, weight):
    theirs, x = t5_norm(weight), numbers(given)
    ours = FusedRMSNorm.from_t5_norm(theirs)
    expected, found = theirs(x), ours(x)
    assert found.dtype is expected.dtype
    # T5 rounds half precision before the scale too.
    step = torch.finfo(found.dtype).eps
    assert ((found.double() - expected.double()).abs() <= 2 * step * expected.double().abs() + 1e-7).all()


@pytest.mark.parametrize("dtype", HALVES)
def test_half_precision_is_rounded_once(dtype):
    norm, x = FusedRMSNorm.from_t5_norm(t5_norm(dtype)), numbers(dtype)
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + norm.eps).rsqrt() * norm.weight.double()
    difference = (norm(x).double() - exact).abs()
    assert difference.max() > 0
    assert (difference <= 0.51 * torch.finfo(dtype).eps * exact.abs()).all()


def test_sums_are_accumulated_in_fp32():
    # 4096 squares of 2 are far over what float16 holds at 60, and what bf16 can count in steps of.
    for dtype, value in ((torch.float16, 60.0), (torch.bfloat16, 1.0)):
        norm = FusedRMSNorm(nn.Parameter(torch.ones(8192, dtype=dtype)), eps=1e-6)
        assert torch.equal(norm(torch.full((1, 8192), value, dtype=dtype)), torch.ones(1, 8192, dtype=dtype))


def test_gradients():
    theirs, x = t5_norm(torch.float32), numbers(torch.float32)
    found = []
    for norm in (theirs, FusedRMSNorm.from_t5_norm(theirs)):
        given = x.clone().requires_grad_()
        found.append(torch.autograd.grad(norm(given).square().sum(), (given, norm.weight)))
    for expected, ours in zip(*found, strict=True):
        assert_close(ours, expected)


def test_all_norms_of_a_model():
    config = transformers.T5Config(vocab_size=8, d_model=16, d_kv=4, d_ff=8, num_layers=2, num_heads=4)
    model = transformers.T5EncoderModel(config).eval()
    ids, names = torch.arange(6)[None], model.state_dict().keys()
    with torch.no_grad():
        expected = model(input_ids=ids).last_hidden_state
        fuse_t5_norms(model)
        found = model(input_ids=ids).last_hidden_state
    assert sum(isinstance(module, FusedRMSNorm) for module in model.modules()) == 2 * 2 + 1
    assert not any(isinstance(module, T5LayerNorm) for module in model.modules())
    assert model.state_dict().keys() == names
    assert_close(found, expected)
