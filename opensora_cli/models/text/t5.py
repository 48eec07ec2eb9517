"""The encoder of a T5 (Raffel et al. 2020, https://arxiv.org/abs/1910.10683), with the names of the published files."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from opensora_cli.models.linears import ShardedLinear, Split
from opensora_cli.models.text.sizes import T5Sizes

LAYERS = "encoder.block"
"""Path of the layers in the model."""
KEPT_IN_FP32 = f"{LAYERS}.*.DenseReluDense.wo.weight"
"""Weights that stay in fp32 if T5 computes in float16: their outputs, and sums over layers, overflow float16."""

_OTHER_PARTS = ("decoder.", "lm_head.")
_TOKENS, _TOKENS_OF_ENCODER = "shared.weight", "encoder.embed_tokens.weight"


class FusedRMSNorm(nn.Module):
    """RMS norm (Zhang & Sennrich 2019) with a scale for each feature, accumulated in fp32, in one kernel."""

    def __init__(self, width: int, *, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return x / sqrt(mean(x²) + eps) · weight.

        If the weight is in half precision, the result has its dtype, otherwise the wider one of both.
        """
        # Of one dtype torch's kernel takes them as they are, and sums in fp32 inside.
        wide = torch.promote_types(x.dtype, self.weight.dtype)
        normed = functional.rms_norm(x.to(wide), self.weight.shape, self.weight.to(wide), eps=self.eps)
        return normed.to(self.weight.dtype) if self.weight.dtype.itemsize == 2 else normed


