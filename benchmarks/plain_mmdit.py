"""Plain denoising on the weights of our transformer, the baseline of `speed.py`.

It follows the formulas of the reference implementation literally: three branches in one batch at every step, nothing
cached between evaluations, and nothing fused by hand.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from opensora_cli.engine.components.velocity import PromptEmbeds
from opensora_cli.models.mmdit.layers import (
    DoubleStreamBlock,
    Modulation,
    QueryKeyNorm,
    SingleStreamBlock,
    StreamAttention,
)
from opensora_cli.models.mmdit.model import MMDiT

Rotary = tuple[Tensor, Tensor]


def plain_forward(
    model: MMDiT,
    packed_latents_BND: Tensor,
    *,
    position_ids_BN3: Tensor,
    timesteps_B: Tensor,
    prompt_embeds_BLC: Tensor,
    pooled_prompt_embeds_BV: Tensor,
    conditioning_BNK: Tensor | None = None,
) -> Tensor:
    """Return the velocity like `MMDiT.forward`, for a model that is not guidance-distilled; times must be over 0."""
    latents = model.img_in(packed_latents_BND)
    if model.cond_in is not None:
        latents = latents + model.cond_in(conditioning_BNK)
    text = model.txt_in(prompt_embeds_BLC)
    times = _sinusoids(timesteps_B).to(packed_latents_BND.dtype)
    vector = model.time_in(times) + model.vector_in(pooled_prompt_embeds_BV)
    text_ids = torch.zeros(position_ids_BN3.shape[0], text.shape[1], 3, device=text.device)
    rotary = _rotary(torch.cat((text_ids, position_ids_BN3), dim=1), model.config.axes_dim, model.config.theta)
    for double in model.double_blocks:
        latents, text = _double(double, latents, text, vector, rotary)
    tokens = torch.cat((text, latents), dim=1)
    for single in model.single_blocks:
        tokens = _single(single, tokens, vector, rotary)
    final = model.final_layer
    shift, scale = final.adaLN_modulation(vector)[:, None].chunk(2, dim=-1)
    out: Tensor = final.linear(_modulated(tokens[:, text.shape[1] :], shift, scale))
    return (packed_latents_BND - out) / timesteps_B.view(-1, 1, 1) if model.config.predicts_data else out


def plain_denoise(
    model: MMDiT,
    packed_1ND: Tensor,
    embeds: PromptEmbeds,
    *,
    conditioning_1NK: Tensor,
    position_ids_1N3: Tensor,
    timesteps: Sequence[float],
    scales: Sequence[tuple[float, Tensor | float]],
) -> Tensor:
    """Return the latents after all steps; `scales` has the text and the image scale of each step."""
    rows = [1, 1, 0]  # negative prompt without and with the given frames, prompt
    prompts, pooled = embeds.prompt_embeds_2LC[rows], embeds.pooled_prompt_embeds_2V[rows]
    conditioning = torch.cat((torch.zeros_like(conditioning_1NK), conditioning_1NK, conditioning_1NK))
    for (t, t_next), (text_scale, image_scale) in zip(pairwise(timesteps), scales, strict=True):
        nothing, uncond, cond = plain_forward(
            model,
            packed_1ND.expand(3, -1, -1),
            position_ids_BN3=position_ids_1N3.expand(3, -1, -1),
            timesteps_B=torch.full((3,), t),
            prompt_embeds_BLC=prompts,
            pooled_prompt_embeds_BV=pooled,
            conditioning_BNK=conditioning,
        ).chunk(3)
        velocity = nothing + image_scale * (uncond - nothing) + text_scale * (cond - uncond)
        packed_1ND = packed_1ND + (t_next - t) * velocity
    return packed_1ND


def _sinusoids(times_B: Tensor, width: int = 256) -> Tensor:
    frequencies = 10000.0 ** -(torch.arange(width // 2, dtype=torch.float32, device=times_B.device) / (width // 2))
    angles = 1000.0 * times_B.float()[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def _rotary(ids_BN3: Tensor, axes_dim: Sequence[int], theta: float) -> Rotary:
    angles = [
        ids_BN3[..., axis, None].float()
        * theta ** -(torch.arange(0, dim, 2, dtype=torch.float32, device=ids_BN3.device) / dim)
        for axis, dim in enumerate(axes_dim)
    ]
    angles_B1NE = torch.cat(angles, dim=-1)[:, None]
    return angles_B1NE.cos(), angles_B1NE.sin()


def _rotated(x: Tensor, rotary: Rotary) -> Tensor:
    (cos, sin), (first, second) = rotary, x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def _heads(x_BNW: Tensor, width: int) -> Tensor:
    return x_BNW.unflatten(-1, (-1, width)).transpose(1, 2)


def _normed(x: Tensor, scale: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * scale


def _modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return (1 + scale) * functional.layer_norm(x, x.shape[-1:], eps=1e-6) + shift


def _modulation(modulation: Modulation, vector: Tensor) -> tuple[Tensor, ...]:
    return modulation.lin(functional.silu(vector))[:, None].chunk(3 * modulation.branches, dim=-1)


def _normed_heads(q: Tensor, k: Tensor, norm: QueryKeyNorm) -> tuple[Tensor, Tensor]:
    width = norm.query_norm.scale.shape[0]
    return _normed(_heads(q, width), norm.query_norm.scale), _normed(_heads(k, width), norm.key_norm.scale)


def _attention(q: Tensor, k: Tensor, v: Tensor, rotary: Rotary) -> Tensor:
    attended = functional.scaled_dot_product_attention(_rotated(q, rotary), _rotated(k, rotary), v)
    return attended.transpose(1, 2).flatten(2)


def _projected(stream: StreamAttention, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k = _normed_heads(stream.q_proj(x), stream.k_proj(x), stream.norm)
    return q, k, _heads(stream.v_proj(x), stream.head_dim)


def _mlp(mlp: nn.Sequential, x: Tensor) -> Tensor:
    widen, _, narrow = mlp
    out: Tensor = narrow(functional.gelu(widen(x), approximate="tanh"))
    return out


def _double(
    block: DoubleStreamBlock, latents: Tensor, text: Tensor, vector: Tensor, rotary: Rotary
) -> tuple[Tensor, Tensor]:
    shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = _modulation(block.img_mod, vector)
    t_shift, t_scale, t_gate, t_mlp_shift, t_mlp_scale, t_mlp_gate = _modulation(block.txt_mod, vector)
    of_latents = _projected(block.img_attn, _modulated(latents, shift, scale))
    of_text = _projected(block.txt_attn, _modulated(text, t_shift, t_scale))
    q, k, v = (torch.cat(pair, dim=2) for pair in zip(of_text, of_latents, strict=True))
    attended = _attention(q, k, v, rotary)
    length = text.shape[1]
    latents = latents + gate * block.img_attn.proj(attended[:, length:])
    latents = latents + mlp_gate * _mlp(block.img_mlp, _modulated(latents, mlp_shift, mlp_scale))
    text = text + t_gate * block.txt_attn.proj(attended[:, :length])
    text = text + t_mlp_gate * _mlp(block.txt_mlp, _modulated(text, t_mlp_shift, t_mlp_scale))
    return latents, text


def _single(block: SingleStreamBlock, tokens: Tensor, vector: Tensor, rotary: Rotary) -> Tensor:
    shift, scale, gate = _modulation(block.modulation, vector)
    x = _modulated(tokens, shift, scale)
    q, k = _normed_heads(block.q_proj(x), block.k_proj(x), block.norm)
    v, mlp = block.v_mlp(x).split((q.shape[1] * block.head_dim, block.linear2.in_features - tokens.shape[-1]), dim=-1)
    attended = _attention(q, k, _heads(v, block.head_dim), rotary)
    out: Tensor = block.linear2(torch.cat((attended, functional.gelu(mlp, approximate="tanh")), dim=-1))
    return tokens + gate * out
