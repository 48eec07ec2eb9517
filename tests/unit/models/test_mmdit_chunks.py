"""The MMDiT some tokens at a time: the same velocity (in less memory: tests/gpu/test_small_models.py)."""

import pytest
import torch
from tiny_transformer import inputs, transformer
from torch import nn

from opensora_cli.models.attention.torch_kernels import sdpa

TEXT, LATENTS = 5, 12


def run(model, given):
    """Return the velocity."""
    others = {name: tensor for name, tensor in given.items() if name != "packed_latents_BND"}
    return model(given["packed_latents_BND"], **others)


def widest_inputs(model):
    """Note how many tokens every linear layer of the blocks sees at once."""
    tokens = set()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and "_blocks." in name and "mod" not in name:
            module.register_forward_pre_hook(lambda module, args: tokens.add(args[0].shape[1]))
    return tokens


@pytest.mark.parametrize(("dtype", "tolerance", "mlp_ratio"), [(torch.float32, 1e-5, 4.0), (torch.float64, 1e-12, 1.5)])
def test_every_chunk_size_gives_the_same_velocity(dtype, tolerance, mlp_ratio):
    model = transformer(mlp_ratio=mlp_ratio).to(dtype)
    given = {name: tensor.to(dtype) for name, tensor in inputs(model).items()}
    tokens = widest_inputs(model)
    with torch.inference_mode():
        whole = run(model, given)
        assert tokens == {TEXT, LATENTS, TEXT + LATENTS}
        for size in (1, 4, TEXT, LATENTS, TEXT + LATENTS - 1, TEXT + LATENTS + 1):
            tokens.clear()
            model.set_sequence_chunk(size)
            chunked = run(model, given)
            assert max(tokens) == min(size, TEXT + LATENTS)
            assert (chunked - whole).abs().max() <= tolerance * whole.abs().max()
        model.set_sequence_chunk(None)
        assert torch.equal(run(model, given), whole)


@pytest.mark.parametrize("with_gradients", [False, True])
def test_a_share_of_the_text_may_be_empty(with_gradients):
    model = transformer()
    given = inputs(model, text=0)
    attended = []
    model.set_attention(lambda q, k, v: attended.append(k.shape[2]) or sdpa(q, k, v))
    with torch.set_grad_enabled(with_gradients):
        whole = run(model, given)
        model.set_sequence_chunk(4)
        chunked = run(model, given)
    assert set(attended) == {LATENTS}
    assert whole.abs().max() > 0
    assert (chunked - whole).abs().max() <= 1e-5 * whole.abs().max()