class T5Model(nn.Module):
    """T5 encoder: a table of tokens, layers, and a norm. Every token attends to all others, including padding."""

    def __init__(self, sizes: T5Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.shared = nn.Embedding(sizes.vocab_size, sizes.d_model)
        # Dictionaries, here and in the layers, because the published keys are nested.
        layers = nn.ModuleList(_Layer(sizes, has_biases=index == 0) for index in range(sizes.num_layers))
        norm = FusedRMSNorm(sizes.d_model, eps=sizes.eps)
        self.encoder = nn.ModuleDict({"block": layers, "final_layer_norm": norm})

    def forward(self, ids_BL: Tensor) -> Tensor:
        """Return the last hidden state, (B, L, C), of token ids."""
        states_BLC, biases_1HLL = self.shared(ids_BL), None
        for layer in self.layers:
            states_BLC, biases_1HLL = layer(states_BLC, biases_1HLL)
        states: Tensor = self.encoder["final_layer_norm"](states_BLC)
        return states

    @property
    def layers(self) -> nn.ModuleList:
        """Layers in the order in which they run."""
        return cast(nn.ModuleList, self.encoder["block"])


class _Layer(nn.Module):
    """Layer of attention and an MLP. The first layer computes the position biases of all layers."""

    def __init__(self, sizes: T5Sizes, *, has_biases: bool) -> None:
        super().__init__()
        parts = {"SelfAttention": _Attention(sizes, has_biases=has_biases), "DenseReluDense": _MLP(sizes)}
        norms = [FusedRMSNorm(sizes.d_model, eps=sizes.eps) for _ in parts]
        self.layer = nn.ModuleList(
            nn.ModuleDict({name: part, "layer_norm": norm})
            for (name, part), norm in zip(parts.items(), norms, strict=True)
        )

    def forward(self, states_BLC: Tensor, biases_1HLL: Tensor | None) -> tuple[Tensor, Tensor]:
        first, second = (cast(nn.ModuleDict, part) for part in self.layer)
        attention = cast(_Attention, first["SelfAttention"])
        if biases_1HLL is None:
            biases_1HLL = attention.position_biases(states_BLC.shape[1])
        states_BLC = states_BLC + attention(first["layer_norm"](states_BLC), biases_1HLL)
        if states_BLC.dtype is torch.float16:
            largest = torch.finfo(torch.float16).max
            states_BLC = states_BLC.clamp(-largest, largest)
        return states_BLC + second["DenseReluDense"](second["layer_norm"](states_BLC)), biases_1HLL


class _Attention(nn.Module):
    """Attention with a bias for each head and distance, and without a scale of the products."""

    def __init__(self, sizes: T5Sizes, *, has_biases: bool) -> None:
        super().__init__()
        self.d_kv = sizes.d_kv
        self.max_distance = sizes.max_distance
        inner = sizes.num_heads * sizes.d_kv
        self.q = nn.Linear(sizes.d_model, inner, bias=False)
        self.k = nn.Linear(sizes.d_model, inner, bias=False)
        self.v = nn.Linear(sizes.d_model, inner, bias=False)
        self.o = nn.Linear(inner, sizes.d_model, bias=False)
        if has_biases:
            self.relative_attention_bias = nn.Embedding(sizes.num_buckets, sizes.num_heads)

    def position_biases(self, length: int) -> Tensor:
        """Return the bias for each query and key, (1, heads, L, L)."""
        table: Tensor = self.relative_attention_bias.weight
        buckets = position_buckets(
            length, num_buckets=table.shape[0], max_distance=self.max_distance, device=table.device
        )
        # A head's biases lie side by side: CUDA's fast kernels of attention take no others.
        of_distances_HD = functional.embedding(buckets, table).T.contiguous()
        # Row i has the distances -i to L - 1 - i: windows over all of them, the last one first.
        return of_distances_HD.unfold(1, length, 1).flip(1)[None]

    def forward(self, states_BLC: Tensor, biases_1HLL: Tensor) -> Tensor:
        q, k, v = (part(states_BLC).unflatten(-1, (-1, self.d_kv)).transpose(1, 2) for part in (self.q, self.k, self.v))
        attended_BHLD = functional.scaled_dot_product_attention(q, k, v, attn_mask=biases_1HLL, scale=1.0)
        out: Tensor = self.o(attended_BHLD.transpose(1, 2).flatten(2))
        return out


class _MLP(nn.Module):
    """Two linear layers with a gate (Shazeer 2020, https://arxiv.org/abs/2002.05202)."""

    def __init__(self, sizes: T5Sizes) -> None:
        super().__init__()
        self.wi_0 = nn.Linear(sizes.d_model, sizes.d_ff, bias=False)
        self.wi_1 = nn.Linear(sizes.d_model, sizes.d_ff, bias=False)
        self.wo = nn.Linear(sizes.d_ff, sizes.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # The published models have always meant GELU with tanh by `gated-gelu`.
        inner = functional.gelu(self.wi_0(x), approximate="tanh") * self.wi_1(x)
        out: Tensor = self.wo(inner.to(self.wo.weight.dtype))
        return out


def position_buckets(length: int, *, num_buckets: int, max_distance: int, device: torch.device) -> Tensor:
    """Return the bucket of each distance from a query to a key, from 1 - `length` to `length` - 1.

    Half of the buckets are for keys behind the query. Of each half, the first half are single distances, the others
    ever longer ranges, up to `max_distance`; the last one has all that is further.
    """
    distances = torch.arange(1 - length, length, device=device)
    half, exact = num_buckets // 2, num_buckets // 4
    far = distances.abs().clamp(min=exact).float() / exact
    ranges = (torch.log(far) / math.log(max_distance / exact) * (half - exact)).long()
    buckets = torch.where(distances.abs() < exact, distances.abs(), (exact + ranges).clamp(max=half - 1))
    return buckets + half * (distances > 0)


def t5_weights(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the encoder's tensors in a file; the decoder of a whole T5 is skipped."""
    for key in tensors:
        if key == _TOKENS_OF_ENCODER:  # the same table, unless it is the only one
            if _TOKENS not in tensors:
                yield _TOKENS, tensors[key]
        elif not key.startswith(_OTHER_PARTS):
            yield key, tensors[key]


_ATTENTION = "layer.0.SelfAttention"
_DENSE = "layer.1.DenseReluDense"


def t5_linears(sizes: T5Sizes) -> tuple[ShardedLinear, ...]:
    """Return the sharding plan of one layer; its norms stay whole on every rank."""
    heads, mlp = (sizes.num_heads * sizes.d_kv,), (sizes.d_ff,)
    return (
        *(ShardedLinear(f"{_ATTENTION}.{name}", Split.COLUMN, heads, (sizes.d_kv,)) for name in ("q", "k", "v")),
        ShardedLinear(f"{_ATTENTION}.o", Split.ROW, heads, (sizes.d_kv,)),
        *(ShardedLinear(f"{_DENSE}.{name}", Split.COLUMN, mlp, (1,)) for name in ("wi_0", "wi_1")),
        ShardedLinear(f"{_DENSE}.wo", Split.ROW, mlp, (1,)),
    )


def keep_heads(layer: nn.Module, heads: slice) -> None:
    """Cut the position biases of a layer, if it has them, to `heads`, to which its projections have been cut."""
    table: Any = getattr(layer.get_submodule(_ATTENTION), "relative_attention_bias", None)
    if table is not None:
        weight = cast(Tensor, table.weight).detach()[:, heads].clone()
        table.weight = nn.Parameter(weight, requires_grad=table.weight.requires_grad)
        table.embedding_dim = weight.shape[1]
