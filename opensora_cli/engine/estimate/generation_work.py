"""Work of a GPU for each stage of a generation, counted on outlines."""

from functools import lru_cache, partial
from math import prod
from typing import Any, cast

import torch

from opensora_cli.core.device_names import GPU
from opensora_cli.core.linear_products import LinearProducts
from opensora_cli.engine.components.autoencoders import new_autoencoder, vae_tiling
from opensora_cli.engine.estimate.fake_tensors import HOST, Repeated, fake_device, fake_module
from opensora_cli.engine.estimate.transformer import FakeSequenceParallel, fake_transformer
from opensora_cli.engine.estimate.work import Work, WorkCounter
from opensora_cli.models.mmdit.config import MMDiTConfig
from opensora_cli.models.text.sizes import ClipSizes, T5Sizes
from opensora_cli.parallel.shares import ExchangePlan, MeshShape
from opensora_cli.settings.components import VAESettings

_ALONE, _DIRECT = MeshShape(), ExchangePlan()


@lru_cache(maxsize=64)
def evaluation_work(
    config: MMDiTConfig,
    video_tokens: int,
    text_tokens: int,
    dtype: torch.dtype,
    mesh: MeshShape = _ALONE,
    exchange: ExchangePlan = _DIRECT,
    linear: LinearProducts = LinearProducts.EXACT,
) -> Work:
    """Return the work of one evaluation of the transformer for one clip, on the rank with the largest share. `linear`
    is the kind of products in its linear layers."""

    def work(depth: int, depth_single_blocks: int) -> Work:
        changed = config.replace({"depth": depth, "depth_single_blocks": depth_single_blocks})
        with fake_device(GPU) as device:
            empty = partial(torch.empty, dtype=dtype, device=device)
            transformer = fake_transformer(
                changed, device=device, dtype=dtype, mesh=mesh, exchange=exchange, linear=linear
            )
            counter = WorkCounter()
            with counter:
                FakeSequenceParallel(transformer, mesh)(
                    empty(1, video_tokens, config.in_channels),
                    position_ids_BN3=torch.empty(1, video_tokens, 3, device=device),
                    timesteps_B=torch.empty(1, device=device),
                    prompt_embeds_BLC=empty(1, text_tokens, config.context_in_dim),
                    pooled_prompt_embeds_BV=empty(1, config.vec_in_dim),
                    conditioning_BNK=empty(1, video_tokens, config.conditioning_channels)
                    if config.cond_embed
                    else None,
                    embedded_guidance_B=torch.empty(1, device=device) if config.guidance_embed else None,
                )
            return counter.work

    outside = work(0, 0)
    double = (work(1, 0) - outside) * config.depth if config.depth else Work()
    single = (work(0, 1) - outside) * config.depth_single_blocks if config.depth_single_blocks else Work()
    return outside + double + single


@lru_cache(maxsize=64)
def decoding_work(settings: VAESettings, latent_shape: tuple[int, int, int, int], dtype: torch.dtype) -> Work:
    """Return the work of decoding the latents (C, T, H, W) of one clip, in the tiles of the settings."""
    with fake_device(GPU) as device:
        vae = fake_module(lambda: new_autoencoder(settings), device=device, dtype=dtype)
        counter = WorkCounter()
        vae.decoder = cast(Any, Repeated(vae.decoder, work=counter))
        with counter:
            latents_1CTHW = torch.empty(1, *latent_shape, dtype=dtype, device=device)
            for _ in vae.decode_pieces(latents_1CTHW, tiling=vae_tiling(settings), canvas=HOST):
                pass
        return counter.work


@lru_cache(maxsize=64)
def encoding_work(settings: VAESettings, num_frames: int, height: int, width: int, dtype: torch.dtype) -> Work:
    """Return the work of encoding one clip."""
    with fake_device(GPU) as device:
        vae = fake_module(lambda: new_autoencoder(settings), device=device, dtype=dtype)
        counter = WorkCounter()
        vae.encoder = cast(Any, Repeated(vae.encoder, work=counter))
        with counter:
            vae.encode(
                torch.empty(1, 3, num_frames, height, width, dtype=dtype, device=device), tiling=vae_tiling(settings)
            )
        return counter.work


def text_work(t5: T5Sizes, clip: ClipSizes, lengths: tuple[int, int], itemsize: int, *, prompts: int = 2) -> Work:
    """Return the work of encoding prompts of `lengths` tokens in T5 and CLIP, by arithmetic like their memory.

    The weights are read once for each prompt.
    """
    weights = t5.num_layers * sum(t5.layer_weights.values()), clip.parameters
    tokens = lengths[0], min(lengths[1], clip.max_length)
    widths = t5.num_layers * t5.num_heads * t5.d_kv, clip.num_layers * clip.hidden_size
    return Work(
        product_flops=prompts * 2 * sum(map(prod, zip(weights, tokens, strict=True))),
        attention_flops=prompts * sum(4 * length**2 * width for length, width in zip(tokens, widths, strict=True)),
        product_bytes=prompts * sum(weights) * itemsize,
    )
