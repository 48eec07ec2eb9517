"""The parts of the MMDiT: embeddings, modulation, and the double- and single-stream blocks.

The transformer follows Stable Diffusion 3 (Esser et al. 2024) and Flux: text and latent tokens have weights of their
own in double-stream blocks, share them in single-stream blocks, and attend to each other in both. Attribute names are
the key names of the released checkpoints.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from opensora_cli.models.attention import AttentionFn
from opensora_cli.models.mmdit.config import MMDiTConfig
from opensora_cli.models.mmdit.rotary import rotate

NORM_EPS = 1e-6
TIME_EMBEDDING_WIDTH = 256


def sinusoidal_embedding(
    values_B: Tensor, *, dtype: torch.dtype, width: int = TIME_EMBEDDING_WIDTH, max_period: float = 10000.0
) -> Tensor:
    """Embed one number per sample as cosines, then sines, of falling frequencies; (B, width) in `dtype`.

    The number is rounded to `dtype` before the factor 1000, because the released weights were trained so; the product
    and the angles stay in fp32.

    Args:
        values_B: times in 0..1, or guidance scales.
        dtype: the model's dtype.
        width: an even number of entries.
        max_period: the longest wavelength over 2π.
    """
    half = width // 2
    exponents = torch.arange(half, dtype=torch.float32, device=values_B.device) / half
    frequencies = torch.exp(-math.log(max_period) * exponents)
    angles = 1000.0 * values_B.to(dtype).float()[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype)


class VectorEmbedder(nn.Module):
    """A two-layer MLP from a vector of any kind to the modulation vector."""

    def __init__(self, in_features: int, hidden_size: int) -> None:
        super().__init__()
        self.in_layer = nn.Linear(in_features, hidden_size)
        self.out_layer = nn.Linear(hidden_size, hidden_size)

    def forward(self, x_BI: Tensor) -> Tensor:
        """Return (B, hidden_size)."""
        out: Tensor = self.out_layer(functional.silu(self.in_layer(x_BI)))
        return out


class ChunkModulation(NamedTuple):
    """Shift, scale and gate of one residual branch, each (B, 1, D)."""

    shift: Tensor
    scale: Tensor
    gate: Tensor

    def modulate(self, x_BND: Tensor) -> Tensor:
        """Normalise without affine, then scale and shift."""
        return modulated_norm(x_BND, shift=self.shift, scale=self.scale)


def modulated_norm(x_BND: Tensor, *, shift: Tensor, scale: Tensor) -> Tensor:
    """Return LayerNorm(x)·(1 + scale) + shift; the norm has no weights of its own."""
    return functional.layer_norm(x_BND, x_BND.shape[-1:], eps=NORM_EPS) * (1 + scale) + shift


class Modulation(nn.Module):
    """Projects the modulation vector to shift, scale and gate of residual branches (DiT, Peebles & Xie 2023)."""

    def __init__(self, hidden_size: int, *, branches: int) -> None:
        super().__init__()
        self.branches = branches
        self.lin = nn.Linear(hidden_size, 3 * branches * hidden_size)

    def forward(self, vector_BD: Tensor) -> list[ChunkModulation]:
        """Return one triple per branch, in the order of the branches."""
        chunks = self.lin(functional.silu(vector_BD))[:, None].chunk(3 * self.branches, dim=-1)
        return [ChunkModulation(*chunks[start : start + 3]) for start in range(0, len(chunks), 3)]


class HeadNorm(nn.Module):
    """RMS norm over the width of a head, in fp32."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(head_dim))

    def forward(self, x_BHND: Tensor) -> Tensor:
        """Return the normalised tensor in fp32."""
        normed: Tensor = functional.rms_norm(x_BHND.float(), [self.scale.shape[0]], self.scale.float(), eps=NORM_EPS)
        return normed


class QueryKeyNorm(nn.Module):
    """The norms of queries and keys."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.query_norm = HeadNorm(head_dim)
        self.key_norm = HeadNorm(head_dim)


def split_heads(x_BNW: Tensor, head_dim: int) -> Tensor:
    """(B, N, H·D) -> (B, H, N, D). H comes from the width, so that a shard with fewer heads runs unchanged."""
    batch, tokens, _ = x_BNW.shape
    return x_BNW.reshape(batch, tokens, -1, head_dim).transpose(1, 2)


def merge_heads(x_BHND: Tensor) -> Tensor:
    """(B, H, N, D) -> (B, N, H·D)."""
    return x_BHND.transpose(1, 2).flatten(2)


class StreamAttention(nn.Module):
    """The projections of one stream into and out of the joint attention."""

    def __init__(self, config: MMDiTConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=config.qkv_bias)
        self.norm = QueryKeyNorm(config.head_dim)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size)

    def qkv(self, x_BND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys (fp32, normalised, not yet rotated) and values, each (B, H, N, head_dim)."""
        q = self.norm.query_norm(split_heads(self.q_proj(x_BND), self.head_dim))
        k = self.norm.key_norm(split_heads(self.k_proj(x_BND), self.head_dim))
        return q, k, split_heads(self.v_proj(x_BND), self.head_dim)


