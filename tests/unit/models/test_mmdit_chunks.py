"""The MMDiT some tokens at a time: the same velocity, in far less memory."""

import pytest
import torch
from closeness import assert_close
from torch import nn

from opensora_cli.memory.counting import TensorBytes
from opensora_cli.memory.fp8_storage import store_in_fp8
from opensora_cli.models.attention.math import math
from opensora_cli.models.attention.sdpa import sdpa
from opensora_cli.models.mmdit import MMDiT, MMDiTConfig
from opensora_cli.models.mmdit.chunks import joined, over_tokens, spans

GIB = 2**30
TEXT, LATENTS = 5, 12
RELEASED_TOKENS = 76_032  # of 768px and 129 frames


def small_config(**changes):
    sizes = {
        "in_channels": 8,
        "vec_in_dim": 6,
        "context_in_dim": 10,
        "hidden_size": 48,
        "num_heads": 4,
        "mlp_ratio": 2.0,
        "depth": 2,
        "depth_single_blocks": 2,
        "axes_dim": (4, 4, 4),
        "cond_embed": False,
    }
    return MMDiTConfig(**(sizes | changes))


def filled(config, *, dtype=torch.float32):
    """A model whose every weight matters."""
    model = MMDiT(config).to(dtype)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
    return model


def given(config, *, dtype=torch.float32, latents=LATENTS, text=TEXT, batch=2):
    generator = torch.Generator().manual_seed(1)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=dtype)

    return draw(batch, latents, config.in_channels), {
        "position_ids_BN3": torch.arange(3 * latents).view(1, latents, 3),
        "timesteps_B": torch.linspace(0.9, 0.1, batch),
        "prompt_embeds_BLC": draw(batch, text, config.context_in_dim),
        "pooled_prompt_embeds_BV": draw(batch, config.vec_in_dim),
    }


def widest_inputs(model):
    """Note how many tokens every linear layer of the blocks sees at once."""
    tokens = set()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and "_blocks." in name and "mod" not in name:
            module.register_forward_pre_hook(lambda module, args: tokens.add(args[0].shape[1]))
    return tokens


@pytest.mark.parametrize(
    ("dtype", "tolerance", "changes"),
    [(torch.float32, 1e-5, {}), (torch.float64, 1e-12, {"qkv_bias": False, "mlp_ratio": 1.5})],
)
def test_every_chunk_size_gives_the_same_velocity(dtype, tolerance, changes):
    config = small_config(**changes)
    model = filled(config, dtype=dtype)
    latents, others = given(config, dtype=dtype)
    tokens = widest_inputs(model)
    with torch.inference_mode():
        whole = model(latents, **others)
        assert tokens == {TEXT, LATENTS, TEXT + LATENTS}
        for size in range(1, TEXT + LATENTS + 2):
            tokens.clear()
            model.set_sequence_chunk(size)
            chunked = model(latents, **others)
            assert max(tokens) == min(size, TEXT + LATENTS)
            assert (chunked - whole).abs().max() <= tolerance * whole.abs().max()
        model.set_sequence_chunk(None)
        assert torch.equal(model(latents, **others), whole)


@pytest.mark.parametrize("with_gradients", [False, True])
def test_a_share_of_the_text_may_be_empty(with_gradients):
    config = small_config()
    model = filled(config)
    latents, others = given(config, text=0)
    attended = []
    model.set_attention(lambda q, k, v: attended.append(k.shape[2]) or sdpa(q, k, v))
    with torch.set_grad_enabled(with_gradients):
        whole = model(latents, **others)
        model.set_sequence_chunk(4)
        chunked = model(latents, **others)
    assert set(attended) == {LATENTS}
    assert whole.abs().max() > 0
    assert (chunked - whole).abs().max() <= 1e-5 * whole.abs().max()


def test_chunks_meet_autocast_as_the_whole_does():
    config = small_config()
    model = filled(config)
    latents, others = given(config)
    streams = []
    for block in model.single_blocks:
        block.register_forward_hook(lambda module, args, out: streams.append(out.dtype))
    with torch.no_grad():
        exact = model(latents, **others)
        with torch.autocast("cpu", torch.bfloat16):
            whole = model(latents, **others)
            model.set_sequence_chunk(4)
            chunked = model(latents, **others)
    assert set(streams) == {torch.float32}
    rounding = (whole - exact).abs().max()
    assert rounding > 1e-3
    assert (chunked - whole).abs().max() < rounding


