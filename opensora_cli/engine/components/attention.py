"""Which attention a run computes with: what was asked for, or the fastest that works, tried and timed on the device.

That a library is installed, and imports, says little: its kernels may be for another torch, GPU or dtype. So a backend
counts as there when a small product on the run's device and in its dtype agrees with `math`.
"""

import logging
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.backends import cuda

from opensora_cli.core.attention import AttentionBackend
from opensora_cli.core.attention_kinds import ATTENTION_KINDS
from opensora_cli.core.documents import Document
from opensora_cli.core.exceptions import HardwareError
from opensora_cli.engine.components.attention_times import (
    AttentionShape,
    AttentionTimes,
    Clock,
    RememberedTimes,
    time_attention,
)
from opensora_cli.models.attention import attention_backend
from opensora_cli.settings.enums import AttentionChoice

_HOPPER = 9
_TOKENS = 77
"""Of the product that is tried: they fill no tile of a kernel."""
_HEADS = 2
_TOLERANCE = 0.05
"""Of the norm of the difference over that of the result. In bfloat16 gradients are off by a hundredth; a wrong layout,
scale or kernel is off by more than the whole.
"""


class AttentionPlan(Document):
    """What computes attention, and why."""

    backend: str
    reason: str
    candidates: tuple[str, ...] = ()
    """The backends that are timed when the run begins, of which `backend` is the one without that; none: it is
    decided.
    """

    def line(self) -> str:
        """Return it for people."""
        return f"{self.backend} ({self.reason})"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionUse:
    """What a run asks of its attention."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    gradients: bool = False
    in_parts: bool = False
    """As ring attention computes it."""


def choose_attention(
    choice: AttentionChoice,
    use: AttentionUse,
    *,
    setting: str,
    tries_device: bool = True,
    shape: AttentionShape | None = None,
) -> AttentionPlan:
    """Return what `choice`, of the setting of that name, means for a run.

    With a `shape`, `auto` is what was the fastest for it in an earlier run, or is to be timed (`timed_attention`);
    without, what is known to be fast. `tries_device`: whether this process may use the device. If not, or if there is
    none, only what is installed is looked at, and the processes that do use it choose for themselves.

    Raises HardwareError if the backend needs a library that is not installed, or does not work on the device.
    """
    # A plan may be for a device that this machine does not have.
    tries_device = tries_device and (use.device.type != "cuda" or torch.cuda.is_available())
    if choice is AttentionChoice.AUTO:
        return _best(use, shape, tries_device=tries_device)
    kind = ATTENTION_KINDS[choice]
    library = kind.library
    on_cpu = kind.needs_cuda and use.device.type != "cuda"
    if library is not None and library.version() is None:
        beside = ", and runs on CUDA devices alone" if on_cpu else ""
        raise HardwareError(
            f"{setting}={choice} needs {library.distribution}, which is not installed{beside}",
            hint=f"use auto, sdpa or math here; with a GPU: {library.install}" if on_cpu else library.install,
        )
    if on_cpu:
        raise HardwareError(
            f"{setting}={choice} runs on CUDA devices alone, and this is {use.device}", hint="use auto, sdpa or math"
        )
    problem = why_unusable(choice, use) if tries_device else None
    if problem is not None:
        raise HardwareError(f"{setting}={choice} does not work here: {problem}", hint="use auto, or sdpa")
    return AttentionPlan(backend=choice.value, reason="as set")


def timed_attention(
    planned: AttentionPlan,
    use: AttentionUse,
    shape: AttentionShape,
    *,
    note: Callable[[str], None],
    clock: Clock = time.perf_counter,
) -> AttentionPlan:
    """Return the fastest of the candidates of `choose_attention`, which are timed now, once for all later runs.

    `note` gets a line of a broken file of earlier times, which is written again.
    """
    if not planned.candidates:
        return planned
    remembered = RememberedTimes(shape, device=use.device, dtype=use.dtype)
    times, problems = remembered.read(note), list[str]()
    if times is None or times.fastest not in planned.candidates:
        with _quietly():
            times, problems = time_attention(planned.candidates, shape, device=use.device, dtype=use.dtype, clock=clock)
        if not times.milliseconds:
            reason = "; ".join(["auto: nothing could be timed", *problems])
            return AttentionPlan(backend=planned.backend, reason=reason)
        # Another process may have timed the same: the first one decides for all.
        others = remembered.read()
        if others is not None and others.fastest in planned.candidates:
            times = others
        else:
            remembered.write(times)
    return AttentionPlan(backend=times.fastest, reason="; ".join([_fastest(shape, times), *problems]))


def _fastest(shape: AttentionShape, times: AttentionTimes) -> str:
    return f"auto: the fastest here for {shape}: {times.line()}"


def _candidates(use: AttentionUse) -> list[str]:
    """Return what could be the fastest and needs no memory for pairs of tokens; of libraries those that are there."""
    return [
        name
        for name, kind in ATTENTION_KINDS.items()
        if kind.is_fused
        and (kind.in_parts or not use.in_parts)
        and (use.device.type == "cuda" or not kind.needs_cuda)
        and (kind.library is None or kind.library.version() is not None)
    ]


def _best(use: AttentionUse, shape: AttentionShape | None, *, tries_device: bool) -> AttentionPlan:
    names = _candidates(use)
    if len(names) == 1:
        return AttentionPlan(backend="sdpa", reason="auto: torch's fused kernels; the others are for GPUs")
    if not tries_device:
        return AttentionPlan(backend="sdpa", reason="auto: unless something faster works on the device")
    if shape is None:
        return _known_to_be_fast(use)
    times = RememberedTimes(shape, device=use.device, dtype=use.dtype).read()
    if times is not None and times.fastest in names and why_unusable(times.fastest, use) is None:
        return AttentionPlan(backend=times.fastest, reason=_fastest(shape, times))
    problems = {name: why_unusable(name, use) for name in names if name != "sdpa"}
    works = ("sdpa", *(name for name, problem in problems.items() if problem is None))
    reasons = [problem for problem in problems.values() if problem is not None]
    if len(works) == 1:
        return AttentionPlan(backend="sdpa", reason="; ".join([_OF_TORCH, *reasons]))
    timed = f"auto, unless another of {', '.join(works)} is faster: they are timed when the run begins"
    return AttentionPlan(backend="sdpa", reason="; ".join([timed, *reasons]), candidates=works)


_OF_TORCH = "auto: torch picks cuDNN's, flash or memory-efficient kernels by device and sizes"


def _known_to_be_fast(use: AttentionUse) -> AttentionPlan:
    problems = []
    for name in better_than_sdpa(use.device):
        problem = why_unusable(name, use)
        if problem is None:
            return AttentionPlan(backend=name, reason=f"auto: {_ADVANTAGES[name]}, and agrees with math here")
        problems.append(problem)
    return AttentionPlan(backend="sdpa", reason="; ".join([_OF_TORCH, *problems]))


_ADVANTAGES = {
    "flash3": "made for Hopper",
    "flash2": "this torch has no flash kernels of its own",
    "xformers": "this torch has no flash kernels of its own",
}


def better_than_sdpa(device: torch.device) -> tuple[str, ...]:
    """Return what `auto` takes on a CUDA device in place of `sdpa` where nothing is timed, if it works, best first.

    Torch's own flash kernels are those of FlashAttention 2, and on Hopper and Blackwell of data centres torch prefers
    cuDNN's by itself.
    """
    of_hopper = ("flash3",) if torch.cuda.get_device_capability(device)[0] == _HOPPER else ()
    has_flash = cuda.is_flash_attention_available()
    return of_hopper if has_flash else (*of_hopper, "flash2", "xformers")


def attention_stand_in(choice: AttentionChoice | str) -> AttentionBackend:
    """Return a backend that needs as much memory as `choice`, on any device and on fake tensors."""
    kind = ATTENTION_KINDS.get(choice)
    return attention_backend("sdpa" if kind is None or kind.is_fused else str(choice))


@lru_cache(maxsize=64)
def why_unusable(name: str, use: AttentionUse) -> str | None:
    """Return why a backend cannot be used, in a line; None: it can. It is tried once in a process."""
    kind = ATTENTION_KINDS.get(name)
    if kind is None:
        return f"{name} is not a backend"
    if kind.library is not None and kind.library.version() is None:
        return f"{kind.library.distribution} is not installed"
    if kind.needs_cuda and use.device.type != "cuda":
        return f"{name} runs on CUDA devices alone"
    if kind.half_only and use.dtype not in (torch.float16, torch.bfloat16):
        return f"{name} computes in float16 and bfloat16 alone"
    try:
        with _quietly():
            error = _error(attention_backend(name), use)
    except Exception as problem:
        # Libraries raise anything where their kernels do not fit.
        return _mismatch(name) or f"{name}: {' '.join(str(problem).split())[:200] or type(problem).__name__}"
    return None if error <= _TOLERANCE else f"{name} differs from math by {error:.0%}"


def _mismatch(name: str) -> str | None:
    try:
        with _quietly():
            mismatch = attention_backend(name).mismatch
            return None if mismatch is None else mismatch()
    except Exception:
        # It cannot even be imported: what was raised first says why.
        return None


def _error(backend: AttentionBackend, use: AttentionUse) -> float:
    """Return the largest relative difference from `math`, of the result and whatever else the run needs."""
    generator = torch.Generator().manual_seed(0)
    shape = 1, _HEADS, _TOKENS, use.head_dim
    *qkv, gradient = (torch.randn(shape, generator=generator).to(use.device, use.dtype) for _ in range(4))
    of = (_gradients if use.gradients else _result), (_parts if use.in_parts else _result)
    reference = attention_backend("math")
    return max(_difference(compute(backend, qkv, gradient), compute(reference, qkv, gradient)) for compute in set(of))


_Tried = Callable[[AttentionBackend, list[Tensor], Tensor], tuple[Tensor, ...]]


def _result(attention: AttentionBackend, qkv: list[Tensor], gradient: Tensor) -> tuple[Tensor, ...]:
    with torch.no_grad():
        return (attention(*qkv),)


def _gradients(attention: AttentionBackend, qkv: list[Tensor], gradient: Tensor) -> tuple[Tensor, ...]:
    with torch.inference_mode(False), torch.enable_grad():
        leaves = [tensor.clone().requires_grad_() for tensor in qkv]
        out = attention(*leaves)
        return out.detach(), *torch.autograd.grad(out, leaves, gradient)


def _parts(attention: AttentionBackend, qkv: list[Tensor], gradient: Tensor) -> tuple[Tensor, ...]:
    assert attention.part_kernel is not None, "settings without it are refused"
    kernel = attention.part_kernel(qkv[0], qkv[1], qkv[2])
    with torch.no_grad():
        out, lse = kernel.attend(qkv[0], qkv[1], qkv[2])
        return out, lse, *kernel.gradients(gradient, qkv[0], qkv[1], qkv[2], out, lse)


def _difference(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    pairs = [(one.double(), other.double()) for one, other in zip(found, expected, strict=True)]
    errors = [float((one - other).norm() / other.norm()) for one, other in pairs]
    # A comparison with NaN would let it pass.
    return max(error if error == error else float("inf") for error in errors)


@contextmanager
def _quietly() -> Iterator[None]:
    """Keep what libraries log and warn of when they are imported off the terminal: it is reported in a line."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
