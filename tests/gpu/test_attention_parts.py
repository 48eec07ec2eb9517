"""Attention by parts of the keys with torch's CUDA kernels, and between several devices over NCCL."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from attention_parts import gradients, merged
from rank_processes import run_as_ranks
from shared_tokens import attention_errors
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from opensora_cli.core.attention import PartKernel
from opensora_cli.core.device import collective_backends
from opensora_cli.models.attention import torch_kernels as kernels
from opensora_cli.models.attention.torch_kernels import MATH_PARTS, part_kernel
from opensora_cli.parallel.shares import shares

CUTS = (33, 70, 1)
"""None fills a tile of the kernels."""


def random_qkv(dtype: torch.dtype, width: int) -> list[Tensor]:
    """Return q, k, v and the gradient of the result."""
    generator = torch.Generator().manual_seed(0)
    lengths = (45, sum(CUTS), sum(CUTS), 45)
    return [torch.randn(2, 3, length, width, generator=generator).to("cuda", dtype) for length in lengths]


def kernel_of(name: str, *tensors: Tensor) -> PartKernel:
    """Return a kernel, which must be the one that is chosen where torch allows no other."""
    if name == "math":
        return MATH_PARTS
    backend = {"flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION}[name]
    with sdpa_kernel(backend):
        kernel = part_kernel(*tensors)
    assert kernel is {"flash": kernels._FLASH, "efficient": kernels._EFFICIENT}[name]
    return kernel


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    [
        ("flash", torch.bfloat16, 0.03),
        ("flash", torch.float16, 0.004),
        ("efficient", torch.bfloat16, 0.03),
        ("efficient", torch.float32, 0.004),
        ("math", torch.float32, 0.004),
    ],
)
def test_parts_make_the_whole(name: str, dtype: torch.dtype, tolerance: float, width: int) -> None:
    q, k, v, gradient = random_qkv(dtype, width)
    exact = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    expected = functional.scaled_dot_product_attention(*exact)
    expected_grads = torch.autograd.grad(expected, exact, gradient.double())

    kernel = kernel_of(name, q, k, v)
    out, lse = merged(kernel, q, k, v, CUTS)
    assert (out.double() - expected).abs().max() < tolerance
    grads = gradients(kernel, gradient, q, k, v, out.to(dtype), lse, CUTS)
    for found, exact_grad in zip(grads, expected_grads, strict=True):
        assert (found.double() - exact_grad).abs().max() < 2 * tolerance


def test_what_is_chosen() -> None:
    assert part_kernel(*random_qkv(torch.bfloat16, 128)[:3]) is kernels._FLASH
    assert part_kernel(*random_qkv(torch.float32, 128)[:3]) is kernels._EFFICIENT
    assert part_kernel(*random_qkv(torch.bfloat16, 12)[:3]) is MATH_PARTS
    assert part_kernel(*random_qkv(torch.float64, 128)[:3]) is MATH_PARTS


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("scheme", ["ring", "ulysses", "both"])
def test_between_devices(tmp_path: Path, scheme: str) -> None:
    ranks = 4 if torch.cuda.device_count() >= 4 else 2
    if scheme == "both" and ranks < 4:
        pytest.skip("needs four CUDA devices")
    ring, ulysses = {"ring": (ranks, 1), "ulysses": (1, ranks), "both": (2, 2)}[scheme]
    place = f"file://{tmp_path / 'meeting_place'}"
    run_as_ranks(__file__, place, ring, ulysses, ranks=ranks)


def _compare(ring: int, ulysses: int) -> None:
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 0.004), (torch.bfloat16, 0.03)):
        tokens = shares(4 * ring * ulysses + 3, ring * ulysses)
        errors, dtypes = attention_errors(ring, ulysses, 7, tokens, dtype, 1.0, "cuda")
        assert max(errors) < 2 * tolerance
        assert dtypes == [dtype] * 4


if __name__ == "__main__":
    _, _place, _ring, _ulysses, _rank = sys.argv
    torch.cuda.set_device(int(_rank))
    dist.init_process_group(
        collective_backends("cuda"), init_method=_place, rank=int(_rank), world_size=int(_ring) * int(_ulysses)
    )
    _compare(int(_ring), int(_ulysses))
    dist.destroy_process_group()
    print("done")