def test_gradients_are_computed_of_the_whole():
    config = small_config()
    model = filled(config)
    latents, others = given(config)

    def gradients():
        model.zero_grad()
        model(latents, **others).square().sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    plain = gradients()
    model.set_sequence_chunk(2)
    tokens = widest_inputs(model)
    assert all(map(torch.equal, gradients(), plain))
    assert min(tokens) == TEXT


def test_a_shard_with_fewer_heads_runs_in_chunks():
    config = small_config()
    block = filled(config).single_blocks[0]
    # As a rank of two holds them: the first half of q, k, v and the MLP.
    for linear, rows in ((block.q_proj, [48]), (block.k_proj, [48]), (block.v_mlp, [48, 96])):
        for name in ("weight", "bias"):
            kept = [part.chunk(2)[0] for part in getattr(linear, name).data.split(rows)]
            setattr(linear, name, nn.Parameter(torch.cat(kept)))
    halves = [part.chunk(2, dim=1)[0] for part in block.linear2.weight.data.split([48, 96], dim=1)]
    block.linear2.weight = nn.Parameter(torch.cat(halves, dim=1))
    tokens, vector = torch.randn(1, 9, 48, generator=torch.Generator().manual_seed(0)), torch.ones(1, 48)
    rotary = (torch.ones(1, 1, 9, 6), torch.zeros(1, 1, 9, 6))
    with torch.no_grad():
        whole = block(tokens, vector, rotary)
        block.chunk_tokens = 4
        assert_close(block(tokens, vector, rotary), whole)


def test_weights_in_8_bits_run_in_chunks():
    config = small_config()
    model = filled(config)
    for block in (*model.double_blocks, *model.single_blocks):
        store_in_fp8(block)
    latents, others = given(config)
    with torch.no_grad():
        whole = model(latents, **others)
        model.set_sequence_chunk(4)
        assert_close(model(latents, **others), whole)


@pytest.mark.parametrize("tokens", [0, -1])
def test_a_chunk_holds_a_token(tokens):
    with pytest.raises(ValueError, match=f"tokens={tokens} must be at least 1"):
        MMDiT(small_config()).set_sequence_chunk(tokens)


def test_spans_cut_without_a_gap():
    assert list(spans(7, 3)) == [slice(0, 3), slice(3, 6), slice(6, 7)]
    assert list(spans(7, None)) == list(spans(7, 9)) == [slice(0, 7)]


def test_pieces_are_written_before_the_next_is_computed():
    alive = []

    def double(chunk):
        alive.append(counter.live_bytes)
        return chunk * 2

    whole = torch.arange(800.0).view(1, 100, 8)
    with torch.no_grad(), TensorBytes() as counter:
        result = over_tokens(double, whole, size=10)
    assert torch.equal(result, whole * 2)
    # The result and, until it is written, one chunk.
    assert alive == [0] + [result.nbytes] * 9
    assert counter.peak_bytes == result.nbytes + result.nbytes // 10


def test_joining_records_gradients():
    parts = [torch.ones(1, length, requires_grad=True) for length in (2, 3)]
    (whole,) = joined(((part,) for part in parts), length=5, dim=1)
    (whole * torch.arange(5.0)).sum().backward()
    assert [part.grad.tolist() for part in parts] == [[[0.0, 1.0]], [[2.0, 3.0, 4.0]]]


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


def test_blocks_of_the_released_model_at_768px_hold_little_more_than_five_sequences():
    # The stream of tokens, q, k, v and what attention returns take 0.44 GiB each: that much is needed in any case.
    least = 5 * (RELEASED_TOKENS + 512) * 3072 * 2 / GIB
    sizes = {"depth": 1, "depth_single_blocks": 2}
    assert least < peak_gib(**sizes, chunk=2048) < least + 0.1
    assert least < peak_gib(**sizes, chunk=8192) < least + 0.25
    assert peak_gib(**sizes, chunk=None) < 5.8


def test_the_reference_attention_takes_some_queries_at_a_time(monkeypatch):
    q, k, v = torch.randn(3, 2, 4, 50, 8, generator=torch.Generator().manual_seed(0))
    whole = math(q.requires_grad_(), k, v)
    assert whole.requires_grad
    matrix_bytes = 2 * 4 * 50 * 50 * 4
    monkeypatch.setattr("opensora_cli.models.attention.math._LARGEST_MATRIX", 2 * 4 * 50 * 3)
    with torch.no_grad(), TensorBytes() as counter:
        blockwise = math(q, k, v)
    assert_close(blockwise, whole)
    assert counter.peak_bytes < 2 * blockwise.nbytes + 4 * matrix_bytes * 3 / 50
