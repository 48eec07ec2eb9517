"""The buffer of activations: a stack, errors that leave it sound, tensors that are moved once, and what is measured."""

import copy
import gc
import mmap
from typing import ClassVar

import pytest
import torch
from tiny_transformer import OUTSIDE_BLOCKS, assert_same, gradients, inputs, loss_of, transformer
from torch import nn

from opensora_cli.memory.activations import ActivationManager
from opensora_cli.memory.checkpointing import set_grad_checkpoint
from opensora_cli.memory.counting import TensorBytes
from opensora_cli.memory.host_memory import page_aligned


def manager(numel: int = 1000, dtype: torch.dtype = torch.float32) -> ActivationManager:
    made = ActivationManager()
    made.setup_buffer(numel, dtype)
    return made


class Doubled(torch.autograd.Function):
    """Saves what it is given, and shows what it gets back."""

    seen: ClassVar[list[torch.Tensor]] = []

    @staticmethod
    def forward(ctx, *tensors):
        ctx.save_for_backward(*tensors)
        return sum(tensor.sum() for tensor in tensors) * 2

    @staticmethod
    def backward(ctx, gradient):
        Doubled.seen = [tensor.clone() for tensor in ctx.saved_tensors]
        return tuple(2 * gradient.expand_as(tensor) for tensor in Doubled.seen)


class TestStack:
    def test_an_onloaded_tensor_equals_the_offloaded_one(self):
        held = manager()
        tensors = [
            torch.randn(3, 4, requires_grad=True) * 2,
            torch.randn(5),
            torch.randn(2, 3, 4).permute(2, 0, 1),
            torch.randn(8, 4)[::2],
        ]
        handles = [held.offload(tensor) for tensor in tensors]
        assert held.used_bytes == 4 * (12 + 5 + 24 + 16)
        for tensor, handle in reversed(list(zip(tensors, handles, strict=True))):
            back = held.onload(handle)
            assert torch.equal(back, tensor)
            assert back.data_ptr() != tensor.data_ptr()
            assert not back.requires_grad
        assert (held.used_bytes, held.peak_bytes) == (0, 4 * 57)
        assert held.copied_to_host == held.copied_to_device == 4 * 57

    def test_changed_values_are_copied_again(self):
        held = manager()
        tensor = torch.ones(4)
        first = held.offload(tensor)
        tensor.add_(1)
        second = held.offload(tensor)
        assert held.used_bytes == 32
        assert held.onload(second).tolist() == [2.0] * 4
        assert held.onload(first).tolist() == [1.0] * 4

    def test_the_same_tensor_is_moved_once(self):
        held = manager()
        tensor = torch.randn(4, 5)
        handles = [held.offload(alias) for alias in (tensor, tensor.detach(), tensor.view(4, 5))]
        handles.append(held.offload(tensor[:2]))
        assert held.used_bytes == held.copied_to_host == 80 + 40
        assert torch.equal(held.onload(handles.pop()), tensor[:2])
        backs = [held.onload(handle) for handle in reversed(handles)]
        assert all(torch.equal(back, tensor) for back in backs)
        assert len({back.data_ptr() for back in backs}) == 1
        assert held.copied_to_device == 120

    def test_a_new_tensor_at_a_freed_address_is_another(self):
        held = manager()
        handles = []
        for value in range(50):
            tensor = torch.full((4,), float(value))
            handles.append(held.offload(tensor))
            del tensor
        values = [held.onload(handle)[0].item() for handle in reversed(handles)]
        assert values == [float(value) for value in reversed(range(50))]


def test_pinned_memory_shares_no_page():
    for nbytes in (1, mmap.PAGESIZE, 5 * mmap.PAGESIZE - 4):
        memory = page_aligned(nbytes)
        assert memory.nbytes == nbytes
        assert memory.data_ptr() % mmap.PAGESIZE == 0
        pages = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        assert memory.storage_offset() + pages <= memory.untyped_storage().nbytes()
    assert page_aligned(40).view(torch.float32).fill_(2).tolist() == [2] * 10


