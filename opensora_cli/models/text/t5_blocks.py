"""What other parts of the program must know of the insides of transformers' T5."""

from typing import Any

from torch import nn

from opensora_cli.models.sharding import ShardedLinear, Split

_ATTENTION = "layer.0.SelfAttention"
_MLP = "layer.1.DenseReluDense"


def t5_linears(config: Any) -> tuple[ShardedLinear, ...]:
    """Return the sharding plan of one block of the encoder; its norms stay whole on every rank.

    Args:
        config: a `T5Config`.
    """
    heads, mlp = (config.num_heads * config.d_kv,), (config.d_ff,)
    inward = ("wi_0", "wi_1") if config.is_gated_act else ("wi",)
    return (
        *(ShardedLinear(f"{_ATTENTION}.{name}", Split.COLUMN, heads, (config.d_kv,)) for name in ("q", "k", "v")),
        ShardedLinear(f"{_ATTENTION}.o", Split.ROW, heads, (config.d_kv,)),
        *(ShardedLinear(f"{_MLP}.{name}", Split.COLUMN, mlp, (1,)) for name in inward),
        ShardedLinear(f"{_MLP}.wo", Split.ROW, mlp, (1,)),
    )


def keep_heads(block: nn.Module, heads: slice) -> None:
    """Tell a block that its projections have only some of the heads, and cut its position biases to theirs.

    Args:
        block: of the encoder; its linear layers have been cut by themselves.
        heads: those that stay.
    """
    attention: Any = block.get_submodule(_ATTENTION)
    attention.n_heads = heads.stop - heads.start
    attention.inner_dim = attention.n_heads * attention.key_value_proj_dim
    if attention.has_relative_attention_bias:
        table: nn.Embedding = attention.relative_attention_bias
        weight = table.weight.detach()[:, heads].clone()
        table.weight = nn.Parameter(weight, requires_grad=table.weight.requires_grad)
        table.embedding_dim = attention.n_heads
