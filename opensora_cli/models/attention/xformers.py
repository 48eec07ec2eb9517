"""Memory-efficient attention (Rabe & Staats 2021) of the package xformers, whose tensors have tokens before heads."""

import json
from pathlib import Path

import torch
from torch import Tensor

from opensora_cli.core.attention import AttentionBackend, ComparedKernel, PartKernel, transposed


def _attend(q_BHND: Tensor, k_BHMD: Tensor, v_BHMD: Tensor, /) -> Tensor:
    from xformers.ops import memory_efficient_attention

    scale = q_BHND.shape[-1] ** -0.5
    out_BNHD: Tensor = memory_efficient_attention(*transposed(q_BHND, k_BHMD, v_BHMD), p=0.0, scale=scale)
    return out_BNHD.transpose(1, 2)


def _attend_part(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    from xformers.ops import memory_efficient_attention_forward_requires_grad

    scale = q.shape[-1] ** -0.5
    out_BNHD, lse = memory_efficient_attention_forward_requires_grad(*transposed(q, k, v), p=0.0, scale=scale)
    # Some kernels of xformers pad queries.
    return out_BNHD.transpose(1, 2), lse[..., : q.shape[2]]


def _gradients(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    from xformers.ops import memory_efficient_attention_backward

    gradient, q, k, v, out = transposed(gradient, q, k, v, out)
    scale = q.shape[-1] ** -0.5
    return transposed(
        *memory_efficient_attention_backward(gradient, out, lse.contiguous(), q, k, v, p=0.0, scale=scale)
    )


def _built_for() -> str | None:
    """Return a description if xformers' kernels were built for another torch; its import works even then."""
    import xformers as library

    try:
        metadata = Path(library.__file__).with_name("cpp_lib.json").read_text(encoding="utf-8")
        version = str(json.loads(metadata)["version"]["torch"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if version.split(".")[:2] == torch.__version__.split(".")[:2]:
        return None
    return f"xformers {library.__version__} was built for torch {version}, and this is torch {torch.__version__}"


_PARTS = PartKernel(_attend_part, _gradients)
xformers = AttentionBackend(
    "xformers",
    _attend,
    part_kernel=lambda q, k, v: _PARTS,
    compared=(("xformers", ComparedKernel(_attend, runs_on_cpu=False)),),
    mismatch=_built_for,
)