class TestErrors:
    def test_a_missing_buffer_is_refused(self):
        with pytest.raises(RuntimeError, match=r"call setup_buffer\(numel, dtype\) first"):
            ActivationManager().offload(torch.ones(1))
        with pytest.raises(RuntimeError, match="setup_buffer"), ActivationManager().offloading():
            pass
        with pytest.raises(ValueError, match="numel=0"):
            manager(0)

    def test_a_full_buffer_is_refused(self):
        held = manager(10)
        first = held.offload(torch.arange(6.0))
        with pytest.raises(RuntimeError, match=r"room for 10 numbers, holds 6, and 5 more are needed.* at least 11"):
            held.offload(torch.ones(5))
        second = held.offload(torch.arange(4.0))
        assert held.onload(second).tolist() == [0, 1, 2, 3]
        assert held.onload(first).tolist() == [0, 1, 2, 3, 4, 5]
        assert held.used_bytes == 0

    def test_onload_in_another_order_is_refused(self):
        held = manager()
        first, second, third = (held.offload(torch.full((2,), float(i))) for i in range(3))
        for wrong in (first, second):
            with pytest.raises(RuntimeError, match=r"wrong order: .* onload first what was offloaded last"):
                held.onload(wrong)
        assert [held.onload(handle)[0].item() for handle in (third, second, first)] == [2, 1, 0]
        with pytest.raises(RuntimeError, match="onloaded before"):
            held.onload(third)


