"""Choose the attention backend of a run: the requested backend, or the first of a fixed order that works.

An installed library proves little: its kernels may be built for another torch, GPU or dtype. A backend counts as usable
when a small product on the device of the run, in its dtype, agrees with `math`.
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from opensora_cli.core.attention import ATTENTION_KINDS, AttentionBackend
from opensora_cli.core.device import capability, has_gpu, is_gpu
from opensora_cli.core.documents import Document
from opensora_cli.core.exceptions import HardwareError
from opensora_cli.engine.components.hardware import Hardware
from opensora_cli.models.attention import BACKENDS
from opensora_cli.models.attention.torch_kernels import math
from opensora_cli.parallel.shares import MeshShape
from opensora_cli.settings.devices import AttentionChoice
from opensora_cli.settings.generate import GenerateSettings

_HOPPER = 9
_TOKENS = 77
"""Sequence length of the small product; it fills no tile of a kernel."""
_HEADS = 2
_TOLERANCE = 0.05
"""Largest norm of the difference from `math`, relative to the norm of the result. Gradients in bfloat16 differ by one
percent; a wrong layout, scale or kernel differs by more than the whole.
"""


class AttentionPlan(Document):
    """Backend that computes attention, and the reason for the choice."""

    backend: str
    reason: str

    def line(self) -> str:
        """Return the plan as a line of text."""
        return f"{self.backend} ({self.reason})"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionUse:
    """Requirements of a run on its attention backend."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    gradients: bool = False
    in_parts: bool = False
    """Whether ring attention computes parts and merges them."""


def choose_attention(
    choice: AttentionChoice, use: AttentionUse, *, setting: str, tries_device: bool = True
) -> AttentionPlan:
    """Return the backend for `choice`, the value of the setting named `setting`.

    A process that may not use the device, or a machine without it, only checks which libraries are installed; the ranks
    that compute choose again. Raises HardwareError if the backend does not work on the device.
    """
    # A plan can be for a device that this machine does not have.
    tries_device = tries_device and (not is_gpu(use.device) or has_gpu())
    if choice is AttentionChoice.AUTO:
        return _first_usable(use, setting=setting, tries_device=tries_device)
    problem = why_unusable(choice, use) if tries_device else _why_unavailable(choice, use)
    if problem is not None:
        library, hint = ATTENTION_KINDS[choice].library, "use auto, sdpa or math"
        if library is not None and library.version() is None and is_gpu(use.device):
            hint = library.install
        raise HardwareError(f"{setting}={choice} does not work here: {problem}", hint=hint)
    return AttentionPlan(backend=choice.value, reason="as set")


def attention_order(device: torch.device) -> tuple[str, ...]:
    """Return the backends that `auto` tries on a device, in this order; it uses the first one that works.

    `flash3` is made for Hopper GPUs. With `sdpa` torch picks cuDNN's kernels or those of FlashAttention 2, so that
    `cudnn` gains nothing.
    """
    return ("flash3", "sdpa") if is_gpu(device) and capability(device)[0] == _HOPPER else ("sdpa",)


def _first_usable(use: AttentionUse, *, setting: str, tries_device: bool) -> AttentionPlan:
    if not tries_device:
        reason = _reason("sdpa", use) if not is_gpu(use.device) else "unless the device has a faster one"
        return AttentionPlan(backend="sdpa", reason=f"auto: {reason}")
    problems: list[str] = []
    for name in attention_order(use.device):
        if (problem := why_unusable(name, use)) is None:
            return AttentionPlan(backend=name, reason="; ".join([f"auto: {_reason(name, use)}", *problems]))
        problems.append(problem)
    raise HardwareError(
        f"{setting}=auto finds no backend that works on {use.device}: {'; '.join(problems)}",
        hint="osora env-check tests the device and its libraries",
    )


def _reason(name: str, use: AttentionUse) -> str:
    if not is_gpu(use.device):
        return "torch's fused kernels; the others need a GPU"
    if name == "flash3":
        return "made for Hopper GPUs"
    return "torch picks cuDNN's, flash or memory-efficient kernels by device and size"


