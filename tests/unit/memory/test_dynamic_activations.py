"""Offloading above a share of the device's memory."""

import pytest
import torch
from tiny_transformer import assert_same, gradients, inputs, transformer

from opensora_cli.memory.checkpointing import set_grad_checkpoint
from opensora_cli.memory.dynamic_activations import DynamicActivationManager, MemorySample, used_and_total


class Device:
    """A device of 100 bytes, whose use follows a script."""

    def __init__(self, *used: int) -> None:
        self._used = list(used)
        self.asked: list[str] = []

    def __call__(self, device: torch.device) -> tuple[int, int]:
        self.asked.append(device.type)
        return (self._used.pop(0) if len(self._used) > 1 else self._used[0]), 100


def manager(*used: int, threshold: float = 0.8) -> DynamicActivationManager:
    made = DynamicActivationManager(threshold, read_memory=Device(*used))
    made.setup_buffer(10**5, torch.float32)
    return made


def test_the_default_threshold_is_80_percent():
    assert DynamicActivationManager().threshold == 0.8
    for wrong in (-0.1, 1.1, 80):
        with pytest.raises(ValueError, match=f"threshold={wrong} must be a share"):
            DynamicActivationManager(wrong)


def test_only_what_is_saved_above_the_threshold_is_moved():
    held = manager(79, 80, 81, 50)
    tensors = [torch.full((size,), float(size)) for size in (1, 2, 3, 4)]
    handles = [held.offload(tensor) for tensor in tensors]
    assert (held.used_bytes, held.outside_bytes) == (12, 4 * (1 + 2 + 4))
    backs = [held.onload(handle) for handle in reversed(handles)][::-1]
    assert all(torch.equal(*pair) for pair in zip(backs, tensors, strict=True))
    # What stayed was not copied in either direction.
    assert [back.data_ptr() == x.data_ptr() for back, x in zip(backs, tensors, strict=True)] == [
        True,
        True,
        False,
        True,
    ]
    assert held.copied_to_host == held.copied_to_device == 12
    del handles
    assert (held.used_bytes, held.outside_bytes) == (0, 0)


def test_the_profile_has_peak_history_and_counts():
    held = manager(50, 90, 95, 10)
    assert held.memory_profiling().history == ()
    handles = [held.offload(torch.ones(5)) for _ in range(4)]
    profile = held.memory_profiling()
    assert (profile.peak_bytes, profile.total_bytes) == (95, 100)
    assert profile.history == (
        MemorySample(50, 0, False),
        MemorySample(90, 0, True),
        MemorySample(95, 20, True),
        MemorySample(10, 40, False),
    )
    assert (profile.buffer_bytes, profile.buffer_used_bytes, profile.buffer_peak_bytes) == (400_000, 40, 40)
    assert (profile.offloaded, profile.stayed) == (2, 2)
    for handle in reversed(handles):
        held.onload(handle)
    assert held.memory_profiling().buffer_used_bytes == 0
    assert held._read_memory.asked == ["cpu"] * 4


@pytest.mark.parametrize("threshold", [0.0, 0.5, 1.0])
def test_gradients_are_those_without_offload(deterministic, threshold):
    model = transformer(depth=3)
    arguments = inputs(model)
    expected = gradients(model, arguments)
    held = manager(*range(0, 100, 9), threshold=threshold)
    with set_grad_checkpoint(model, activations=held):
        for _ in range(2):
            assert_same(gradients(model, arguments), expected)
    profile = held.memory_profiling()
    offloaded, stayed = profile.offloaded > 0, profile.stayed > 0
    assert (offloaded, stayed) == {0.0: (True, True), 0.5: (True, True), 1.0: (False, True)}[threshold]
    assert (held.used_bytes, held.outside_bytes) == (0, 0)
    assert held.copied_to_host == held.copied_to_device


def test_another_dtype_stays_without_a_reading():
    held = manager(90)
    x = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    with held.offloading():
        loss = x.square().sum()
    assert held.outside_bytes == 6
    assert held.memory_profiling().history == ()
    loss.backward()


def test_reading_a_real_device():
    used, total = used_and_total(torch.device("cpu"))
    assert 0 < used < total
