"""`precision.tf32`: the switches of torch inside a run, and their state after it."""

from collections.abc import Iterator

import pytest
import torch

from opensora_cli.core.device import tf32_in_use, tf32_products

# Its switches work without a GPU.
CUDA = torch.device("cuda")


def flags() -> tuple[str, str, str, bool, bool, str]:
    """Return the state of each of torch's switches; they must not contradict each other."""
    backends = torch.backends
    return (
        backends.cuda.matmul.fp32_precision,
        backends.cudnn.conv.fp32_precision,
        backends.cudnn.rnn.fp32_precision,
        backends.cuda.matmul.allow_tf32,
        backends.cudnn.allow_tf32,
        torch.get_float32_matmul_precision(),
    )


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = flags()
    yield
    assert flags() == before


def nothing(line: str) -> None:
    pytest.fail(f"reported: {line}")


@pytest.mark.parametrize(("allowed", "expected"), [(True, "tf32"), (False, "ieee")])
def test_products_and_convolutions_are_set_together_and_restored(allowed, expected):
    with tf32_products(allowed, CUDA, note=nothing):
        found = flags()
    assert found[0] == expected
    assert (found[1] == "tf32", found[2] == "tf32", *found[3:5]) == (allowed,) * 4
    assert found[5] == ("high" if allowed else "highest")


def test_without_a_choice_or_a_gpu_nothing_changes():
    before, notes = flags(), []
    with tf32_products(None, CUDA, note=nothing), tf32_products(True, torch.device("cpu"), note=notes.append):
        assert flags() == before
    assert notes == ["precision.tf32=true has no effect on the device cpu"]
    assert tf32_in_use(torch.device("cpu")) is None


def test_the_sidecar_records_what_is_in_use_on_gpus_that_have_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert tf32_in_use(CUDA) == {"products": False, "convolutions": True}
    with tf32_products(True, CUDA, note=nothing):
        assert tf32_in_use(CUDA) == {"products": True, "convolutions": True}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert tf32_in_use(CUDA) is None
