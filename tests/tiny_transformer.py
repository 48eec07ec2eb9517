"""Transformers of any size with random weights, their inputs, and the gradients of a step."""

import torch
from torch import Tensor, nn

from opensora_cli.core.attention import AttentionFn
from opensora_cli.models.attention.torch_kernels import sdpa
from opensora_cli.models.mmdit.blocks import repeated_blocks
from opensora_cli.models.mmdit.config import MMDiTConfig
from opensora_cli.models.mmdit.model import MMDiT

OUTSIDE_BLOCKS = ("final_layer",)
"""What else keeps much between forward and backward."""


def transformer(
    *,
    depth: int = 2,
    single: int = 3,
    hidden: int = 32,
    heads: int = 4,
    mlp_ratio: float = 4.0,
    attention: AttentionFn = sdpa,
    **others: object,
) -> MMDiT:
    """Return a transformer in which every weight matters; `others` are fields of its configuration."""
    width = hidden // heads
    config = {
        "in_channels": 16,
        "vec_in_dim": 8,
        "context_in_dim": 12,
        "hidden_size": hidden,
        "num_heads": heads,
        "mlp_ratio": mlp_ratio,
        "depth": depth,
        "depth_single_blocks": single,
        "axes_dim": (width // 2, width // 4, width // 4),
    }
    model = MMDiT(MMDiTConfig.model_validate(config | others), attention=attention)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * weight.shape[-1] ** -0.5)
    return model


def inputs(model: MMDiT, *, batch: int = 2, tokens: int = 12, text: int = 5, seed: int = 0) -> dict[str, Tensor]:
    """Return the arguments of a forward pass, the latents as `packed_latents_BND`."""
    config, generator = model.config, torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    given = {
        "packed_latents_BND": draw(batch, tokens, config.in_channels),
        "position_ids_BN3": torch.randint(0, 8, (1, tokens, 3), generator=generator),
        "timesteps_B": torch.rand(batch, generator=generator),
        "prompt_embeds_BLC": draw(batch, text, config.context_in_dim),
        "pooled_prompt_embeds_BV": draw(batch, config.vec_in_dim),
    }
    if config.cond_embed:
        given["conditioning_BNK"] = draw(batch, tokens, config.conditioning_channels)
    if config.guidance_embed:
        given["embedded_guidance_B"] = torch.full((batch,), 4.0)
    return given


def loss_of(model: nn.Module, arguments: dict[str, Tensor]) -> Tensor:
    latents, *_ = arguments.values()
    others = {name: value for name, value in arguments.items() if name != "packed_latents_BND"}
    velocity: Tensor = model(latents, **others)
    return velocity.float().square().mean()


def gradients(model: nn.Module, arguments: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradient of every weight, and the loss as `loss`."""
    model.zero_grad()
    loss = loss_of(model, arguments)
    loss.backward()
    found = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    return {"loss": loss.detach(), **found}


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Compare gradients bit for bit, and see that there are some."""
    assert ours.keys() == theirs.keys()
    assert len(ours) > 1
    different = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert different == []
    assert all(value.any() for name, value in ours.items() if "weight" in name)


def linears_of_blocks(config: MMDiTConfig) -> tuple[str, ...]:
    """Return the paths in the model of all linear layers of the sharding plans, in the order of the blocks."""
    return tuple(
        f"{stack.module_path}.{index}.{linear.path}"
        for stack in repeated_blocks(config)
        for index in range(stack.count)
        for linear in stack.linears
    )
