"""Plain Hunyuan autoencoder with the same modules and weights, the baseline of `speed_vae.py`.

It uses torch's default layout, upsamples clips before convolving, and has a full attention mask of all positions.
"""

import torch
from torch import Tensor
from torch.nn import functional

from opensora_cli.models.vae.hunyuan import HunyuanVAE
from opensora_cli.models.vae.hunyuan_blocks import CausalConv3d, FrameCausalAttention, MidBlock, ResnetBlock, Upsample
from opensora_cli.models.vae.tiles import Tiling
from opensora_cli.models.vae.tiling import run_tiled


def plain_encode(vae: HunyuanVAE, pixels_BCTHW: Tensor, *, tiling: Tiling) -> Tensor:
    """Return the result of `vae.encode`."""

    def encode_tile(tile_BCTHW: Tensor) -> Tensor:
        encoder = vae.encoder
        hidden_BCTHW = _conv(encoder.conv_in, tile_BCTHW)
        for block in encoder.down_blocks:
            for resnet in block.resnets:
                hidden_BCTHW = _resnet(resnet, hidden_BCTHW)
            for downsampling in block.downsamplers:
                hidden_BCTHW = _conv(downsampling.conv, hidden_BCTHW)
        hidden_BCTHW = _mid(encoder.mid_block, hidden_BCTHW)
        return vae.quant_conv(_norm_silu_conv(encoder.conv_norm_out, encoder.conv_out, hidden_BCTHW))

    moments_BCTHW = run_tiled(encode_tile, pixels_BCTHW, grid=vae.config.tile_grids()[0], tiling=tiling)
    return vae.scale_latents(moments_BCTHW.chunk(2, dim=1)[0])


def plain_decode(vae: HunyuanVAE, latents_BCTHW: Tensor, *, tiling: Tiling) -> Tensor:
    """Return the result of `vae.decode`."""

    def decode_tile(tile_BCTHW: Tensor) -> Tensor:
        decoder = vae.decoder
        hidden_BCTHW = _mid(decoder.mid_block, _conv(decoder.conv_in, vae.post_quant_conv(tile_BCTHW)))
        for block in decoder.up_blocks:
            for resnet in block.resnets:
                hidden_BCTHW = _resnet(resnet, hidden_BCTHW)
            for upsampling in block.upsamplers:
                hidden_BCTHW = _upsample(upsampling, hidden_BCTHW)
        return _norm_silu_conv(decoder.conv_norm_out, decoder.conv_out, hidden_BCTHW)

    unscaled_BCTHW = vae.unscale_latents(latents_BCTHW)
    return run_tiled(decode_tile, unscaled_BCTHW, grid=vae.config.tile_grids()[1], tiling=tiling)


def _conv(layer: CausalConv3d, hidden_BCTHW: Tensor) -> Tensor:
    conv = layer.conv
    side = conv.kernel_size[0] // 2
    if side:
        padding = (side, side, side, side, conv.kernel_size[0] - 1, 0)
        hidden_BCTHW = functional.pad(hidden_BCTHW, padding, mode="replicate")
    return conv(hidden_BCTHW)


def _norm_silu_conv(norm: torch.nn.GroupNorm, conv: CausalConv3d, hidden_BCTHW: Tensor) -> Tensor:
    return _conv(conv, functional.silu(norm(hidden_BCTHW)))


def _resnet(block: ResnetBlock, hidden_BCTHW: Tensor) -> Tensor:
    residual_BCTHW = _norm_silu_conv(block.norm1, block.conv1, hidden_BCTHW)
    residual_BCTHW = _norm_silu_conv(block.norm2, block.conv2, residual_BCTHW)
    if block.conv_shortcut is not None:
        hidden_BCTHW = _conv(block.conv_shortcut, hidden_BCTHW)
    return hidden_BCTHW + residual_BCTHW


def _mid(block: MidBlock, hidden_BCTHW: Tensor) -> Tensor:
    first, last = block.resnets
    return _resnet(last, _attend(block.attentions[0], _resnet(first, hidden_BCTHW)))


def _attend(layer: FrameCausalAttention, hidden_BCTHW: Tensor) -> Tensor:
    _, _, frames, height, width = hidden_BCTHW.shape
    tokens_BNC = layer.group_norm(hidden_BCTHW).flatten(2).transpose(1, 2)
    frame_N = torch.arange(frames).repeat_interleave(height * width)
    mask_NN = tokens_BNC.new_zeros(len(frame_N), len(frame_N)).masked_fill_(frame_N > frame_N[:, None], float("-inf"))
    q, k, v = (project(tokens_BNC).unsqueeze(1) for project in (layer.to_q, layer.to_k, layer.to_v))
    out_BNC = layer.to_out[0](functional.scaled_dot_product_attention(q, k, v, attn_mask=mask_NN).squeeze(1))
    return hidden_BCTHW + out_BNC.transpose(1, 2).reshape(hidden_BCTHW.shape)


def _upsample(layer: Upsample, hidden_BCTHW: Tensor) -> Tensor:
    first_BCTHW = functional.interpolate(hidden_BCTHW[:, :, :1], scale_factor=(1, layer.space, layer.space))
    if hidden_BCTHW.shape[2] == 1:
        return _conv(layer.conv, first_BCTHW)
    rest_BCTHW = functional.interpolate(
        hidden_BCTHW[:, :, 1:].contiguous(), scale_factor=(layer.time, layer.space, layer.space)
    )
    upsampled_BCTHW = torch.cat((first_BCTHW, rest_BCTHW), dim=2)
    return _conv(layer.conv, upsampled_BCTHW)
