"""Parts of transformers' T5: its norm in one kernel, and how its blocks are split between ranks."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from opensora_cli.models.linears import ShardedLinear, Split


class FusedRMSNorm(nn.Module):
    """RMS norm (Zhang & Sennrich 2019) with a scale for each feature, accumulated in fp32.

    transformers' `T5LayerNorm` computes the same in five steps, each of which writes a tensor of fp32; in half
    precision it also rounds before the scale. Both have one parameter, `weight`, which is shared with the module that
    this one replaces.
    """

    def __init__(self, weight: nn.Parameter, *, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps

    @staticmethod
    def from_t5_norm(norm: Any) -> "FusedRMSNorm":
        """Return the norm that computes what a `T5LayerNorm` does, with the same parameter."""
        return FusedRMSNorm(norm.weight, eps=norm.variance_epsilon).train(norm.training)

    def forward(self, x: Tensor) -> Tensor:
        """Return x / sqrt(mean(x²) + eps) · weight over the last dimension, in the dtype that `T5LayerNorm` gives.

        That is the weight's in half precision, and otherwise the wider of both.
        """
        # Of one dtype torch's kernel takes them as they are, and sums in fp32 inside.
        wide = torch.promote_types(x.dtype, self.weight.dtype)
        normed = functional.rms_norm(x.to(wide), self.weight.shape, self.weight.to(wide), eps=self.eps)
        return normed.to(self.weight.dtype) if self.weight.dtype.itemsize == 2 else normed


def fuse_t5_norms(model: nn.Module) -> None:
    """Replace every `T5LayerNorm` inside a model by ours; names of parameters stay."""
    from transformers.models.t5.modeling_t5 import T5LayerNorm

    for path, module in list(model.named_modules()):
        if isinstance(module, T5LayerNorm):
            model.set_submodule(path, FusedRMSNorm.from_t5_norm(module))


_ATTENTION = "layer.0.SelfAttention"
_MLP = "layer.1.DenseReluDense"


def t5_linears(config: Any) -> tuple[ShardedLinear, ...]:
    """Return the sharding plan of one block of a `T5Config`'s encoder; its norms stay whole on every rank."""
    heads, mlp = (config.num_heads * config.d_kv,), (config.d_ff,)
    inward = ("wi_0", "wi_1") if config.is_gated_act else ("wi",)
    return (
        *(ShardedLinear(f"{_ATTENTION}.{name}", Split.COLUMN, heads, (config.d_kv,)) for name in ("q", "k", "v")),
        ShardedLinear(f"{_ATTENTION}.o", Split.ROW, heads, (config.d_kv,)),
        *(ShardedLinear(f"{_MLP}.{name}", Split.COLUMN, mlp, (1,)) for name in inward),
        ShardedLinear(f"{_MLP}.wo", Split.ROW, mlp, (1,)),
    )


def keep_heads(block: nn.Module, heads: slice) -> None:
    """Adapt a block whose projections have been cut to `heads`, and cut its position biases to theirs."""
    attention: Any = block.get_submodule(_ATTENTION)
    attention.n_heads = heads.stop - heads.start
    attention.inner_dim = attention.n_heads * attention.key_value_proj_dim
    if attention.has_relative_attention_bias:
        table: nn.Embedding = attention.relative_attention_bias
        weight = table.weight.detach()[:, heads].clone()
        table.weight = nn.Parameter(weight, requires_grad=table.weight.requires_grad)
        table.embedding_dim = attention.n_heads
