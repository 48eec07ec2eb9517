"""Memory and time of each attention backend, by the number of tokens."""

import warnings
from collections.abc import Sequence

import torch

from opensora_cli.core.attention import ATTENTION_KINDS, ComparedKernel
from opensora_cli.core.device import release_memory, timed
from opensora_cli.core.progress import Reporter
from opensora_cli.engine.components.attention import AttentionUse, why_unusable
from opensora_cli.engine.components.hardware import Hardware, is_out_of_memory
from opensora_cli.engine.mem_profile.report import AttentionCost, mib
from opensora_cli.memory.monitor import peak_bytes
from opensora_cli.models.attention import BACKENDS
from opensora_cli.settings.components import ModelSettings

LENGTHS = (512, 1024, 2048, 4096, 8192)
"""Numbers of tokens."""
_REPEATS = 3


def attention_costs(
    hardware: Hardware, model: ModelSettings, *, reporter: Reporter, lengths: Sequence[int] = LENGTHS
) -> tuple[AttentionCost, ...]:
    """Return memory and time of one attention, for each kind and each length in tokens, without gradients."""
    found = []
    head_dim = model.hidden_size // model.num_heads
    use = AttentionUse(device=hardware.device, dtype=hardware.dtype, head_dim=head_dim)
    kernels = [(name, *compared) for name, backend in BACKENDS.items() for compared in backend.compared]
    with reporter.stage("attention", total=len(kernels) * len(lengths), unit="runs") as progress:
        for name, kind, kernel in kernels:
            # CUDA kernels may be missing or unsuitable. For torch's own kernels, running them shows this.
            problem = why_unusable(name, use) if ATTENTION_KINDS[name].needs_gpu else None
            for tokens in lengths:
                shape = 1, model.num_heads, tokens, head_dim
                missing = None if problem is None else AttentionCost(kind=kind, tokens=tokens, reason=problem)
                found.append(missing or _cost(kind, kernel, hardware, shape))
                release_memory(hardware.device)
                progress.advance()
    return tuple(found)


def _cost(kind: str, kernel: ComparedKernel, hardware: Hardware, shape: tuple[int, int, int, int]) -> AttentionCost:
    tokens = shape[2]
    # Scores and weights of all pairs, in fp32 and in the dtype of the inputs.
    standard_bytes = shape[1] * tokens**2 * 2 * (4 + hardware.dtype.itemsize)
    if kernel.holds_all_scores and standard_bytes > hardware.free_bytes:
        reason = f"about {mib(standard_bytes)} needed, {mib(hardware.free_bytes)} free"
        return AttentionCost(kind=kind, tokens=tokens, reason=reason)
    if not kernel.runs_on_cpu and hardware.device.type == "cpu":
        return AttentionCost(kind=kind, tokens=tokens, reason="torch has no such kernel for a CPU")
    try:
        q, k, v = (torch.zeros(shape, dtype=hardware.dtype, device=hardware.device) for _ in range(3))
        with torch.inference_mode(), warnings.catch_warnings():
            # Torch warns about every missing kernel, and the table shows them.
            warnings.simplefilter("ignore")
            memory = peak_bytes(lambda: kernel.attend(q, k, v), device=hardware.device)
            seconds = min(timed(lambda: kernel.attend(q, k, v), hardware.device) for _ in range(_REPEATS))
    except RuntimeError as error:
        reason = "out of memory" if is_out_of_memory(error) else "this device has no such kernel for these sizes"
        return AttentionCost(kind=kind, tokens=tokens, reason=reason)
    return AttentionCost(kind=kind, tokens=tokens, memory_bytes=memory, seconds=seconds)
