"""The floating point type of layers."""

import pytest
import torch
from torch import nn

from opensora_cli.engine.train.precision import autocast
from opensora_cli.settings.train_loop import Compute


@pytest.mark.parametrize(("compute", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_layers_compute_as_chosen_and_weights_stay(compute: str, dtype: torch.dtype) -> None:
    layer = nn.Linear(4, 4)
    with autocast(Compute(compute), torch.device("cpu")):
        result = layer(torch.ones(2, 4))
    assert (result.dtype, layer.weight.dtype) == (dtype, torch.float32)
    result.float().sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32
