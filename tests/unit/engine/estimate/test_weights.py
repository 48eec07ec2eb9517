"""Weights that a CPU maps from their files, from the headers of the files alone."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from opensora_cli.engine.components.weights import Component, find_weights
from opensora_cli.engine.estimate.weights import FileWeights, file_weights
from opensora_cli.settings.load import load_preset

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SETTINGS = load_preset("demo", prompt="any")


def found(component, path, dtype=FP32, count=100):
    weights = replace(find_weights(SETTINGS), paths={} if path is None else {component: path})
    return file_weights(SETTINGS, weights, {component: count}, dtype)[component]


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        ({BF16: 100}, FileWeights(100, 0, BF16)),
        # A few weights in another dtype are copies.
        ({BF16: 90, FP32: 10}, FileWeights(100, 10, BF16)),
        # A file may have weights that the model does not use.
        ({FP32: 500}, FileWeights(100, 0, FP32)),
    ],
)
def test_a_file_counts_by_the_dtype_of_most_weights(tmp_path, dtypes, expected):
    path = tmp_path / "vae.safetensors"
    save_file({str(dtype): torch.zeros(count, dtype=dtype) for dtype, count in dtypes.items()}, path)
    assert found(Component.VAE, path) == expected


def test_missing_files_are_in_bfloat16_and_broken_ones_copies(tmp_path):
    assert found(Component.VAE, None) == FileWeights(100, 0, BF16)
    (tmp_path / "broken.safetensors").write_bytes(b"no header")
    assert found(Component.VAE, tmp_path / "broken.safetensors") == FileWeights(100, 100, None)
    # In float16 T5 keeps some weights in float32, so that all are cast when they are loaded.
    assert found(Component.T5, None, FP16) == FileWeights(100, 100, None)


def test_memory_of_mapped_and_of_cast_weights():
    weights = FileWeights(100, 10, BF16)
    assert weights.held(BF16) == (20, 180)
    assert weights.held(FP32) == (400, 0)
    assert weights.mapped_bytes == 180
    assert [weights.can_be_cast_later(dtype) for dtype in (BF16, FP32)] == [False, True]
    assert not FileWeights(100, 100, None).can_be_cast_later(FP32)
