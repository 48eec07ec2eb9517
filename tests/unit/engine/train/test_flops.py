"""FLOPs of a training step, against a count of the products of a transformer."""

import pytest
import torch
from tiny_transformer import inputs, transformer
from torch.utils.flop_counter import FlopCounterMode

from opensora_cli.core.attention import AttentionFn
from opensora_cli.engine.train.lora import add_lora
from opensora_cli.engine.train.predicted import training_flops
from opensora_cli.settings.train_sections import LoraSettings

BATCH, TOKENS, TEXT = 2, 7, 4


def products(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention in two products, which are counted on every device."""
    return torch.softmax(q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5, dim=-1) @ v


def counted(model: torch.nn.Module) -> tuple[int, int]:
    """Return the operations of a forward pass, and of forward and backward."""
    given = inputs(model, batch=BATCH, tokens=TOKENS, text=TEXT)
    with FlopCounterMode(display=False) as forward:
        velocity = model(given.pop("packed_latents_BND"), **given)
    with FlopCounterMode(display=False) as backward:
        velocity.square().mean().backward()
    return forward.get_total_flops(), forward.get_total_flops() + backward.get_total_flops()


def model_with(attention: AttentionFn, **sizes: int) -> torch.nn.Module:
    model = transformer(**sizes)
    model.set_attention(attention)
    return model


@pytest.mark.parametrize(("depth", "single"), [(1, 1), (2, 0), (1, 3)])
def test_forward_is_a_third_of_it(depth: int, single: int) -> None:
    model = model_with(products, depth=depth, single=single, hidden=40, heads=5, mlp_ratio=0.625)
    forward, both = counted(model)
    flops = BATCH * training_flops(model.config, TOKENS, TEXT)
    assert flops == 3 * forward
    # The first layers' inputs need no gradient, and nothing looks at what the last double block makes of the text.
    assert 0.75 * flops < both <= flops


def test_frozen_weights_need_no_gradient() -> None:
    pytest.importorskip("peft")
    model = model_with(products, depth=2, single=2, hidden=40, heads=5, mlp_ratio=4)
    config = model.config
    add_lora(model, LoraSettings(rank=1), seed=0)
    _, both = counted(model)
    flops = BATCH * training_flops(config, TOKENS, TEXT, is_frozen=True)
    assert flops < BATCH * training_flops(config, TOKENS, TEXT)
    assert both == pytest.approx(flops, rel=0.15)
