"""Activation checkpointing and offload on a CUDA device: pinned copies, and equal gradients."""

import gc

import pytest
import torch
from tiny_transformer import OUTSIDE_BLOCKS, assert_same, gradients, inputs, loss_of, transformer
from torch import Tensor, nn

from opensora_cli.memory.checkpointing import HostActivations, set_grad_checkpoint
from opensora_cli.models.attention.torch_kernels import math


@pytest.fixture(autouse=True)
def deterministic(monkeypatch):
    """Kernels that give the same bits each time."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def on_cuda(arguments: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.cuda() for name, value in arguments.items()}


def model_and_inputs(dtype: torch.dtype) -> tuple[nn.Module, dict[str, Tensor]]:
    """Of some hundred microseconds for each kernel, so that copies and computation do overlap."""
    model = transformer(depth=3, single=5, hidden=512, attention=math).to("cuda", dtype)
    return model, on_cuda(inputs(model, tokens=1500, text=100))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_those_of_plain_training(dtype, autocast):
    model, arguments = model_and_inputs(dtype)
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
        expected = gradients(model, arguments)
        assert_same(gradients(model, arguments), expected)
        copies: list[Tensor] = []
        held = HostActivations(on_copy=copies.append)
        with set_grad_checkpoint(model, others=OUTSIDE_BLOCKS, activations=held):
            # Again and again, with the memory of the device handed from hand to hand.
            for _ in range(5):
                assert_same(gradients(model, arguments), expected)
                scribble = torch.full((10**7,), float("nan"), device="cuda")
                del scribble
    assert copies
    assert all(copy.is_pinned() for copy in copies)


def test_bytes_held_on_the_device():
    model, arguments = model_and_inputs(torch.float32)

    def held_bytes() -> int:
        gc.collect()
        before = torch.cuda.memory_allocated()
        loss = loss_of(model, arguments)
        torch.cuda.synchronize()
        # What was freed while a copy ran is given back at the next allocation.
        torch.empty(1, device="cuda")
        held = torch.cuda.memory_allocated() - before
        del loss
        return held

    held_bytes()  # libraries take their workspaces
    plain = held_bytes()
    with set_grad_checkpoint(model, others=OUTSIDE_BLOCKS):
        checkpointed = held_bytes()
    with set_grad_checkpoint(model, others=OUTSIDE_BLOCKS, activations=HostActivations()):
        outside = held_bytes()
    assert checkpointed <= 0.3 * plain
    assert outside <= 0.1 * checkpointed
