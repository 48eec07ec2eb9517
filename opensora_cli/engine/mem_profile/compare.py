"""Techniques that save memory, each measured against a run without it, and the cost of kinds of attention."""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from opensora_cli.core.attention import ATTENTION_KINDS, ComparedKernel
from opensora_cli.core.device import release_memory, timed
from opensora_cli.core.progress import Reporter
from opensora_cli.engine.components.attention import AttentionUse, why_unusable
from opensora_cli.engine.components.hardware import Hardware, is_out_of_memory
from opensora_cli.engine.estimate.generation import computes_modulation_first
from opensora_cli.engine.estimate.offload import DECODE, DENOISE, OffloadPlan
from opensora_cli.engine.generate.plan import Plan
from opensora_cli.engine.mem_profile.measured_stages import OUT_OF_MEMORY, try_stage, why_not_measured
from opensora_cli.engine.mem_profile.report import AttentionCost, Technique, mib
from opensora_cli.engine.train.estimate import STEP, estimate_training, measure_training
from opensora_cli.memory.monitor import peak_bytes
from opensora_cli.models.attention import BACKENDS
from opensora_cli.settings.components import ModelSettings
from opensora_cli.settings.devices import OffloadMode
from opensora_cli.settings.train import TrainSettings

LENGTHS = (512, 1024, 2048, 4096, 8192)
"""Numbers of tokens for the comparison of attention."""
_REPEATS = 3
_FEW_BLOCKS = 2
_MANY_TOKENS = 8192
_STEP, _HELD = "a training step", "what is held for backward"
_CHECKPOINTING, _ACTIVATION_OFFLOAD = "gradient checkpointing", "activation offload"
_MIXED_PRECISION = "mixed precision (bf16 autocast)"

Rows = Iterator[Technique]
Cost = tuple[int, float]
"""Bytes without offloaded activations, and seconds."""


def compare_training(settings: TrainSettings, hardware: Hardware, *, reporter: Reporter) -> tuple[Technique, ...]:
    """Return the effect of techniques on a training step. The techniques in the settings are ignored."""
    plain = settings.replace({"memory": {}, "precision.compute": "fp32"})
    return tuple(_counted(_training_rows(plain, hardware), reporter))


def compare_generation(plan: Plan, *, reporter: Reporter) -> tuple[Technique, ...]:
    """Return the effect of techniques on the stages of a generation. The plan's own offload is ignored."""
    all_tokens = plan.video_tokens + plan.settings.text.t5_max_length
    plain = OffloadPlan(host_weights=plan.offload.host_weights, chunk_tokens=all_tokens)
    return tuple(_counted(_generation_rows(plan.with_offload(plain)), reporter))


def _counted(rows: Rows, reporter: Reporter) -> Rows:
    with reporter.stage("compare", unit="techniques") as progress:
        for row in rows:
            yield row
            progress.advance()


def _training_rows(plain: TrainSettings, hardware: Hardware) -> Rows:
    reason = why_not_measured(estimate_training(plain).rank.peak_bytes, hardware)
    if reason is not None:
        for name in (_CHECKPOINTING, _ACTIVATION_OFFLOAD, _MIXED_PRECISION):
            yield Technique(name=name, reason=f"not measured: without it, {reason}")
        return
    step, held = _training_cost(plain)
    if plain.trains_transformer:
        checkpointed_step, checkpointed_held = _training_cost(plain.replace({"memory.checkpointing": "full"}))
        _, offloaded_held = _training_cost(plain.replace({"memory.checkpointing": "offload"}))
        of = f"{_HELD} with checkpointing, outside the host buffer"
        yield Technique.compared(_CHECKPOINTING, before=step, after=checkpointed_step, of=_STEP)
        yield Technique.compared(_CHECKPOINTING, before=held, after=checkpointed_held, of=_HELD)
        yield Technique.compared(_ACTIVATION_OFFLOAD, before=checkpointed_held, after=offloaded_held, of=of)
    else:
        for name in (_CHECKPOINTING, _ACTIVATION_OFFLOAD):
            yield Technique(name=name, reason="not measured: only the transformer's training has it")
    mixed_step, _ = _training_cost(plain.replace({"precision.compute": "bf16"}))
    yield Technique.compared(_MIXED_PRECISION, before=step, after=mixed_step, of=_STEP)


def _training_cost(settings: TrainSettings) -> tuple[Cost, Cost]:
    """Return the cost of a step, by its peak and by the bytes held for backward, without weights and states."""
    memory = measure_training(settings, runs=_REPEATS)
    seconds = memory.times[STEP].mean_s
    return (memory.rank.device_peak_bytes, seconds), (memory.held_for_backward, seconds)


def _generation_rows(plan: Plan) -> Rows:
    tokens = min(_MANY_TOKENS, max(plan.video_tokens // 4, 1))
    streamed = {"mode": OffloadMode.BLOCKS, "resident_blocks": _FEW_BLOCKS}
    changes: dict[str, tuple[str, dict[str, object]]] = {
        "block streaming": (
            DENOISE,
            {**streamed, "modulation_on_host": computes_modulation_first(plan.settings)},
        ),
        f"{tokens} tokens at a time": (DENOISE, {"chunk_tokens": tokens}),
        "weights stored in 8 bits": (DENOISE, {"fp8_storage": True}),
        "decoding 4 frames at a time": (DECODE, {"chunk_frames": 4}),
    }
    sizes = {stage.name: stage.total_bytes + stage.mapped_bytes for stage in plan.stages}
    costs: dict[str, Cost | None] = {}
    for name, (stage, change) in changes.items():
        problem = None
        if "mode" in change and plan.hardware.device.type == "cpu":
            problem = "without a GPU, its weights would move from the host's memory to the same"
        elif stage == DECODE and not plan.offloadable.frames:
            problem = "this autoencoder decodes all frames of a tile at once"
        elif stage not in sizes:
            problem = f"there is no stage {stage}"
        elif reason := why_not_measured(sizes[stage], plan.hardware):
            problem = f"without it, {reason}"
        if problem is None:
            if stage not in costs:
                costs[stage] = _stage_cost(plan, stage)
            changed = replace(plan, offload=replace(plan.offload, **change))  # type: ignore[arg-type]
            before, after = costs[stage], _stage_cost(changed, stage)
            if before is not None and after is not None:
                yield Technique.compared(name, before=before, after=after, of=f"the stage {stage}")
                continue
        yield Technique(name=name, reason=f"not measured: {problem or OUT_OF_MEMORY}")


def _stage_cost(plan: Plan, stage: str) -> Cost | None:
    """Return peak bytes and seconds of a stage; None means that memory was not enough."""
    measured = try_stage(plan, stage, runs=1)
    return None if measured is None else (measured.peak_bytes, measured.times[stage].mean_s)


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
