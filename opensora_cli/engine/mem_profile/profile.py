"""`osora mem-profile`: predicted and measured memory of a generation or a training."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from opensora_cli.core.attention import ATTENTION_KINDS, ComparedKernel
from opensora_cli.core.device import device_module, is_gpu, release_memory, timed
from opensora_cli.core.device_names import GPU
from opensora_cli.core.exceptions import HardwareError
from opensora_cli.core.files import atomic_path, require_writable
from opensora_cli.core.progress import Reporter
from opensora_cli.engine.components.attention import AttentionUse, why_unusable
from opensora_cli.engine.components.hardware import Hardware, is_out_of_memory, out_of_memory_reported, pick_hardware
from opensora_cli.engine.generate.dry_run import chain_to_plan
from opensora_cli.engine.generate.plan import VIDEO
from opensora_cli.engine.generate.predicted import predict_known_time
from opensora_cli.engine.generate.request import resolve
from opensora_cli.engine.launch.rank import device_type
from opensora_cli.engine.mem_profile.measured_stages import profile_generation, why_not_measured
from opensora_cli.engine.mem_profile.report import (
    AttentionCost,
    LargestBatch,
    MemProfile,
    StageProfile,
    Timeline,
    mib,
    module_shares,
    parts_of,
    profile_figure,
)
from opensora_cli.engine.train.early import warn_of_missing_inputs
from opensora_cli.engine.train.estimate import STEP, estimate_training, measure_training
from opensora_cli.engine.train.memory import largest_batch_shape, with_batch_size
from opensora_cli.engine.train.objectives import find_objective
from opensora_cli.engine.train.plan import judge, settings_on
from opensora_cli.media.plots import new_figure, write_figure
from opensora_cli.memory.monitor import peak_bytes
from opensora_cli.models.attention import BACKENDS
from opensora_cli.settings.components import ModelSettings
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.hardware import PlannedMachine
from opensora_cli.settings.load import GenerateRequest
from opensora_cli.settings.tools import MemProfileSettings
from opensora_cli.settings.train import TrainSettings

LARGEST_BATCH = 1024
"""Largest batch that is tried."""
ATTENTION_LENGTHS = (512, 1024, 2048, 4096, 8192)
"""Numbers of tokens whose attention is compared."""
_REPEATS = 3
_MOST_EVENTS = 200_000
_HELD = "held for backward"
_PREDICTED = "nothing: all is predicted"


def mem_profile(
    what: GenerateRequest | GenerateSettings | TrainSettings,
    settings: MemProfileSettings,
    *,
    reporter: Reporter,
    on: PlannedMachine | None = None,
) -> MemProfile:
    """Profile a generation or a training; no weights are needed. On GPUs of another machine, `on`, all is predicted.

    Raises:
        RequestError: the request contradicts itself.
        FileProblem: a file of settings is missing or broken.
        OutputError: a file exists already, or cannot be written.
        HardwareError: the device is missing, or has not enough memory.
    """
    for path in (settings.snapshot, settings.plot):
        if path is not None:
            require_writable(Path(path), overwrite=settings.overwrite)
    if settings.plot is not None:
        new_figure()  # a missing matplotlib fails before the measurement
    if isinstance(what, GenerateRequest):
        what = resolve(what, reporter=reporter)
    hint = "profile fewer frames or a smaller batch with --set, or close what else uses the device"
    with out_of_memory_reported(hint=hint):
        if isinstance(what, TrainSettings):
            profile = _profile_training(what, settings, reporter, on)
        else:
            profile = _profile_generation(what, settings, reporter, on)
    if settings.plot is not None:
        write_figure(profile_figure(profile), settings.plot, replace=settings.overwrite)
    return profile


def _profile_generation(
    what: GenerateSettings, settings: MemProfileSettings, reporter: Reporter, on: PlannedMachine | None
) -> MemProfile:
    chain = chain_to_plan(what, reporter=reporter, on=on)
    plan, hardware, model = chain.video, chain.video.hardware, chain.settings.model
    if others := ", ".join(role for role in chain.by_role if role != VIDEO):
        reporter.note(f"the verdict includes {others}, which is no part of the stages")
    with _recorded_history(settings, hardware):
        stages = profile_generation(plan, runs=settings.runs, reporter=reporter)
    predicted = predict_known_time(chain, on)
    return MemProfile(
        verdict=chain.verdict(None if predicted is None else predicted.seconds),
        fits=None if chain.usable_bytes is None else chain.fits,
        host=chain.host,
        of=f"generating with {model.name}, {plan.width}x{plan.height}, {plan.settings.video.num_frames} frames",
        device=str(hardware.device),
        device_name=hardware.device_name,
        how=_how(hardware, "two sampling steps") if any(stage.measured_bytes for stage in stages) else _PREDICTED,
        stages=stages,
        notes=tuple(f"offload: {line}" for line in plan.offload.lines()),
        attention=attention_costs(hardware, model, reporter=reporter) if settings.compare else (),
        files=_files(settings),
    )


def _profile_training(
    what: TrainSettings, settings: MemProfileSettings, reporter: Reporter, on: PlannedMachine | None
) -> MemProfile:
    if on is not None:
        what = settings_on(what, on)
    else:
        warn_of_missing_inputs(what, reporter)
    hardware, ranks = pick_hardware("cpu", "auto"), what.parallel.world_size
    with reporter.stage("predict", total=1, unit="step") as progress:
        predicted = estimate_training(what)
        progress.advance()
    if on is not None:
        reason: str | None = f"{on.given} is not in this machine"
    elif ranks > 1:
        reason = f"this is the first of {ranks} ranks, and the others do not run"
    else:
        reason = why_not_measured(predicted.rank.peak_bytes, hardware)
    measured = None
    if reason is None:
        with reporter.stage("measure", total=1, unit="step") as progress:
            measured = measure_training(what, runs=settings.runs)
            progress.advance()
    shown = measured or predicted
    judged = judge(what, predicted.rank, machine=on)
    limit = settings.memory_limit or judged.free_bytes or hardware.free_bytes
    devices = f", devices {what.parallel.describe(what.strategy)}" if ranks > 1 else ""
    kinds = {name: size for name, size in predicted.rank.at_peak.items() if size}
    held = None if measured is None else {**measured.rank.at_peak, _HELD: measured.held_for_backward}
    stage = StageProfile(
        name=STEP,
        parts=parts_of({**kinds, _HELD: predicted.held_for_backward}, held),
        predicted_bytes=predicted.rank.peak_bytes,
        measured_bytes=None if measured is None else measured.rank.peak_bytes,
        not_measured=reason,
        modules=module_shares(
            {f"model.{name}": sizes for name, sizes in shown.by_weight.items()}, shown.activations_by_module
        ),
        timeline=Timeline.of(shown.counter),
        times=shown.times,
    )
    steps = len(find_objective(what).measured_steps(what))
    return MemProfile(
        verdict=judged.verdict,
        fits=judged.fits,
        host=judged.host,
        of=f"training {what.target}, batch {largest_batch_shape(what).batch_size}{devices}",
        device=str(hardware.device) if on is None else GPU,
        device_name=hardware.device_name if on is None else on.gpu.device_name,
        how=_PREDICTED if measured is None else _how(hardware, f"{steps} steps"),
        stages=(stage,),
        batch=_training_batch(what, limit_bytes=limit, reporter=reporter) if settings.adaptive_batch else None,
        files=_files(settings),
    )


@contextmanager
def _recorded_history(settings: MemProfileSettings, hardware: Hardware) -> Iterator[None]:
    """Write the allocations inside the block to `settings.snapshot`, as PyTorch's allocator on a GPU records them."""
    if settings.snapshot is None:
        yield
        return
    if not is_gpu(hardware.device):
        raise HardwareError(
            f"snapshot={settings.snapshot} needs a GPU, whose allocator records it, and this is {hardware.device}",
            hint="use --plot FILE.png",
        )
    memory = device_module(hardware.device).memory
    # C++ frames would make the file many times as large, and slow down every allocation.
    memory._record_memory_history(max_entries=_MOST_EVENTS, stacks="python", clear_history=True)
    try:
        yield
        with atomic_path(Path(settings.snapshot), replace=settings.overwrite) as temporary:
            memory._dump_snapshot(str(temporary))
    finally:
        memory._record_memory_history(enabled=None)


