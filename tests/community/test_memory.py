"""Names of memory, called as the community calls them."""

from collections.abc import Callable

import pytest
import torch
from closeness import assert_close
from tiny_transformer import inputs, loss_of, transformer
from torch import Tensor, nn

from opensora_cli.community import memory
from opensora_cli.community.memory import (
    ActivationManager,
    CheckpointFunctionWithOffload,
    DynamicActivationManager,
    adaptive_batch_size,
    auto_grad_checkpoint,
    checkpoint,
    memory_offloading_inference,
    set_grad_checkpoint,
)
from opensora_cli.models.attention.torch_kernels import sdpa


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x, x, x, need_weights=False)[0]
        out: Tensor = x + self.mlp(x)
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.blocks, self.last = nn.Linear(4, 8), nn.ModuleList(Block() for _ in range(3)), nn.Linear(8, 2)
        self.register_buffer("shift", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(auto_grad_checkpoint(self.blocks, self.first(x) + self.shift))
        return out


def gradients(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    model(torch.linspace(-1, 1, 40).view(2, 5, 4)).square().mean().backward()
    return [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]


@pytest.fixture
def manager(monkeypatch):
    made = ActivationManager()
    monkeypatch.setattr(memory, "GLOBAL_ACTIVATION_MANAGER", made)
    return made


@pytest.mark.parametrize("by_handle", [False, True])
def test_tensors_move_in_place_and_back_in_reverse(by_handle):
    manager = ActivationManager()
    manager.setup_buffer(20, torch.float32)
    first, second = torch.arange(6.0).view(2, 3).requires_grad_(), torch.arange(4.0).view(2, 2).t()
    handles = [manager.offload(first), manager.offload(second)]
    in_buffer = manager.buffer.untyped_storage().data_ptr()
    assert [x.untyped_storage().data_ptr() for x in (first, second)] == [in_buffer] * 2
    assert (manager.is_top_tensor(first), manager.is_top_tensor(second)) == (False, True)
    with pytest.raises(AssertionError, match="wrong order"):
        manager.onload(handles[0] if by_handle else first)
    for x, handle in ((second, handles[1]), (first, handles[0])):
        assert manager.onload(handle if by_handle else x) is x
    assert torch.equal(first, torch.arange(6.0).view(2, 3))
    assert torch.equal(second, torch.arange(4.0).view(2, 2).t())
    assert in_buffer not in [x.untyped_storage().data_ptr() for x in (first, second)]
    with pytest.raises(AssertionError):
        manager.onload(first)
    del handles, handle
    assert manager.avail_offset == 0


def test_only_where_memory_is_short_tensors_move(monkeypatch):
    free = iter([90, 10])
    monkeypatch.setattr(memory, "free_and_total_bytes", lambda _: (next(free), 100))
    manager = DynamicActivationManager()
    manager.setup_buffer(10, torch.float32)
    first, second = torch.ones(2), torch.ones(5)
    assert manager.adaptive_offload(first) is manager.adaptive_offload(second) is None
    assert manager.memory_profiling() == {
        "peak_memory": 90,
        "allocation_history": [10, 90],
        "buffer_utilization": 0.5,
    }
    manager.onload(second)
    manager.onload(first)
    assert torch.equal(torch.cat([first, second]), torch.ones(7))


Checkpoint = Callable[..., Tensor]
CHECKPOINTS: dict[str, Checkpoint] = {
    "apply": lambda function, *args: CheckpointFunctionWithOffload.apply(function, True, *args),
    "reentrant": lambda function, *args: checkpoint(function, *args, use_reentrant=True),
    "default": checkpoint,
}


@pytest.mark.parametrize("call", CHECKPOINTS.values(), ids=CHECKPOINTS)
@pytest.mark.parametrize("numel", [None, 100])
def test_checkpoints_offload_their_inputs_once_there_is_a_buffer(manager, call, numel):
    copies: list[Tensor] = []
    manager._on_copy = copies.append
    if numel:
        manager.setup_buffer(numel, torch.float32)
    x = torch.linspace(-1, 1, 6).requires_grad_()
    out = call(lambda x, y: (x.sin() * y).exp(), x * 1, torch.full((6,), 2.0))
    assert [copy.numel() for copy in copies] == ([6, 6] if numel else [])
    out.sum().backward()
    expected = torch.linspace(-1, 1, 6).requires_grad_()
    (expected.sin() * 2).exp().sum().backward()
    assert_close(x.grad, expected.grad)


def test_every_module_learns_how_it_is_checkpointed(manager):
    model = Model()
    expected = gradients(model)
    assert set_grad_checkpoint(model) is None
    set_grad_checkpoint(model, use_fp32_attention=True, gc_step=2)
    settings = {(m.grad_checkpointing, m.fp32_attention, m.grad_checkpointing_step) for m in model.modules()}
    assert settings == {(True, True, 2)}
    assert all(torch.equal(*pair) for pair in zip(gradients(model), expected, strict=True))
    copies: list[Tensor] = []
    manager._on_copy = copies.append
    manager.setup_buffer(10_000, torch.float32)
    assert all(torch.equal(*pair) for pair in zip(gradients(model), expected, strict=True))
    # The inputs of the first two blocks, which share a checkpoint, and of the third.
    assert [copy.numel() for copy in copies] == [2 * 5 * 8] * 2


class Noisy(nn.Module):
    """A block with dropout, which returns two streams and takes a condition by name."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout, self.calls = nn.Linear(6, 6), nn.Dropout(0.5), 0

    def forward(self, x: Tensor, y: Tensor, shift: Tensor, *, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        self.calls += 1
        x = x + self.dropout(self.linear(y).tanh()) * tables[0] + shift
        return x, y + tables[1] * x


@pytest.mark.parametrize("gc_step", [1, 2, 9])
def test_a_sequence_has_a_checkpoint_for_every_few_blocks(manager, gc_step):
    torch.manual_seed(0)
    model, x = nn.ModuleList(Noisy() for _ in range(5)), torch.randn(3, 6)

    def step() -> list[Tensor]:
        torch.manual_seed(5)
        first, second = auto_grad_checkpoint(model, x, x, torch.ones(1), tables=(torch.ones(6), torch.ones(6)))
        return list(torch.autograd.grad((first * second).sum(), list(model.parameters())))

    expected = step()
    set_grad_checkpoint(model, gc_step=gc_step)
    assert all(torch.equal(*pair) for pair in zip(step(), expected, strict=True))
    assert [block.calls for block in model] == [3] * 5
    with pytest.raises(ValueError, match="gc_step=0 must be at least 1"):
        set_grad_checkpoint(model, gc_step=0)


@pytest.mark.parametrize("autocast", [False, True])
def test_attention_of_our_blocks_is_in_fp32(manager, autocast):
    seen: list[torch.dtype] = []

    def attention(q: Tensor, k: Tensor, v: Tensor, /) -> Tensor:
        seen.append((q @ k.mT).dtype)
        return sdpa(q, k, v)

    model = transformer(attention=attention)
    model = model if autocast else model.to(torch.bfloat16)
    for use_fp32, expected in ((False, torch.bfloat16), (True, torch.float32)):
        set_grad_checkpoint(model, use_fp32_attention=use_fp32)
        seen.clear()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss_of(model, inputs(model)).backward()
        # Computed again in the same precision.
        assert seen == [expected] * 10


def test_blocks_are_streamed_and_the_output_is_on_the_cpu():
    model = Model()
    x = torch.ones(2, 5, 4)
    out = memory_offloading_inference(model, x)
    assert (out.device.type, out.requires_grad) == ("cpu", False)
    assert_close(out, model(x))
    plain = nn.Linear(4, 2)
    assert_close(memory_offloading_inference(plain, x), plain(x))


def test_the_batch_grows_to_80_percent():
    model = nn.Linear(256, 512, bias=False)
    weights, sample = 256 * 512 * 4, (256 + 512) * 4
    gigabytes = (weights + 37.5 * sample) / 0.8 / 2**30
    assert adaptive_batch_size(model, (256,), max_memory_gb=gigabytes) == 37
    assert adaptive_batch_size(model, (256,), max_memory_gb=1e-9) == 1