def _mlp(config: MMDiTConfig) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(config.hidden_size, config.mlp_hidden_size),
        nn.GELU(approximate="tanh"),
        nn.Linear(config.mlp_hidden_size, config.hidden_size),
    )


class DoubleStreamBlock(nn.Module):
    """Latent and text tokens with weights of their own and one joint attention."""

    def __init__(self, config: MMDiTConfig, *, attention: AttentionFn) -> None:
        super().__init__()
        self.attention = attention
        self.img_mod = Modulation(config.hidden_size, branches=2)
        self.img_attn = StreamAttention(config)
        self.img_mlp = _mlp(config)
        self.txt_mod = Modulation(config.hidden_size, branches=2)
        self.txt_attn = StreamAttention(config)
        self.txt_mlp = _mlp(config)

    def forward(
        self, latents_BND: Tensor, text_BLD: Tensor, vector_BD: Tensor, rotary: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return the new latent and text tokens.

        Args:
            latents_BND: latent tokens.
            text_BLD: text tokens.
            vector_BD: the modulation vector.
            rotary: cosine and sine for the L + N tokens of the joint sequence, text first.
        """
        latent_attn_mod, latent_mlp_mod = self.img_mod(vector_BD)
        text_attn_mod, text_mlp_mod = self.txt_mod(vector_BD)
        text_qkv = self.txt_attn.qkv(text_attn_mod.modulate(text_BLD))
        latent_qkv = self.img_attn.qkv(latent_attn_mod.modulate(latents_BND))
        q, k, v = (torch.cat(pair, dim=2) for pair in zip(text_qkv, latent_qkv, strict=True))
        joined = merge_heads(self.attention(rotate(q, *rotary).to(v.dtype), rotate(k, *rotary).to(v.dtype), v))
        attended_text, attended_latents = torch.split(joined, [text_BLD.shape[1], latents_BND.shape[1]], dim=1)

        latents_BND = latents_BND + latent_attn_mod.gate * self.img_attn.proj(attended_latents)
        latents_BND = latents_BND + latent_mlp_mod.gate * self.img_mlp(latent_mlp_mod.modulate(latents_BND))
        text_BLD = text_BLD + text_attn_mod.gate * self.txt_attn.proj(attended_text)
        text_BLD = text_BLD + text_mlp_mod.gate * self.txt_mlp(text_mlp_mod.modulate(text_BLD))
        return latents_BND, text_BLD


class SingleStreamBlock(nn.Module):
    """Text and latent tokens in one sequence; attention and MLP run in parallel (ViT-22B, Dehghani et al. 2023)."""

    def __init__(self, config: MMDiTConfig, *, attention: AttentionFn) -> None:
        super().__init__()
        self.attention = attention
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.k_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.v_mlp = nn.Linear(config.hidden_size, config.hidden_size + config.mlp_hidden_size)
        self.linear2 = nn.Linear(config.hidden_size + config.mlp_hidden_size, config.hidden_size)
        self.norm = QueryKeyNorm(config.head_dim)
        self.modulation = Modulation(config.hidden_size, branches=1)

    def forward(self, tokens_BND: Tensor, vector_BD: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Return the new tokens of the joint sequence.

        Args:
            tokens_BND: text tokens, then latent tokens.
            vector_BD: the modulation vector.
            rotary: cosine and sine for all tokens.
        """
        mod: ChunkModulation = self.modulation(vector_BD)[0]
        x_BND = mod.modulate(tokens_BND)
        q_BNW, k_BNW = self.q_proj(x_BND), self.k_proj(x_BND)
        v_and_mlp = self.v_mlp(x_BND)
        v_BNW, mlp_BNF = torch.tensor_split(v_and_mlp, [q_BNW.shape[-1]], dim=-1)
        v = split_heads(v_BNW, self.head_dim)
        q = rotate(self.norm.query_norm(split_heads(q_BNW, self.head_dim)), *rotary).to(v.dtype)
        k = rotate(self.norm.key_norm(split_heads(k_BNW, self.head_dim)), *rotary).to(v.dtype)
        attended = merge_heads(self.attention(q, k, v))
        out: Tensor = self.linear2(torch.cat((attended, functional.gelu(mlp_BNF, approximate="tanh")), dim=-1))
        return tokens_BND + mod.gate * out


class FinalLayer(nn.Module):
    """Modulated norm and projection to the velocity of each packed token."""

    def __init__(self, config: MMDiTConfig) -> None:
        super().__init__()
        self.linear = nn.Linear(config.hidden_size, config.in_channels)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(config.hidden_size, 2 * config.hidden_size))

    def forward(self, latents_BND: Tensor, vector_BD: Tensor) -> Tensor:
        """Return (B, N, in_channels)."""
        shift, scale = self.adaLN_modulation(vector_BD)[:, None].chunk(2, dim=-1)
        velocity: Tensor = self.linear(modulated_norm(latents_BND, shift=shift, scale=scale))
        return velocity
