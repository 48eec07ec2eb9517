"""Tables of the MMDiT's modules for other parts of the program, as plain data.

Offloading, compiling, sharding, profiling and estimating read these tables, so that none of them names a module itself.
"""

from dataclasses import dataclass

from opensora_cli.models.linears import ShardedLinear, Split
from opensora_cli.models.mmdit.config import MMDiTConfig


@dataclass(frozen=True)
class RepeatedBlocks:
    """Stack of equal blocks."""

    name: str
    module_path: str
    """Path of the `ModuleList` in the model."""
    count: int
    linears: tuple[ShardedLinear, ...]
    """Sharding plan of one block. Other linear layers stay whole on every rank."""
    used_by_all_heads: tuple[str, ...]
    """Parameters that are whole on every rank, which has only its heads' gradients of them."""
    modulation: tuple[str, ...]
    """Linear layers of one block that depend on time and pooled prompt alone, not on any token."""


SEQUENCE_INPUTS: dict[str, int] = {"packed_latents_BND": 1, "position_ids_BN3": 1, "conditioning_BNK": 1}
"""Arguments of `MMDiT.forward` that hold one entry per latent token -> dimension of the tokens, as in its result."""

TEXT_SEQUENCE_INPUTS: dict[str, int] = {"prompt_embeds_BLC": 1}
"""Arguments that hold one entry per text token -> dimension of the tokens."""

OUTPUT_LAYER = "final_layer"
"""Path of the module after the blocks, which keeps as much for backward as the inputs of a few blocks."""

_OUTPUT_MODULATION = f"{OUTPUT_LAYER}.adaLN_modulation.1"


def repeated_blocks(config: MMDiTConfig) -> tuple[RepeatedBlocks, ...]:
    """Return the model's stacks of blocks, in the order in which they run."""
    hidden, mlp, head = config.hidden_size, config.mlp_hidden_size, config.head_dim
    double = tuple(
        linear
        for stream in ("img", "txt")
        for linear in (
            *(ShardedLinear(f"{stream}_attn.{name}_proj", Split.COLUMN, (hidden,), (head,)) for name in "qkv"),
            ShardedLinear(f"{stream}_attn.proj", Split.ROW, (hidden,), (head,)),
            ShardedLinear(f"{stream}_mlp.0", Split.COLUMN, (mlp,), (1,)),
            ShardedLinear(f"{stream}_mlp.2", Split.ROW, (mlp,), (1,)),
        )
    )
    single = (
        ShardedLinear("q_proj", Split.COLUMN, (hidden,), (head,)),
        ShardedLinear("k_proj", Split.COLUMN, (hidden,), (head,)),
        ShardedLinear("v_mlp", Split.COLUMN, (hidden, mlp), (head, 1)),
        ShardedLinear("linear2", Split.ROW, (hidden, mlp), (head, 1)),
    )
    norms = ("norm.query_norm.scale", "norm.key_norm.scale")
    double_norms = tuple(f"{stream}_attn.{norm}" for stream in ("img", "txt") for norm in norms)
    return (
        RepeatedBlocks(
            "double-stream", "double_blocks", config.depth, double, double_norms, ("img_mod.lin", "txt_mod.lin")
        ),
        RepeatedBlocks(
            "single-stream", "single_blocks", config.depth_single_blocks, single, norms, ("modulation.lin",)
        ),
    )


def modulation_layers(config: MMDiTConfig) -> tuple[str, ...]:
    """Return the paths in the model of all linear layers that depend on time and pooled prompt alone."""
    in_blocks = tuple(
        f"{stack.module_path}.{index}.{path}"
        for stack in repeated_blocks(config)
        for index in range(stack.count)
        for path in stack.modulation
    )
    return (*in_blocks, _OUTPUT_MODULATION)
