"""Activation functions of text encoders by their names in configurations."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional


def _quick_gelu(x: Tensor) -> Tensor:
    # An approximation of GELU: Hendrycks & Gimpel 2016, https://arxiv.org/abs/1606.08415, section 2.
    return x * torch.sigmoid(1.702 * x)


_tanh_gelu = partial(functional.gelu, approximate="tanh")

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_new": _tanh_gelu,
    "gelu_pytorch_tanh": _tanh_gelu,
    "quick_gelu": _quick_gelu,
    "silu": functional.silu,
    "swish": functional.silu,
}
