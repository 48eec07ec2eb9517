"""Parts of the MMDiT: modulation, and the double- and single-stream blocks.

The transformer follows Stable Diffusion 3 (Esser et al. 2024) and Flux: text and latent tokens have weights of their
own in double-stream blocks, share them in single-stream blocks, and attend to each other in both. Attribute names are
the key names of the released checkpoints.

All layers except attention treat tokens separately, so that norms, projections and MLPs can compute a long sequence in
chunks, whose intermediate tensors are small. The results match up to rounding.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from opensora_cli.core.attention import AttentionFn
from opensora_cli.core.device import is_accelerator
from opensora_cli.models.linears import features_of
from opensora_cli.models.mmdit.config import MMDiTConfig

Rotary = tuple[Tensor, Tensor]
"""Cosine and sine of every token's angles, each (B, 1, N, head_dim/2)."""

NORM_EPS = 1e-6


class ChunkModulation(NamedTuple):
    """Shift, scale and gate of one residual branch, each (B, 1, D)."""

    shift: Tensor
    scale: Tensor
    gate: Tensor

    def modulate(self, x_BND: Tensor) -> Tensor:
        """Normalize without affine parameters, then scale and shift."""
        return modulated_norm(x_BND, shift=self.shift, scale=self.scale)


def modulated_norm(x_BND: Tensor, *, shift: Tensor, scale: Tensor) -> Tensor:
    """Return LayerNorm(x)·(1 + scale) + shift, in the dtype of x; the norm has no weights."""
    # On a GPU, but not on a CPU, autocast would return twice the bytes, in fp32, in which kernels sum anyway.
    plain = torch.autocast(x_BND.device.type, enabled=False) if is_accelerator(x_BND.device) else nullcontext()
    with plain:
        normed_BND = functional.layer_norm(x_BND, x_BND.shape[-1:], eps=NORM_EPS)
    return torch.addcmul(shift, normed_BND, 1 + scale)


ModulationInput = Tensor | Mapping[nn.Module, Tensor]
"""Modulation vector (B, D), or precomputed projections of it by layer."""


def modulation_values(layer: nn.Module, vector: ModulationInput) -> Tensor:
    """Return the projection of the modulation vector by `layer`, (B, its outputs)."""
    if not isinstance(vector, Tensor):
        return vector[layer]
    values: Tensor = layer(functional.silu(vector))
    return values


class Modulation(nn.Module):
    """Projection of the modulation vector to shift, scale and gate of residual branches (DiT, Peebles & Xie 2023)."""

    def __init__(self, hidden_size: int, *, branches: int) -> None:
        super().__init__()
        self.branches = branches
        self.lin = nn.Linear(hidden_size, 3 * branches * hidden_size)

    def forward(self, vector: ModulationInput) -> list[ChunkModulation]:
        """Return one triple per branch, in the order of the branches."""
        chunks = modulation_values(self.lin, vector)[:, None].chunk(3 * self.branches, dim=-1)
        return [ChunkModulation(*chunks[start : start + 3]) for start in range(0, len(chunks), 3)]


def modulation_width(config: MMDiTConfig) -> int:
    """Return the number of shift, scale and gate values of one evaluation in all layers together."""
    return (12 * config.depth + 3 * config.depth_single_blocks + 2) * config.hidden_size


class HeadNorm(nn.Module):
    """RMS norm over the width of a head, in fp32."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(head_dim))

    def forward(self, x_BHND: Tensor) -> Tensor:
        """Return the normalized tensor in fp32."""
        normed: Tensor = functional.rms_norm(x_BHND.float(), [self.scale.shape[0]], self.scale.float(), eps=NORM_EPS)
        return normed


class QueryKeyNorm(nn.Module):
    """Norms of queries and keys."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.query_norm = HeadNorm(head_dim)
        self.key_norm = HeadNorm(head_dim)


