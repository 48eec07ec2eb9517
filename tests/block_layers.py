"""Linear layers in the blocks of a transformer."""

from opensora_cli.models.mmdit.blocks import repeated_blocks
from opensora_cli.models.mmdit.config import MMDiTConfig


def linears_of_blocks(config: MMDiTConfig) -> tuple[str, ...]:
    """Return the paths in the model of all linear layers of the sharding plans, in the order of the blocks."""
    return tuple(
        f"{stack.module_path}.{index}.{linear.path}"
        for stack in repeated_blocks(config)
        for index in range(stack.count)
        for linear in stack.linears
    )
