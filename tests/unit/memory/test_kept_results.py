"""Checkpointed blocks that keep what costs most: the same bits, and less that is computed again."""

import pytest
import torch
from tiny_transformer import OUTSIDE_BLOCKS, assert_same, gradients, inputs, transformer

from opensora_cli.memory.checkpointing import set_grad_checkpoint
from opensora_cli.memory.counting import TensorBytes
from opensora_cli.memory.kept_results import CostCounter, keeping

WIDTH, TOKENS = 32, 12 + 5
ATTENTION, WIDEST, MLP, OTHERS = 4 * TOKENS / 4, 2 * 5 * WIDTH / 4, 2 * 4 * WIDTH / 4, 2 * WIDTH / 4
"""Operations a byte in fp32, of attention, of the last product of a single block, of an MLP's second, of the rest."""


def computed(keep: float | None) -> tuple[list[float], int]:
    """Return what results cost that a step computes, forward and backward, and the bytes that forward leaves."""
    model, found = transformer(), []
    kept = {} if keep is None else dict.fromkeys(blocks(model), keep)
    with set_grad_checkpoint(model, others=OUTSIDE_BLOCKS, keep=kept), TensorBytes() as counter:
        arguments = inputs(model)
        loss = model(arguments.pop("packed_latents_BND"), **arguments).square().mean()
        held = counter.live_bytes
        with CostCounter(found):
            loss.backward()
    return [cost.operations_a_byte for cost in found], held


def blocks(model: torch.nn.Module) -> list[str]:
    return [
        f"{stack}.{index}"
        for stack in ("double_blocks", "single_blocks")
        for index in range(len(model.get_submodule(stack)))
    ]


@pytest.mark.parametrize("autocast", [pytest.param(False, marks=pytest.mark.slow), True])
def test_gradients_are_those_of_plain_training(deterministic: None, autocast: bool) -> None:
    model = transformer()
    arguments = inputs(model)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        expected = gradients(model, arguments)
        for some in (dict.fromkeys(blocks(model), 0.1), {"double_blocks.1": MLP, "single_blocks.2": ATTENTION}):
            with set_grad_checkpoint(model, others=OUTSIDE_BLOCKS, keep=some):
                for _ in range(2):
                    assert_same(gradients(model, arguments), expected)


def test_what_costs_more_is_kept_and_not_computed_again() -> None:
    again, least = computed(None)
    assert {ATTENTION, WIDEST, MLP, OTHERS} <= set(again)
    held = [least]
    for cost in (WIDEST, MLP, ATTENTION, OTHERS):
        now, bytes_held = computed(cost)
        # Products of backward passes take as many operations a byte as there are tokens or outputs.
        kept = again.count(cost) - now.count(cost)
        assert kept == {WIDEST: 3, MLP: 4, ATTENTION: 5, OTHERS: 3 * 3 + 2 * 12 + 3}[cost]
        assert bytes_held > held[-1]
        held.append(bytes_held)
    nothing, _ = computed(10**9)
    assert nothing == again


def test_elementwise_results_are_never_kept() -> None:
    first, second = keeping(0.5)
    x = torch.randn(4, 4)
    with first:
        (x @ x).exp()
    x.zero_()
    with second:
        product = x @ x
        exponential = product.exp()
    assert product.any()
    assert torch.equal(exponential, product.exp())
