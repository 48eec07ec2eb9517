"""The attention backends as plain data: what settings, choices and checks know of each before anything is imported.

Their code is `models/attention/NAME.py`. A backend without a row here is known to the registry alone.
"""

import importlib.metadata
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Library:
    """The package that has a backend's kernels."""

    module: str
    distribution: str
    install: str
    """The line that installs it."""

    def version(self) -> str | None:
        """Return the installed version; None: it is not installed.

        The module is looked for, not imported: that takes seconds, and may end the process where builds do not fit.
        """
        if importlib.util.find_spec(self.module) is None:
            return None
        try:
            return importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            return "of unknown version"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionKind:
    """A way to compute attention."""

    description: str
    """In settings and help."""
    in_parts: bool = True
    """Whether it returns the log-sum-exp of scores, with which ring attention merges parts."""
    half_only: bool = False
    """Whether it computes in float16 and bfloat16 alone."""
    needs_cuda: bool = False
    """Whether it has kernels for CUDA devices alone; these are tried on the device before they are used."""
    is_fused: bool = True
    """Whether it takes memory for tokens, and none for pairs of tokens."""
    library: Library | None = None
    """None: torch has its kernels."""


ATTENTION_KINDS = {
    "sdpa": AttentionKind(description="torch's fused kernels, of which torch picks one for device and sizes"),
    "cudnn": AttentionKind(description="cuDNN's kernels, by way of torch", half_only=True, needs_cuda=True),
    "flash2": AttentionKind(
        description="FlashAttention 2, of the package flash-attn",
        half_only=True,
        needs_cuda=True,
        library=Library("flash_attn", "flash-attn", "pip install flash-attn --no-build-isolation"),
    ),
    "flash3": AttentionKind(
        description="FlashAttention 3, for Hopper GPUs",
        half_only=True,
        needs_cuda=True,
        # It has no release of its own yet.
        library=Library(
            "flash_attn_interface",
            "flash_attn_3",
            "git clone https://github.com/Dao-AILab/flash-attention && pip install --no-build-isolation "
            "./flash-attention/hopper",
        ),
    ),
    "xformers": AttentionKind(
        description="memory-efficient attention of the package xformers",
        needs_cuda=True,
        library=Library("xformers", "xformers", "pip install xformers==0.0.35 'torch==2.10.*'"),
    ),
    "math": AttentionKind(
        description="as written, in float32: the reference, for short sequences",
        is_fused=False,
    ),
    "bf16_products": AttentionKind(
        description="two products in bfloat16: quicker on a CPU for some hundred tokens",
        in_parts=False,
        is_fused=False,
    ),
}


def attention_problems(name: str, *, setting: str, ring_degree: int | None, is_fp32: bool) -> Iterator[str]:
    """Yield what contradicts a choice of `attention`, each with its fix; of `auto` nothing does.

    `is_fp32`: the run computes in float32 whatever the device.
    """
    kind = ATTENTION_KINDS.get(name)
    if kind is None:
        return
    if (ring_degree or 1) > 1 and not kind.in_parts:
        others = [other for other, each in ATTENTION_KINDS.items() if each.in_parts]
        yield (
            f"{setting}={name} has no log-sum-exp, which parallel.ring_degree={ring_degree} merges parts with: "
            f"use auto, {', '.join(others[:-1])} or {others[-1]}, or parallel.ulysses_degree"
        )
    if kind.half_only and is_fp32:
        yield f"{setting}={name} computes in float16 and bfloat16 alone, not in float32: use one of these, or sdpa"
