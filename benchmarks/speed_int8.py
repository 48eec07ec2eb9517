"""The part of `speed.py` about products in 8 bits: an evaluation of blocks of the released size, and its error."""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from speed_loop import ReleasedBlocks
from speed_pairs import Row, compared

from opensora_cli.core.linear_products import LinearProducts
from opensora_cli.engine.components.linear_products import LinearProductsReport, use_in_block
from opensora_cli.engine.estimate.offload import CHUNK_TOKENS
from opensora_cli.memory.eight_bit_products import ProductError
from opensora_cli.models.mmdit.blocks import repeated_blocks
from opensora_cli.models.mmdit.model import MMDiT

GOAL = 2.0
"""Against the plain way."""


def measure_int8(options: argparse.Namespace) -> Iterator[Row]:
    """Yield the evaluation in int8 against the plain one in fp32, and against ours in fp32.

    The error is that of the velocity in the norm, of random weights and inputs.
    """
    blocks = ReleasedBlocks.of(options)
    rounded, report = _in_int8(blocks.model)
    with torch.inference_mode():
        exact, ours = blocks.ours(blocks.model), blocks.ours(rounded)
        right = exact()
        error = float((ours() - right).norm() / right.norm())
        for name, way, goal in (("plain", partial(blocks.plain, blocks.model), GOAL), ("exact", exact, None)):
            yield compared(
                f"int8 against {name}, {blocks.tokens} tokens",
                way,
                ours,
                pairs=options.pairs,
                goal=goal,
                note=f"relative error {error:.2%}, of products {report.relative_error:.2%}",
                figures={"error": error, "products": report.to_json(), "tokens": blocks.tokens},
            )


def _in_int8(model: MMDiT) -> tuple[MMDiT, LinearProductsReport]:
    """Return a model that multiplies in int8, and has the rest of its weights together with `model`."""
    with torch.device("meta"):
        rounded = MMDiT(model.config)
    rounded.load_state_dict(model.state_dict(), assign=True)
    rounded.set_sequence_chunk(CHUNK_TOKENS)  # as plans do
    errors: list[ProductError] = []
    for stack in repeated_blocks(model.config):
        for index, block in rounded.get_submodule(stack.module_path).named_children():
            found = use_in_block(block, stack, LinearProducts.INT8, device=torch.device("cpu"))
            errors += [replace(error, path=f"{stack.module_path}.{index}.{error.path}") for error in found]
    return rounded.requires_grad_(False).eval(), LinearProductsReport.of(LinearProducts.INT8, errors)
