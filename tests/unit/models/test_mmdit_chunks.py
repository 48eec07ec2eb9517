"""The MMDiT some tokens at a time: the same velocity, in far less memory."""

import pytest
import torch
from tiny_transformer import inputs, transformer
from torch import nn

from opensora_cli.memory.counting import TensorBytes
from opensora_cli.models.attention.torch_kernels import sdpa
from opensora_cli.models.mmdit.config import MMDiTConfig
from opensora_cli.models.mmdit.model import MMDiT

GIB = 2**30
TEXT, LATENTS = 5, 12
RELEASED_TOKENS = 76_032  # of 768px and 129 frames


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


# --- memory ----------------------------------------------------------------------------------------------------------


def peak_gib(*, depth, depth_single_blocks, chunk):
    """The most that one evaluation at full width makes; on the meta device, and with a fused attention."""
    config = MMDiTConfig(depth=depth, depth_single_blocks=depth_single_blocks, cond_embed=False)

    def fused(q, k, v):
        return torch.empty_like(q)

    with torch.device("meta"):
        model = MMDiT(config, attention=fused).bfloat16()
        latents, others = (
            torch.empty(1, RELEASED_TOKENS, 64, dtype=torch.bfloat16),
            {
                "position_ids_BN3": torch.empty(1, RELEASED_TOKENS, 3),
                "timesteps_B": torch.empty(1),
                "prompt_embeds_BLC": torch.empty(1, 512, 4096),
                "pooled_prompt_embeds_BV": torch.empty(1, 768),
            },
        )
    model.set_sequence_chunk(chunk)
    with torch.inference_mode(), TensorBytes() as counter:
        model(latents, **others)
    return counter.peak_bytes / GIB


@pytest.mark.parametrize(
    ("chunk", "most"), [pytest.param(2048, 0.1, marks=pytest.mark.slow), (8192, 0.25), (None, 3.7)]
)
def test_blocks_of_the_released_model_at_768px_hold_little_more_than_five_sequences(chunk, most):
    # The stream of tokens, q, k, v and what attention returns take 0.44 GiB each: that much is needed in any case.
    least = 5 * (RELEASED_TOKENS + 512) * 3072 * 2 / GIB
    assert least < peak_gib(depth=1, depth_single_blocks=1, chunk=chunk) < least + most