def split_heads(x_BNW: Tensor, head_dim: int) -> Tensor:
    """(B, N, H·D) -> (B, H, N, D). H comes from the width, so that a shard with fewer heads runs unchanged."""
    return x_BNW.view(*x_BNW.shape[:-1], x_BNW.shape[-1] // head_dim, head_dim).transpose(1, 2)


def rotated_heads(x_BNW: Tensor, norm: HeadNorm, rotary: Rotary) -> Tensor:
    """Split queries or keys into heads, normalize and rotate them in fp32: (B, N, H·D) -> (B, H, N, D)."""
    if torch.is_grad_enabled():
        return rotate(norm(split_heads(x_BNW, norm.scale.shape[0])), *rotary).to(x_BNW.dtype)
    return _rotated_heads(x_BNW, norm.scale.float(), rotary)


def _rotated_heads(x_BNW: Tensor, scale_D: Tensor, rotary: Rotary) -> Tensor:
    """Compute `rotated_heads` with half the memory traffic, and without fp32 copies of other dtypes.

    A rotation keeps lengths and is linear. So it comes first, and then the division by the root mean square.
    """
    width = scale_D.shape[0]
    x_BNHD = x_BNW.view(*x_BNW.shape[:-1], x_BNW.shape[-1] // width, width)
    x_BNH2E = x_BNHD.view(*x_BNHD.shape[:-1], 2, width // 2)
    # This square root belongs to the mean below.
    scale_2E = (scale_D * math.sqrt(width)).view(2, width // 2)
    cos_BN12E, sin_BN12E = (each.transpose(1, 2)[..., None, :] * scale_2E for each in rotary)
    rotated_BNH2E = x_BNH2E * cos_BN12E
    rotated_BNH2E[..., 0, :].addcmul_(x_BNH2E[..., 1, :], sin_BN12E[..., 1, :], value=-1)
    rotated_BNH2E[..., 1, :].addcmul_(x_BNH2E[..., 0, :], sin_BN12E[..., 0, :])
    rotated_BNHD = rotated_BNH2E.flatten(-2)
    lengths_BNH1 = torch.linalg.vector_norm(x_BNHD, dim=-1, keepdim=True, dtype=rotated_BNHD.dtype)
    rotated_BNHD.mul_(lengths_BNH1.square_().add_(width * NORM_EPS).rsqrt_())
    return rotated_BNHD.to(x_BNW.dtype).transpose(1, 2)


def cut_rotary(rotary: Rotary, span: slice) -> Rotary:
    """Return the cosine and sine of some tokens."""
    cos, sin = rotary
    return cut(cos, span, dim=2), cut(sin, span, dim=2)


class StreamAttention(nn.Module):
    """Projections of one stream into and out of the joint attention."""

    def __init__(self, config: MMDiTConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=config.qkv_bias)
        self.norm = QueryKeyNorm(config.head_dim)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size)

    def qkv(self, x_BND: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys (normalized and rotated in fp32) and values, each (B, H, N, head_dim)."""
        q = rotated_heads(self.q_proj(x_BND), self.norm.query_norm, rotary)
        k = rotated_heads(self.k_proj(x_BND), self.norm.key_norm, rotary)
        return q, k, split_heads(self.v_proj(x_BND), self.head_dim)


_GELU_VALUES = 2**18
"""Number of values that stay in a core's cache between two operations."""


def tanh_gelu(x_BNF: Tensor) -> Tensor:
    """Return GELU by its approximation with tanh; without gradients, in the memory of the input."""
    if torch.is_grad_enabled():
        return functional.gelu(x_BNF, approximate="tanh")
    if x_BNF.device.type == "cpu" and x_BNF.dtype is torch.float32 and not torch.compiler.is_compiling():
        tokens = max(1, _GELU_VALUES * x_BNF.shape[-2] // max(1, x_BNF.numel()))
        pieces = torch.split(x_BNF, tokens, dim=-2)
        # Without values, one piece shows the memory of all.
        for piece_BNF in pieces[:1] if x_BNF.is_meta else pieces:
            _tanh_gelu_by_sigmoid(piece_BNF)
        return x_BNF
    out: Tensor = torch.ops.aten.gelu_(x_BNF, approximate="tanh")
    return out


def _tanh_gelu_by_sigmoid(x: Tensor) -> None:
    """Compute `tanh_gelu` in place: (1 + tanh(u)) / 2 is sigmoid(2u), which takes a third of the time on a CPU."""
    factor = 2 * math.sqrt(2 / math.pi)
    twice_u = torch.addcmul(x.new_full((), factor), x, x, value=0.044715 * factor).mul_(x)
    x.mul_(twice_u.sigmoid_())


class TanhGELU(nn.GELU):
    """Module of `tanh_gelu` for inputs without other uses."""

    def forward(self, input: Tensor) -> Tensor:
        return tanh_gelu(input)


def _mlp(config: MMDiTConfig) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(config.hidden_size, config.mlp_hidden_size),
        TanhGELU(),
        nn.Linear(config.mlp_hidden_size, config.hidden_size),
    )


class DoubleStreamBlock(nn.Module):
    """Block in which latent and text tokens have separate weights and one joint attention."""

    chunk_tokens: int | None = None

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
        self, latents_BND: Tensor, text_BLD: Tensor, vector: ModulationInput, rotary: Rotary
    ) -> tuple[Tensor, Tensor]:
        """Return the new latent and text tokens; `rotary` covers the L + N tokens of the joint sequence, text first."""
        latent_mods, text_mods = self.img_mod(vector), self.txt_mod(vector)
        lengths = [text_BLD.shape[1], latents_BND.shape[1]]
        rotary_of_text = cut_rotary(rotary, slice(0, lengths[0]))
        rotary_of_latents = cut_rotary(rotary, slice(lengths[0], sum(lengths)))
        size = None if torch.is_grad_enabled() else self.chunk_tokens
        pieces = chain(
            _qkv_pieces(self.txt_attn, text_mods[0], text_BLD, rotary_of_text, size),
            _qkv_pieces(self.img_attn, latent_mods[0], latents_BND, rotary_of_latents, size),
        )
        q, k, v = joined(pieces, length=sum(lengths), dim=2)
        attended_BNHD = self.attention(q, k, v).transpose(1, 2)
        del q, k, v
        attended_text, attended_latents = torch.split(attended_BNHD, lengths, dim=1)

        finish_latents = partial(_add_branches, self.img_attn.proj, self.img_mlp, latent_mods)
        finish_text = partial(_add_branches, self.txt_attn.proj, self.txt_mlp, text_mods)
        return (
            over_tokens(finish_latents, latents_BND, attended_latents, size=size),
            over_tokens(finish_text, text_BLD, attended_text, size=size),
        )


def _qkv_pieces(
    stream: StreamAttention, mod: ChunkModulation, x_BND: Tensor, rotary: Rotary, size: int | None
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    for span in spans(x_BND.shape[1], size):
        yield stream.qkv(mod.modulate(cut(x_BND, span)), cut_rotary(rotary, span))


def _add_branches(
    proj: nn.Linear, mlp: nn.Sequential, mods: list[ChunkModulation], x_BND: Tensor, attended_BNHD: Tensor
) -> Tensor:
    attn_mod, mlp_mod = mods
    x_BND = torch.addcmul(x_BND, attn_mod.gate, proj(attended_BNHD.flatten(2)))
    return torch.addcmul(x_BND, mlp_mod.gate, mlp(mlp_mod.modulate(x_BND)))


class SingleStreamBlock(nn.Module):
    """Block for the joint sequence of tokens, with parallel attention and MLP (ViT-22B, Dehghani et al. 2023)."""

    chunk_tokens: int | None = None

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

    def forward(self, tokens_BND: Tensor, vector: ModulationInput, rotary: Rotary) -> Tensor:
        """Return the new tokens of the joint sequence: text tokens, then latent tokens."""
        mod: ChunkModulation = self.modulation(vector)[0]
        size, length = self.chunk_tokens, tokens_BND.shape[1]
        if size is not None and size < length and not torch.is_grad_enabled():
            return self._in_chunks(tokens_BND, mod, rotary, size)
        x_BND = mod.modulate(tokens_BND)
        q, k = self._queries_and_keys(x_BND, rotary)
        wide_BNV = self.v_mlp(x_BND)
        v_BNW, mlp_BNF = torch.tensor_split(wide_BNV, [q.shape[1] * self.head_dim], dim=-1)
        attended_BNHD = self.attention(q, k, split_heads(v_BNW, self.head_dim)).transpose(1, 2)
        del x_BND, q, k
        mlp_BNF = tanh_gelu(mlp_BNF)
        if torch.is_grad_enabled():
            wide_BNV = torch.cat((attended_BNHD.flatten(2), mlp_BNF), dim=-1)
        else:
            # Overwrite the values, which are no longer needed, beside the inputs of the MLP.
            v_BNW.copy_(attended_BNHD.flatten(2))
        del attended_BNHD
        return torch.addcmul(tokens_BND, mod.gate, self.linear2(wide_BNV))

    def _queries_and_keys(self, x_BND: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        q = rotated_heads(self.q_proj(x_BND), self.norm.query_norm, rotary)
        return q, rotated_heads(self.k_proj(x_BND), self.norm.key_norm, rotary)

    def _in_chunks(self, tokens_BND: Tensor, mod: ChunkModulation, rotary: Rotary, size: int) -> Tensor:
        """Compute `forward` over `size` tokens at a time: queries, keys and values first, the MLP after attention."""
        v_mlp = features_of(self.v_mlp)

        def qkv_pieces() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
            for span in spans(tokens_BND.shape[1], size):
                x_BND = mod.modulate(cut(tokens_BND, span))
                q, k = self._queries_and_keys(x_BND, cut_rotary(rotary, span))
                width = q.shape[1] * self.head_dim
                yield q, k, split_heads(v_mlp(x_BND, slice(width)), self.head_dim)

        def finish(tokens_BND: Tensor, attended_BNHD: Tensor) -> Tensor:
            attended_BNW = attended_BNHD.flatten(2)
            width = attended_BNW.shape[-1]
            mlp_BNF = v_mlp(mod.modulate(tokens_BND), slice(width, None))
            out: Tensor = self.linear2(torch.cat((attended_BNW, tanh_gelu(mlp_BNF)), dim=-1))
            return torch.addcmul(tokens_BND, mod.gate, out)

        q, k, v = joined(qkv_pieces(), length=tokens_BND.shape[1], dim=2)
        attended_BNHD = self.attention(q, k, v).transpose(1, 2)
        del q, k, v
        return over_tokens(finish, tokens_BND, attended_BNHD, size=size)


def rotate(x_BHND: Tensor, cos_B1NE: Tensor, sin_B1NE: Tensor) -> Tensor:
    """Rotate the pairs (j, D/2 + j) of every head of the fp32 queries or keys by the given angles; E = D/2."""
    first, second = x_BHND.chunk(2, dim=-1)
    return torch.cat((first * cos_B1NE - second * sin_B1NE, second * cos_B1NE + first * sin_B1NE), dim=-1)


def spans(length: int, size: int | None) -> Iterator[slice]:
    """Yield slices of at most `size` of `length` tokens. None means one slice of all. No tokens give an empty slice."""
    if size is None or size >= length:
        # Without `range`, for which torch.compile would compile each length anew.
        return iter((slice(0, length),))
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def cut(whole: Tensor, span: slice, *, dim: int = 1) -> Tensor:
    """Return the span of a sequence. A full span is no view, whose gradient would be a copy."""
    length: int = span.stop - span.start
    return whole if length == whole.shape[dim] else whole.narrow(dim, span.start, length)


def over_tokens(compute: Callable[..., Tensor], *wholes_BN: Tensor, size: int | None) -> Tensor:
    """Return `compute(*wholes_BN)`, computed over `size` tokens at a time; None is all at once.

    `compute` treats every token by itself. All `wholes_BN` are (B, N, ...) with one N, which is also that of the
    result.
    """
    length = wholes_BN[0].shape[1]
    pieces = ((compute(*(cut(whole, span) for whole in wholes_BN)),) for span in spans(length, size))
    return joined(pieces, length=length, dim=1)[0]


def joined(pieces: Iterable[tuple[Tensor, ...]], *, length: int, dim: int) -> tuple[Tensor, ...]:
    """Join several sequences of `length` tokens each, in place without gradients; `pieces` has their spans in order."""
    if torch.is_grad_enabled():
        columns = zip(*pieces, strict=True)
        return tuple(parts[0] if len(parts) == 1 else torch.cat(parts, dim) for parts in columns)
    wholes: tuple[Tensor, ...] = ()
    end = 0
    for parts in pieces:
        begin, end = end, end + parts[0].shape[dim]
        if end - begin == length:
            return parts
        if not wholes:
            wholes = tuple(part.new_empty(*part.shape[:dim], length, *part.shape[dim + 1 :]) for part in parts)
        _write(parts, wholes, begin, dim)
        del parts
    return wholes


def _write(parts: tuple[Tensor, ...], wholes: tuple[Tensor, ...], begin: int, dim: int) -> None:
    for part, whole in zip(parts, wholes, strict=True):
        whole.narrow(dim, begin, part.shape[dim]).copy_(part)
