"""Offloaded activations: values, tensors that are copied once, freed copies, and the bytes that stay."""

import gc
from typing import ClassVar

import torch
from tiny_transformer import OUTSIDE_BLOCKS, inputs, loss_of, transformer
from torch import nn

from opensora_cli.memory.checkpointing import HostActivations, set_grad_checkpoint
from opensora_cli.memory.counting import TensorBytes


class Copies:
    """Counts copies to the host, and those that still exist."""

    def __init__(self) -> None:
        self.count = self.bytes = 0
        self.held = HostActivations(on_copy=self.add)

    def add(self, copy: torch.Tensor) -> None:
        self.count += 1
        self.bytes += copy.nbytes

    @property
    def living(self) -> int:
        gc.collect()
        return len(self.held._saved)


class Doubled(torch.autograd.Function):
    """Saves what it is given, and shows what it gets back."""

    seen: ClassVar[list[torch.Tensor]] = []

    @staticmethod
    def forward(ctx, *tensors):
        ctx.save_for_backward(*tensors)
        return sum(tensor.sum() for tensor in tensors) * 2

    @staticmethod
    def backward(ctx, gradient):
        Doubled.seen = list(ctx.saved_tensors)
        return tuple(2 * gradient.expand_as(tensor) for tensor in Doubled.seen)


def test_saved_tensors_come_back_with_their_values_and_strides():
    copies = Copies()
    tensors = [torch.randn(3, 4, requires_grad=True) * 2, torch.randn(2, 3, 4).permute(2, 0, 1), torch.randn(8, 4)[::2]]
    with copies.held.offloading():
        loss = Doubled.apply(*tensors)
    loss.backward()
    for found, tensor in zip(Doubled.seen, tensors, strict=True):
        assert torch.equal(found, tensor)
        assert found.data_ptr() != tensor.data_ptr()
    assert Doubled.seen[1].stride() == tensors[1].stride()
    assert (copies.count, copies.bytes) == (3, 4 * (12 + 24 + 16))


def test_a_tensor_is_copied_once_until_it_changes_and_parameters_stay():
    copies, x = Copies(), torch.randn(4, requires_grad=True)
    with copies.held.offloading():
        losses = [Doubled.apply(x) for _ in range(3)]
    assert copies.count == 1
    with torch.no_grad():
        x.add_(1)
    with copies.held.offloading():
        losses.append(Doubled.apply(x))
    assert copies.count == 2
    losses[-1].backward()
    assert torch.equal(Doubled.seen[0], x)
    layer, copies = nn.Linear(3, 3), Copies()
    with copies.held.offloading():
        layer(torch.randn(2, 3, requires_grad=True)).sum().backward()
    assert copies.bytes == 4 * 6


def test_a_copy_lives_as_long_as_its_graph():
    copies, x = Copies(), torch.randn(3, requires_grad=True)
    with copies.held.offloading():
        loss = x.exp().sum()
    first = torch.autograd.grad(loss, x, retain_graph=True)[0]
    assert copies.living == 1
    assert torch.equal(torch.autograd.grad(loss, x)[0], first)
    assert copies.living == 0
    with copies.held.offloading():
        loss = x.exp().sum()
    del loss
    assert copies.living == 0


def test_bytes_held_between_forward_and_backward():
    depth, single, hidden, tokens, text = 3, 6, 128, 48, 16
    model = transformer(depth=depth, single=single, hidden=hidden)
    arguments = inputs(model, batch=1, tokens=tokens, text=text)
    copies = Copies()

    def held_bytes() -> int:
        with TensorBytes() as counted:
            # The graph holds the batch too.
            counted.add(list(arguments.values()))
            counted.add(list(model.parameters()))
            before = counted.live_bytes
            loss = loss_of(model, arguments)
            held = counted.live_bytes - before
            loss.backward()
        model.zero_grad()
        return held

    plain = held_bytes()
    with set_grad_checkpoint(model, others=OUTSIDE_BLOCKS):
        checkpointed = held_bytes()
    with set_grad_checkpoint(model, others=OUTSIDE_BLOCKS, activations=copies.held):
        in_all = held_bytes()
    assert plain > 10**6
    assert checkpointed <= 0.3 * plain
    assert in_all - copies.bytes <= 0.1 * checkpointed
    # Rotary tables (cosine and sine of each angle) and modulation vector once, not once for each of 10 users.
    angles = hidden // 4 // 2
    shared = 4 * (2 * (tokens + text) * angles + hidden)
    assert copies.bytes == 4 * hidden * ((depth + single) * (tokens + text) + tokens) + shared