def _how(hardware: Hardware, steps: str) -> str:
    on_cpu = hardware.device.type == "cpu"
    counted = "bytes of all tensors, on the CPU without a GPU" if on_cpu else "bytes in use in torch's allocator"
    return f"{counted}; {steps} with random weights, whose values do not affect memory"


def _files(settings: MemProfileSettings) -> dict[str, str]:
    files = {"snapshot": settings.snapshot, "plot": settings.plot}
    return {kind: path for kind, path in files.items() if path is not None}


def _training_batch(settings: TrainSettings, *, limit_bytes: int, reporter: Reporter) -> LargestBatch:
    """Predict the largest micro-batch of a rank, by the bytes of the verdict; the batch of the settings is ignored."""
    on_gpu = device_type(settings.device_name) != "cpu"
    with reporter.stage("batch", unit="attempts") as progress:

        def peak_of(size: int) -> int:
            memory = estimate_training(with_batch_size(settings, size)).rank
            progress.advance()
            return memory.needed_bytes(on_gpu=on_gpu)

        return largest_batch(peak_of, limit_bytes=limit_bytes)


def largest_batch(peak_of: Callable[[int], int | None], *, limit_bytes: int, most: int = LARGEST_BATCH) -> LargestBatch:
    """Search for the largest batch, up to `most`, whose peak is at most `limit_bytes`, by doubling and bisection.

    `peak_of` returns the bytes of a batch; None means that it ran out of memory.
    """
    peaks = {0: 0}

    def fits(size: int) -> bool:
        peak = peak_of(size)
        peaks[size] = peak or 0
        return peak is not None and peak <= limit_bytes

    best, size = 0, 1
    while size <= most and fits(size):
        best, size = size, size * 2
    too_large = min(size, most + 1)
    while too_large - best > 1:
        middle = (best + too_large) // 2
        best, too_large = (middle, too_large) if fits(middle) else (best, middle)
    return LargestBatch(batch_size=best, limit_bytes=limit_bytes, peak_bytes=peaks[best])


def attention_costs(
    hardware: Hardware, model: ModelSettings, *, reporter: Reporter, lengths: Sequence[int] = ATTENTION_LENGTHS
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
                found.append(missing or _attention_cost(kind, kernel, hardware, shape))
                release_memory(hardware.device)
                progress.advance()
    return tuple(found)


def _attention_cost(
    kind: str, kernel: ComparedKernel, hardware: Hardware, shape: tuple[int, int, int, int]
) -> AttentionCost:
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