def keep_attention(planned: AttentionPlan, backend: str | None, use: AttentionUse) -> AttentionPlan:
    """Return the plan for latents that `backend` began to compute: the same backend if it works, else `planned`.

    Another backend rounds differently, and a resumed run must end bitwise identical to an uninterrupted one.
    """
    if backend in (None, planned.backend) or why_unusable(str(backend), use) is not None:
        return planned
    return AttentionPlan(backend=str(backend), reason="auto: the backend of the run that this one continues")


def attention_stand_in(choice: AttentionChoice | str) -> AttentionBackend:
    """Return a backend that needs as much memory as `choice`, on any device and on fake tensors."""
    kind = ATTENTION_KINDS.get(choice)
    return BACKENDS["sdpa" if kind is None or kind.is_fused else str(choice)]


def _why_unavailable(name: str, use: AttentionUse) -> str | None:
    """Return the reason why a backend cannot work, or None if only a trial can tell."""
    kind = ATTENTION_KINDS.get(name)
    if kind is None:
        return f"{name} is not a backend"
    if kind.needs_gpu and not is_gpu(use.device):
        return f"{name} runs on CUDA devices only, and this is {use.device}"
    if use.in_parts and not kind.in_parts:
        return f"{name} does not work in a ring"
    if kind.library is not None and kind.library.version() is None:
        return f"{kind.library.distribution} is not installed"
    if kind.half_only and use.dtype not in (torch.float16, torch.bfloat16):
        return f"{name} computes in float16 and bfloat16 only"
    return None


@lru_cache(maxsize=64)
def why_unusable(name: str, use: AttentionUse) -> str | None:
    """Return the reason why a backend cannot be used, in one line, or None. A process tries each backend once."""
    problem = _why_unavailable(name, use)
    if problem is not None:
        return problem
    try:
        with _silenced():
            error = _error(BACKENDS[name], use)
    except Exception as problem:
        # Libraries raise exceptions of any type if their kernels do not fit.
        return f"{name}: {' '.join(str(problem).split())[:200] or type(problem).__name__}"
    return None if error <= _TOLERANCE else f"{name} differs from math by {error:.0%}"


def _error(backend: AttentionBackend, use: AttentionUse) -> float:
    """Return the largest relative difference from `math` over the results, gradients and parts that the run needs."""
    generator = torch.Generator().manual_seed(0)
    shape = 1, _HEADS, _TOKENS, use.head_dim
    given = [torch.randn(shape, generator=generator).to(use.device, use.dtype) for _ in range(4)]
    pairs = zip(_results(backend, use, given), _results(math, use, given), strict=True)
    errors = [float((found - expected).norm() / expected.norm()) for found, expected in pairs]
    # NaN compares as neither larger nor smaller.
    return max(error if error == error else float("inf") for error in errors)


def _results(attention: AttentionBackend, use: AttentionUse, given: list[Tensor]) -> list[Tensor]:
    q, k, v, gradient = given
    if use.gradients:
        with torch.inference_mode(False), torch.enable_grad():
            leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
            out = attention(*leaves)
            results = [out.detach(), *torch.autograd.grad(out, leaves, gradient)]
    with torch.no_grad():
        if not use.gradients:
            results = [attention(q, k, v)]
        if use.in_parts:
            assert attention.part_kernel is not None, "settings without it are refused"
            kernel = attention.part_kernel(q, k, v)
            out, lse = kernel.attend(q, k, v)
            results += [out, lse, *kernel.gradients(gradient, q, k, v, out, lse)]
    return [result.double() for result in results]


@contextmanager
def _silenced() -> Iterator[None]:
    """Hide the log messages and warnings of libraries that are imported; the caller reports them in one line."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def attention_use(settings: GenerateSettings, hardware: Hardware, mesh: MeshShape) -> AttentionUse:
    """Return the requirements of one rank on its attention backend."""
    head_dim = settings.model.hidden_size // settings.model.num_heads
    return AttentionUse(device=hardware.device, dtype=hardware.dtype, head_dim=head_dim, in_parts=mesh.ring > 1)
