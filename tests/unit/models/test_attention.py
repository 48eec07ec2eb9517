"""The attention functions and their registry."""

import pytest
import torch

from opensora_cli.core.exceptions import RequestError
from opensora_cli.models.attention import attention_backend, math, sdpa


def test_sdpa_equals_math():
    q, k, v = torch.randn(3, 2, 4, 7, 8, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(sdpa(q, k, v), math(q, k, v), atol=1e-6)


def test_math_is_softmax_of_scaled_products():
    q, k = torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 2, 4)
    q[..., 0], k[0, 0, 0, 0] = 2.0, 3.0
    v = torch.tensor([[[[1.0], [0.0]]]])
    assert math(q, k, v).item() == pytest.approx(torch.tensor(2.0 * 3.0 / 2.0).sigmoid().item())


def test_math_keeps_fp32_under_autocast():
    q, k, v = torch.randn(3, 1, 2, 5, 8, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = math(q, k, v)
    assert torch.equal(inside, math(q, k, v))


def test_math_returns_the_dtype_of_values():
    q, k, v = torch.ones(3, 1, 1, 2, 4, dtype=torch.bfloat16)
    assert math(q, k, v).dtype == torch.bfloat16


def test_registry():
    assert attention_backend("sdpa") is sdpa
    assert attention_backend("math") is math


def test_unknown_backend_names_the_nearest():
    with pytest.raises(RequestError, match=r"attention='spda' .*sdpa or math.*mean 'sdpa'"):
        attention_backend("spda")
