import pytest
import torch
from storage_sizes import storage_bytes
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from opensora_cli.memory.counting import TensorBytes


def test_a_storage_counts_once_until_its_last_tensor_is_gone():
    with TensorBytes() as counter:
        whole = torch.zeros(16, 16)
        view = whole.t()[3:]
        whole += 1
        assert counter.live_bytes == 1024
        del whole
        assert counter.live_bytes == 1024
        del view
    assert counter.live_bytes == 0
    assert counter.peak_bytes == 1024


def test_existing_tensors_count_only_when_added():
    before = torch.zeros(100)
    with TensorBytes() as counter:
        view = before.view(10, 10)
        view.mul_(2)
        assert counter.live_bytes == 0
        counter.add(before)
        counter.add([before, view])
        assert counter.live_bytes == 400
        fresh = torch.tensor([1.0, 2.0])
        assert counter.live_bytes == 408
    del before, view
    assert counter.live_bytes == fresh.nbytes


def test_autograd_keeps_what_it_needs_and_checkpointing_less():
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)))
    x = torch.randn(64, 32)
    size = x.nbytes
    held = {}
    for way in ("plain", "checkpointed"):
        with TensorBytes() as counter:
            out = x
            for layer in layers:
                out = checkpoint(layer, out, use_reentrant=False) if way == "checkpointed" else layer(out)
            held[way] = counter.live_bytes
            out.sum().backward()
            del out
        # What is left are gradients.
        assert counter.live_bytes == storage_bytes(weight.grad for weight in layers.parameters())
        layers.zero_grad()
    assert held == {"plain": 8 * size, "checkpointed": 4 * size}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_parts_of_composite_operations_count(mode):
    x = torch.randn(8, 64)
    with mode(), TensorBytes() as counter:
        functional.rms_norm(x, [64])
    # Squares and their means; then the roots, the means, and the result.
    assert counter.peak_bytes == x.nbytes + 2 * 8 * 4
    assert counter.live_bytes == 0
    assert len(counter.changes) >= 6


def test_marks_and_peaks_on_the_timeline():
    with TensorBytes() as counter:
        first = torch.zeros(256)
        counter.mark("one")
        torch.zeros(1024)
        counter.mark("two")
        counter.reset_peak()
        del first
    assert [(mark.name, mark.live_bytes) for mark in counter.marks] == [("one", 1024), ("two", 1024)]
    assert counter.peak_bytes == 1024
    assert [change.num_bytes for change in counter.changes] == [1024, 4096, -4096, -1024]


def test_modules_own_what_their_forward_makes():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    with TensorBytes() as counter:
        counter.add(model, "weights")
        with counter.watch(model, "model"):
            out = model(torch.zeros(2, 8))
        kept = torch.zeros(3)
        counter.mark("after forward")
        out.sum().backward()
        counter.add([weight.grad for weight in model.parameters()], "gradients")
    weights = storage_bytes(model.parameters())
    # Autograd needs the inputs of the linear layers; the first layer's output only was an input of the second.
    inputs = 2 * 8 * 4
    assert counter.owners_at(counter.marks[0]) == {
        "weights": weights,
        "model.1": 2 * 16 * 4,
        "model.2": 2 * 4 * 4,
        "": inputs + kept.nbytes,
    }
    counter.mark("end")
    assert counter.owners_at(counter.marks[1])["gradients"] == weights
    assert sum(counter.peak_by_owner().values()) == counter.peak_bytes


def test_over_the_limit_is_out_of_memory():
    with TensorBytes(limit=4000) as counter:
        kept = torch.zeros(900)
        with pytest.raises(MemoryError, match="4400 bytes are over the limit of 4000"):
            torch.zeros(200)
        assert counter.live_bytes == kept.nbytes


def test_storages_resized_without_an_operation_are_followed():
    with TensorBytes(follow_sizes=True) as following, TensorBytes() as plain:
        tensor = torch.zeros(100)
        tensor.untyped_storage().resize_(0)
        other = torch.zeros(50)
        assert (following.live_bytes, plain.live_bytes) == (200, 600)
        tensor.untyped_storage().resize_(400)
        other += 1
        assert (following.live_bytes, plain.live_bytes) == (600, 600)
    assert following.peak_bytes == 600
    tensor.untyped_storage().resize_(0)
    assert following.live_bytes == 600
