"""torch.compile, block by block: one small graph for each kind of block, whatever hooks are around it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from opensora_cli.models.mmdit import MMDiT
from opensora_cli.models.mmdit.blocks import repeated_blocks


def compile_blocks(transformer: MMDiT, *, warn: Callable[[str], None], backend: str = "inductor") -> None:
    """Let a transformer's blocks run compiled from now on; names and weights stay as they are.

    Blocks get a class whose `forward` is compiled. So checkpoints lie around the compiled code, and so do the hooks of
    FSDP2, which both are put on later. A kind of block that cannot be compiled runs as before.

    Args:
        transformer: its blocks share no weights and exchange nothing with other ranks.
        warn: hears once of what cannot be compiled.
        backend: of torch.compile.
    """
    for stack in repeated_blocks(transformer.config):
        blocks = list(transformer.get_submodule(stack.module_path).children())
        for plain in {type(block) for block in blocks}:
            compiled = _compiled_class(plain, backend=backend, warn=warn)
            for block in blocks:
                if type(block) is plain:
                    block.__class__ = compiled


def _compiled_class(plain: type[nn.Module], *, backend: str, warn: Callable[[str], None]) -> type[nn.Module]:
    # Not at the top: it takes a second, and few runs need it.
    from torch._dynamo.exc import TorchDynamoException

    fast = torch.compile(plain.forward, backend=backend)
    can_compile = True

    def forward(self: nn.Module, *args: Any) -> Any:
        nonlocal can_compile
        if can_compile:
            try:
                return fast(self, *args)
            except TorchDynamoException as error:
                can_compile = False
                # The first line names the backend, the second what it stumbled over.
                reason = " ".join(str(error).strip().splitlines()[:2])
                warn(f"{plain.__name__} cannot be compiled and runs as it is: {reason}")
        return plain.forward(self, *args)

    return type(f"Compiled{plain.__name__}", (plain,), {"forward": forward})
