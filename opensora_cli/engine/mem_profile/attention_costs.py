"""What attention costs: standard, memory-efficient and flash, at growing lengths."""

import time
import warnings
from collections.abc import Callable, Sequence

import torch

from opensora_cli.core.attention import ComparedKernel
from opensora_cli.core.progress import Reporter
from opensora_cli.engine.components.hardware import Hardware, is_out_of_memory, release_memory
from opensora_cli.engine.mem_profile.report import AttentionCost, mib
from opensora_cli.memory.counting import TensorBytes
from opensora_cli.models.attention import attention_backend, backend_names
from opensora_cli.settings.components import ModelSettings

LENGTHS = (512, 1024, 2048, 4096, 8192)
_REPEATS = 3


def attention_costs(
    hardware: Hardware, model: ModelSettings, *, reporter: Reporter, lengths: Sequence[int] = LENGTHS
) -> tuple[AttentionCost, ...]:
    """Return memory and time of one attention, for each kind and length, without gradients.

    Args:
        hardware: where, and in which dtype.
        model: whose number of heads, and whose width of each.
        reporter: told of stages.
        lengths: tokens.
    """
    found = []
    head_dim = model.hidden_size // model.num_heads
    kernels = {kind: kernel for name in backend_names() for kind, kernel in attention_backend(name).compared}
    with reporter.stage("attention", total=len(kernels) * len(lengths), unit="runs") as progress:
        for kind, kernel in kernels.items():
            for tokens in lengths:
                found.append(_cost(kind, kernel, hardware, (1, model.num_heads, tokens, head_dim)))
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
            # Torch warns of every kernel that it does not have; the table says so too.
            warnings.simplefilter("ignore")
            memory, seconds = memory_and_time(lambda: kernel.attend(q, k, v), device=hardware.device, repeats=_REPEATS)
    except RuntimeError as error:
        reason = "out of memory" if is_out_of_memory(error) else "this device has no such kernel for these sizes"
        return AttentionCost(kind=kind, tokens=tokens, reason=reason)
    return AttentionCost(kind=kind, tokens=tokens, memory_bytes=memory, seconds=seconds)


def memory_and_time(run: Callable[[], object], *, device: torch.device, repeats: int) -> tuple[int, float]:
    """Return the bytes that `run` takes at its peak, and the shortest of its times, in seconds.

    Memory is the allocator's on CUDA, and that of counted tensors on a CPU, in a run of its own, which also warms up.
    """
    is_cuda = device.type == "cuda"
    before = torch.cuda.memory_allocated(device) if is_cuda else 0
    if is_cuda:
        torch.cuda.reset_peak_memory_stats(device)
        run()
        torch.cuda.synchronize(device)
        memory = torch.cuda.max_memory_allocated(device) - before
    else:
        with TensorBytes() as counter:
            result = run()
            del result
        memory = counter.peak_bytes
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        if is_cuda:
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return int(memory), min(times)
