"""Checkpoints from outside: equal gradients, what is wrapped, and undoing it."""

import copy

import pytest
import torch
from tiny_transformer import OUTSIDE_BLOCKS, assert_same, gradients, inputs, transformer
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from opensora_cli.memory.checkpointing import HostActivations, set_grad_checkpoint


class Held(HostActivations):
    """Counts the bytes that are copied to the host."""

    def __init__(self) -> None:
        super().__init__(on_copy=self.add)
        self.copied = 0

    def add(self, copy: Tensor) -> None:
        self.copied += copy.nbytes


class Calls:
    """Counts how often each of some modules computes."""

    def __init__(self, modules: nn.ModuleList) -> None:
        self.counts = [0] * len(modules)
        for index, module in enumerate(modules):
            # Of its first part: a hook of the block itself would not see the recomputation.
            next(part for part in module.modules() if isinstance(part, nn.Linear)).register_forward_pre_hook(
                lambda *_, index=index: self._count(index)
            )

    def _count(self, index: int) -> None:
        self.counts[index] += 1


@pytest.mark.parametrize(
    ("offload", "autocast", "depth"),
    [
        (False, False, {}),
        (True, True, {}),
        (False, True, {"double_blocks": 1, "single_blocks": 0}),
        (True, False, {"double_blocks": 1, "single_blocks": 0}),
    ],
)
def test_gradients_are_those_of_plain_training(deterministic, offload, autocast, depth):
    model = transformer()
    arguments = inputs(model)
    calls = [Calls(model.double_blocks), Calls(model.single_blocks)]
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        expected = gradients(model, arguments)
        held = Held() if offload else None
        with set_grad_checkpoint(model, depth=depth, others=OUTSIDE_BLOCKS, activations=held) as done:
            for _ in range(2):
                assert_same(gradients(model, arguments), expected)
    assert ("double_blocks.1" in done.paths) is not bool(depth)
    # Once plainly, and twice with two passes.
    assert [count.counts for count in calls] == ([[5, 3], [3, 3, 3]] if depth else [[5, 5], [5, 5, 5]])
    if held is not None:
        assert held.copied > 0


class AttentionCalls(TorchDispatchMode):
    """Counts forward passes of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        return func(*args, **(kwargs or {}))


def test_selective_checkpointing_recomputes_no_attention(deterministic):
    model = transformer()
    arguments, blocks = inputs(model), len(model.double_blocks) + len(model.single_blocks)
    expected = gradients(model, arguments)
    for keep, times in ((False, 2), (True, 1)):
        with set_grad_checkpoint(model, others=OUTSIDE_BLOCKS, keep_attention=keep), AttentionCalls() as calls:
            assert_same(gradients(model, arguments), expected)
        assert calls.count == times * blocks


def test_names_stay_and_everything_is_undone():
    model = transformer()
    names, attributes = list(model.state_dict()), [dict(vars(part)) for part in model.modules()]
    done = set_grad_checkpoint(model, others=OUTSIDE_BLOCKS)
    assert list(model.state_dict()) == names
    assert done.paths == (
        *(f"double_blocks.{i}" for i in range(2)),
        *(f"single_blocks.{i}" for i in range(3)),
        "final_layer",
    )
    done.remove()
    done.remove()
    assert [dict(vars(part)) for part in model.modules()] == attributes


def test_a_copy_of_the_model_computes_for_itself(deterministic):
    model = transformer()
    arguments = inputs(model)
    with set_grad_checkpoint(model, activations=Held()):
        twin = copy.deepcopy(model)
        expected = gradients(model, arguments)
        with torch.no_grad():
            for weight in model.parameters():
                weight.zero_()
        assert_same(gradients(twin, arguments), expected)


class TestErrors:
    def test_checkpointing_twice_is_refused(self):
        model = transformer()
        done = set_grad_checkpoint(model)
        with pytest.raises(ValueError, match="is wrapped already"):
            set_grad_checkpoint(model)
        assert "forward" in vars(model.single_blocks[2])
        done.remove()
        assert "forward" not in vars(model.single_blocks[2])
