"""What other parts of the program must know of the MMDiT's insides, as plain data.

Offloading, compiling, sharding, profiling and estimating read these tables, so that none of them names a module itself.
"""

from dataclasses import dataclass
from enum import StrEnum

from opensora_cli.models.mmdit.config import MMDiTConfig


class Split(StrEnum):
    """How a linear layer is divided among ranks (Shoeybi et al. 2019, Megatron-LM)."""

    COLUMN = "column"
    """Each rank has some of the output features (rows of the weight, and the bias)."""
    ROW = "row"
    """Each rank has some of the input features (columns of the weight); outputs are summed, the bias is added once."""


@dataclass(frozen=True)
class ShardedLinear:
    """One linear layer of the sharding plan.

    Args:
        path: module path inside the block.
        split: by output or by input features.
        pieces: sizes of the parts that the divided features consist of, in order. Each part is divided by itself: a
            rank holds its share of the first, then its share of the second.
    """

    path: str
    split: Split
    pieces: tuple[int, ...]


@dataclass(frozen=True)
class RepeatedBlocks:
    """A stack of equal blocks.

    Args:
        name: for people.
        module_path: path of the `ModuleList` in the model.
        count: how many blocks.
        linears: the sharding plan of one block; a linear that is not named stays whole on every rank. Heads are divided
            with the q, k and v projections, so the number of ranks must divide `num_heads` and every size in `pieces`.
    """

    name: str
    module_path: str
    count: int
    linears: tuple[ShardedLinear, ...]


SEQUENCE_INPUTS: dict[str, int] = {"packed_latents_BND": 1, "position_ids_BN3": 1, "conditioning_BNK": 1}
"""Arguments of `MMDiT.forward` that hold one entry per latent token -> dimension of the tokens, as in its result."""

TEXT_SEQUENCE_INPUTS: dict[str, int] = {"prompt_embeds_BLC": 1}
"""Arguments that hold one entry per text token -> dimension of the tokens."""

OUTPUT_LAYER = "final_layer"
"""Path of the module after the blocks, which keeps as much for backward as the inputs of a few blocks."""


def repeated_blocks(config: MMDiTConfig) -> tuple[RepeatedBlocks, ...]:
    """Return the model's stacks of blocks, in the order in which they run."""
    hidden, mlp = config.hidden_size, config.mlp_hidden_size
    double = tuple(
        linear
        for stream in ("img", "txt")
        for linear in (
            ShardedLinear(f"{stream}_attn.q_proj", Split.COLUMN, (hidden,)),
            ShardedLinear(f"{stream}_attn.k_proj", Split.COLUMN, (hidden,)),
            ShardedLinear(f"{stream}_attn.v_proj", Split.COLUMN, (hidden,)),
            ShardedLinear(f"{stream}_attn.proj", Split.ROW, (hidden,)),
            ShardedLinear(f"{stream}_mlp.0", Split.COLUMN, (mlp,)),
            ShardedLinear(f"{stream}_mlp.2", Split.ROW, (mlp,)),
        )
    )
    single = (
        ShardedLinear("q_proj", Split.COLUMN, (hidden,)),
        ShardedLinear("k_proj", Split.COLUMN, (hidden,)),
        ShardedLinear("v_mlp", Split.COLUMN, (hidden, mlp)),
        ShardedLinear("linear2", Split.ROW, (hidden, mlp)),
    )
    return (
        RepeatedBlocks("double-stream", "double_blocks", config.depth, double),
        RepeatedBlocks("single-stream", "single_blocks", config.depth_single_blocks, single),
    )
