"""The attention function that a transformer block is handed, and a small registry of the ways to compute it."""

import difflib
import math as _math
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from opensora_cli.core.exceptions import RequestError

_LARGEST_MATRIX = 1 << 26
"""Weights that the reference holds at a time where it can choose."""


class AttentionFn(Protocol):
    """Softmax attention without a mask, scaled by D^-0.5."""

    def __call__(self, q_BHND: Tensor, k_BHMD: Tensor, v_BHMD: Tensor, /) -> Tensor:
        """Return softmax(q k^T D^-0.5) v with shape (B, H, N, D), in the dtype of `v_BHMD`.

        Args:
            q_BHND: queries.
            k_BHMD: keys; M equals N in self-attention.
            v_BHMD: values.
        """


def sdpa(q_BHND: Tensor, k_BHMD: Tensor, v_BHMD: Tensor, /) -> Tensor:
    """Compute attention with torch's own fused kernels: the default."""
    return functional.scaled_dot_product_attention(q_BHND, k_BHMD, v_BHMD)


def math(q_BHND: Tensor, k_BHMD: Tensor, v_BHMD: Tensor, /) -> Tensor:
    """Compute attention as written (Vaswani et al. 2017, eq. 1), in at least fp32: the reference for all others.

    With gradients it holds the whole (B, H, N, M) matrix of weights, so it is meant for short sequences. Without, it
    takes as many queries at a time as keep the matrix to some 256 MiB.
    """
    dtype = torch.promote_types(v_BHMD.dtype, torch.float32)
    batch, heads, num_queries, width = q_BHND.shape
    block = num_queries
    if not torch.is_grad_enabled():
        block = max(1, _LARGEST_MATRIX // (batch * heads * k_BHMD.shape[2]))
    # Autocast would run both products in bf16, which is what a reference must not do.
    with torch.autocast(q_BHND.device.type, enabled=False):
        k, v = k_BHMD.to(dtype), v_BHMD.to(dtype)
        outs = []
        for queries in torch.split(q_BHND, block, dim=2):
            weights = (queries.to(dtype) @ k.transpose(-2, -1) * (1.0 / _math.sqrt(width))).softmax(dim=-1)
            outs.append((weights @ v).to(v_BHMD.dtype))
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)


_BACKENDS: dict[str, AttentionFn] = {"sdpa": sdpa, "math": math}


def attention_backend(name: str) -> AttentionFn:
    """Return the attention function called `name`.

    Raises:
        RequestError: there is no such backend; the message names the nearest one.
    """
    if name in _BACKENDS:
        return _BACKENDS[name]
    nearest = difflib.get_close_matches(name, _BACKENDS, n=1, cutoff=0.5)
    meant = f"; did you mean {nearest[0]!r}?" if nearest else ""
    raise RequestError(f"attention={name!r} is not a backend: use {' or '.join(_BACKENDS)}{meant}")