class TestSavedTensors:
    def test_what_is_saved_comes_back(self):
        held = manager()
        first, second = torch.randn(3, requires_grad=True), torch.randn(2, 2, requires_grad=True)
        with held.offloading():
            loss = Doubled.apply(first, second)
        assert held.used_bytes == 28
        loss.backward()
        assert torch.equal(Doubled.seen[0], first)
        assert torch.equal(Doubled.seen[1], second)
        del loss
        assert held.used_bytes == 0

    def test_parameters_stay(self):
        held = manager()
        layer = nn.Linear(3, 3)
        x = torch.randn(2, 3, requires_grad=True)
        with held.offloading():
            loss = layer(x).sum()
        assert held.used_bytes == 4 * 6
        assert held.outside_bytes == 0
        loss.backward()

    def test_other_dtypes_stay_and_are_counted_once(self):
        held = manager()
        low = torch.ones(4, dtype=torch.bfloat16, requires_grad=True)
        high = torch.ones(3, requires_grad=True)
        with held.offloading():
            losses = [Doubled.apply(low, high) for _ in range(3)]
        assert (held.used_bytes, held.outside_bytes) == (12, 8)
        sum(losses).backward()
        del losses
        assert (held.used_bytes, held.outside_bytes) == (0, 0)
        assert low.grad.tolist() == [6.0] * 4

    def test_a_graph_that_is_freed_without_backward_releases_its_space(self):
        held = manager()
        with held.offloading():
            loss = torch.randn(3, requires_grad=True).exp().sum()
        assert held.used_bytes > 0
        del loss
        assert held.used_bytes == 0

    def test_two_graphs_in_any_order(self):
        held = manager()
        x, y = torch.randn(3, requires_grad=True), torch.randn(4, requires_grad=True)
        with held.offloading():
            first = x.square().sum()
        with held.offloading():
            second = y.square().sum()
        first.backward()
        del first
        # What came later lies above it.
        assert held.used_bytes == 28
        second.backward()
        assert held.used_bytes == 0
        assert torch.equal(x.grad, 2 * x.detach())
        assert torch.equal(y.grad, 2 * y.detach())

    def test_the_next_block_is_fetched_ahead_and_no_other(self):
        held = manager()
        x = torch.randn(10, requires_grad=True)
        losses = []
        for _ in range(4):
            with held.offloading():
                losses.append(Doubled.apply(x * 1))
        del x
        fetched = []
        while losses:
            losses.pop().backward()
            fetched.append(held.copied_to_device // 40)
        assert fetched == [2, 3, 4, 4]


class Broken(nn.Module):
    """Fails in forward or in backward when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.fails = ""

    def forward(self, x):
        if self.fails == "forward":
            raise ArithmeticError("on purpose")
        y = self.linear(x)
        if self.fails == "backward":
            y.register_hook(self._fail)
        return y

    @staticmethod
    def _fail(_):
        raise ArithmeticError("on purpose")


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_error_in_a_pass_leaves_the_buffer_usable(where):
    model = nn.ModuleList([Broken() for _ in range(4)])
    held = manager(4 * 12)
    x = torch.randn(3, 4)

    def step():
        y = x
        for block in model:
            y = block(y)
        y.sum().backward()
        return [weight.grad.clone() for weight in model.parameters()]

    expected = step()
    with set_grad_checkpoint(model, activations=held):
        for forced in (True, False):
            model[2].fails = where
            with pytest.raises(ArithmeticError) as caught:
                step()
            # The exception's traceback holds the frames, and they the graph.
            assert held.used_bytes > 0
            if forced:
                held.reset()
                assert held.used_bytes == 0
            del caught
            gc.collect()
            assert held.used_bytes == 0
            model[2].fails = ""
            model.zero_grad()
            assert all(torch.equal(*pair) for pair in zip(step(), expected, strict=True))
            assert (held.used_bytes, held.outside_bytes) == (0, 0)


def test_a_buffer_that_is_too_small_fails_in_forward_and_can_be_replaced(deterministic):
    model = transformer()
    arguments = inputs(model)
    expected = gradients(model, arguments)
    held = manager(100)
    with set_grad_checkpoint(model, activations=held):
        with pytest.raises(RuntimeError, match="the activation buffer is full"):
            gradients(model, arguments)
        held.reset()
        held.setup_buffer(10**5, torch.float32)
        assert_same(gradients(model, arguments), expected)


def needed_bytes(model, arguments) -> int:
    """Measure on meta, as engine.train does."""
    measuring = ActivationManager()
    measuring.setup_buffer(2**40, torch.float32, device="meta")
    on_meta = copy.deepcopy(model).to("meta")
    with set_grad_checkpoint(on_meta, others=OUTSIDE_BLOCKS, activations=measuring):
        loss_of(on_meta, {name: value.to("meta") for name, value in arguments.items()})
    return measuring.peak_bytes


def test_bytes_held_between_forward_and_backward():
    depth, single, hidden, tokens, text = 3, 6, 128, 48, 16
    model = transformer(depth=depth, single=single, hidden=hidden)
    arguments = inputs(model, batch=1, tokens=tokens, text=text)

    def held_bytes() -> int:
        with TensorBytes() as counted:
            # The graph holds the batch too.
            counted.add(list(arguments.values()))
            loss = loss_of(model, arguments)
            held = counted.live_bytes
            loss.backward()
        model.zero_grad()
        return held

    plain = held_bytes()
    with set_grad_checkpoint(model, others=OUTSIDE_BLOCKS):
        checkpointed = held_bytes()
    needed = needed_bytes(model, arguments)
    held = manager(needed // 4)
    with set_grad_checkpoint(model, others=OUTSIDE_BLOCKS, activations=held):
        outside = held_bytes()
    assert plain > 10**6
    assert checkpointed <= 0.3 * plain
    assert held.peak_bytes == needed
    assert held.peak_bytes >= 0.95 * (held.peak_bytes + outside)
    # Nothing is lost from sight. Without offload the last block's text tokens are held too, in whose storage the
    # latent tokens lie.
    assert held.peak_bytes + outside == pytest.approx(checkpointed - 4 * text * hidden, abs=1000)
    # Rotary tables (cosine and sine of each angle) and modulation vector once, not once for each of 19 users.
    angles = hidden // 4 // 2
    shared = 4 * (2 * (tokens + text) * angles + hidden)
    streams = 4 * hidden * ((depth + single) * (tokens + text) + tokens)
    assert held.peak_bytes == held.copied_to_host == held.copied_to_device == streams + shared
    assert (held.used_bytes, held.outside_bytes) == (0, 0)
