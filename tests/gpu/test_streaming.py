"""Block streaming on a CUDA device: copies on a stream of their own, from memory that is page-locked."""

import gc

import pytest
import torch
from tiny_transformer import inputs, transformer
from torch import nn
from torch.profiler import ProfilerActivity, profile

from opensora_cli.memory import host_weights
from opensora_cli.memory.eight_bit import store_in_fp8
from opensora_cli.memory.host_weights import slot_bytes, streaming_bytes
from opensora_cli.memory.streaming import stream_blocks

DEVICE = torch.device("cuda:0")
SOURCES = ["pinned", "mapped"]
PATHS = ("double_blocks", "single_blocks")


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


def model_on_device(*, blocks_on_host, hidden=256, dtype=torch.bfloat16):
    model = transformer(depth=4, single=9, hidden=hidden).to(dtype).requires_grad_(False).eval()
    if not blocks_on_host:
        return model.to(DEVICE)
    stacks = [getattr(model, path) for path in PATHS]
    for path in PATHS:
        setattr(model, path, nn.ModuleList())
    model.to(DEVICE)
    for path, stack in zip(PATHS, stacks, strict=True):
        setattr(model, path, stack)
    return model


def stacks_of(model):
    return [getattr(model, path) for path in PATHS]


def blocks_of(model):
    return [block for stack in stacks_of(model) for block in stack]


def velocity(model, *, seed=0, tokens=12):
    arguments = inputs(model, seed=seed, tokens=tokens)
    return model(**{name: value.to(DEVICE) for name, value in arguments.items()})


@pytest.fixture(scope="module")
def expected():
    """Of seeds 0 to 7."""
    with torch.inference_mode():
        model = model_on_device(blocks_on_host=False)
        return [velocity(model, seed=seed) for seed in range(8)]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("resident", [1, 2, 3, 6, 12, 13])
def test_many_passes(expected, resident, source):
    """Tiny kernels after large copies, without a pause: a race would show as wrong numbers."""
    model = model_on_device(blocks_on_host=True)
    with stream_blocks(stacks_of(model), device=DEVICE, resident=resident, source=source):
        results = [velocity(model, seed=turn % 8) for turn in range(100)]
    wrong = [turn for turn, result in enumerate(results) if not torch.equal(result, expected[turn % 8])]
    assert wrong == []
    assert all(weight.device.type == "cpu" for block in blocks_of(model) for weight in block.parameters())


@pytest.mark.parametrize("source", SOURCES)
def test_long_kernels_before_short_copies(source):
    """A slot must not be filled while the block before it still computes."""
    plain, model = (model_on_device(blocks_on_host=on_host) for on_host in (False, True))
    wanted = [velocity(plain, seed=seed, tokens=8192) for seed in range(4)]
    with stream_blocks(stacks_of(model), device=DEVICE, resident=2, source=source):
        results = [velocity(model, seed=seed, tokens=8192) for seed in range(4)]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(results, wanted, strict=True))


def requested():
    """Return the bytes that tensors ask for: the allocator adds the rest of a piece that is too small to split."""
    return torch.cuda.memory_stats(DEVICE)["requested_bytes.all.current"]


@pytest.fixture
def locked(monkeypatch):
    """The tensors whose pages are locked; torch's `is_pinned` knows of its own allocator's memory alone."""
    tensors = []

    lock_pages, unlock_pages = host_weights.lock_pages, host_weights.unlock_pages

    def lock(memory, device):
        tensors.append(memory)
        return lock_pages(memory, device)

    def unlock(memory, device):
        tensors[:] = [each for each in tensors if each is not memory]
        unlock_pages(memory, device)

    monkeypatch.setattr(host_weights, "lock_pages", lock)
    monkeypatch.setattr(host_weights, "unlock_pages", unlock)
    return tensors


def lie_in(locked, model):
    places = [range(each.data_ptr(), each.data_ptr() + each.nbytes) for each in locked]
    return any(
        weight.data_ptr() in place for place in places for block in blocks_of(model) for weight in block.parameters()
    )


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("resident", [1, 2, 5, 13])
def test_device_memory(expected, locked, resident, source):
    # What the libraries keep for themselves was taken for `expected`.
    assert len(expected) == 8
    model = model_on_device(blocks_on_host=True)
    gc.collect()
    before = requested()
    sizes = [slot_bytes(block) for block in blocks_of(model)]
    with stream_blocks(stacks_of(model), device=DEVICE, resident=resident, source=source) as figures:
        held = requested() - before
        assert figures.device_bytes == streaming_bytes(sizes, resident=resident)
        assert figures.device_bytes <= held <= figures.device_bytes + 512 * resident
        assert lie_in(locked, model) == (source == "pinned" and resident < len(sizes))
        velocity(model)
    assert requested() == before
    assert locked == []


def test_8_bits(expected):
    plain, model = (model_on_device(blocks_on_host=on_host) for on_host in (False, True))
    for block in [*blocks_of(plain), *blocks_of(model)]:
        store_in_fp8(block)
    with stream_blocks(stacks_of(model), device=DEVICE, resident=2):
        for seed in range(4):
            ours = velocity(model, seed=seed)
            assert torch.equal(ours, velocity(plain, seed=seed))
            assert not torch.equal(ours, expected[seed])


@pytest.mark.parametrize("source", SOURCES)
def test_copies_run_under_computation(source, tmp_path):
    """A trace has copies to the device that begin and end while a kernel of another stream runs, or several do."""
    model = model_on_device(blocks_on_host=True, hidden=1024)
    with stream_blocks(stacks_of(model), device=DEVICE, resident=2, source=source):
        velocity(model, tokens=8192)
        torch.cuda.synchronize(DEVICE)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
            velocity(model, tokens=8192)
            torch.cuda.synchronize(DEVICE)
    events = [event for event in trace.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    copies = [event for event in events if "HtoD" in event.name]
    kernels = [event for event in events if "Memcpy" not in event.name and "Memset" not in event.name]
    assert copies
    assert kernels
    copied_us = sum(event.time_range.elapsed_us() for event in copies)
    hidden_us = sum(_overlap_us(copy.time_range, kernel.time_range) for copy in copies for kernel in kernels)
    assert hidden_us > 0.5 * copied_us, f"{hidden_us} of {copied_us} us"


def _overlap_us(copy, kernel):
    return max(0.0, min(copy.end, kernel.end) - max(copy.start, kernel.start))
