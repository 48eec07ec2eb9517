"""`osora mem-profile`: predicted and measured memory of a generation or a training."""

from contextlib import ExitStack
from pathlib import Path

from opensora_cli.core.device_names import GPU
from opensora_cli.core.files import require_writable
from opensora_cli.core.progress import Reporter
from opensora_cli.engine.components.hardware import Hardware, out_of_memory_reported, pick_hardware
from opensora_cli.engine.generate.chain import VIDEO
from opensora_cli.engine.generate.dry_run import chain_to_plan
from opensora_cli.engine.generate.predicted import predict_known_time
from opensora_cli.engine.generate.request import resolve
from opensora_cli.engine.mem_profile.batch import training_batch
from opensora_cli.engine.mem_profile.chart import profile_figure
from opensora_cli.engine.mem_profile.compare import attention_costs, compare_generation, compare_training
from opensora_cli.engine.mem_profile.measured_stages import profile_generation, why_not_measured
from opensora_cli.engine.mem_profile.report import (
    MemProfile,
    Part,
    StageProfile,
    Timeline,
    module_shares,
    timed_parts,
)
from opensora_cli.engine.mem_profile.snapshot import recorded_history, write_snapshot
from opensora_cli.engine.train.activations import largest_batch_shape
from opensora_cli.engine.train.early import warn_of_missing_inputs
from opensora_cli.engine.train.estimate import STEP, TrainingMemory, estimate_training, measure_training
from opensora_cli.engine.train.fake_ranks import BUFFERS
from opensora_cli.engine.train.objectives import find_objective
from opensora_cli.engine.train.plan import judge, settings_on
from opensora_cli.engine.train.rank_memory import RankMemory
from opensora_cli.media.plots import new_figure, write_figure
from opensora_cli.memory.counting import TensorBytes
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.hardware import PlannedMachine
from opensora_cli.settings.load import GenerateRequest
from opensora_cli.settings.tools import MemProfileSettings
from opensora_cli.settings.train import TrainSettings

_RANDOM = "random weights of the model's sizes, since memory does not depend on their values"


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
    for path in _files(settings).values():
        require_writable(Path(path), overwrite=settings.overwrite)
    if settings.plot is not None:
        new_figure()  # a missing matplotlib fails before the measurement
    if isinstance(what, GenerateRequest):
        what = resolve(what, reporter=reporter)
    with out_of_memory_reported(
        hint="profile fewer frames or a smaller batch with --set, or close what else uses the device"
    ):
        if isinstance(what, TrainSettings):
            profile = _of_training(what, settings, reporter, on)
        else:
            profile = _of_generation(what, settings, reporter, on)
    if settings.plot is not None:
        write_figure(profile_figure(profile), settings.plot, replace=settings.overwrite)
    return profile


def _of_generation(
    what: GenerateSettings, settings: MemProfileSettings, reporter: Reporter, on: PlannedMachine | None
) -> MemProfile:
    chain = chain_to_plan(what, reporter=reporter, on=on)
    plan, hardware = chain.video, chain.video.hardware
    if others := ", ".join(dict.fromkeys(role for role, _ in chain.jobs if role != VIDEO)):
        reporter.note(f"the verdict includes {others}, which is no part of the stages")
    with ExitStack() as stack:
        if settings.snapshot is not None:
            stack.enter_context(recorded_history(hardware.device))
        stages, measured = profile_generation(plan, runs=settings.runs, reporter=reporter)
        _write_snapshot(settings, [result.counter for result in measured], hardware)
    model = plan.settings.model
    predicted = predict_known_time(chain, on)
    return MemProfile(
        verdict=chain.verdict(None if predicted is None else predicted.seconds),
        fits=None if chain.usable_bytes is None else chain.fits,
        host=chain.host,
        of=f"generating with {model.name}, {plan.width}x{plan.height}, {plan.settings.video.num_frames} frames",
        device=str(hardware.device),
        device_name=hardware.device_name,
        how=_how(hardware, "two sampling steps", measured=bool(measured)),
        stages=stages,
        notes=tuple(f"offload: {line}" for line in plan.offload.lines()),
        techniques=compare_generation(plan, reporter=reporter) if settings.compare else (),
        attention=attention_costs(hardware, model, reporter=reporter) if settings.compare else (),
        files=_files(settings),
    )


def _of_training(
    what: TrainSettings, settings: MemProfileSettings, reporter: Reporter, on: PlannedMachine | None
) -> MemProfile:
    if on is not None:
        what = settings_on(what, on)
    else:
        warn_of_missing_inputs(what, reporter)
    parallel, has_peers = what.parallel, what.parallel.world_size > 1
    hardware, steps = pick_hardware("cpu", "auto"), len(find_objective(what).measured_steps(what))
    stage, predicted, memory = _profile_training(what, hardware, on, runs=settings.runs, reporter=reporter)
    judged = judge(what, RankMemory.of(predicted, what), machine=on)
    _write_snapshot(settings, [memory.counter], hardware)
    limit = settings.memory_limit or judged.free_bytes or hardware.free_bytes
    compares_attention = settings.compare and what.trains_transformer
    devices = f", devices {parallel.describe(what.strategy)}" if has_peers else ""
    return MemProfile(
        verdict=judged.verdict,
        fits=judged.fits,
        host=judged.host,
        of=f"training {what.target}, batch {largest_batch_shape(what).batch_size}{devices}",
        device=str(hardware.device) if on is None else GPU,
        device_name=hardware.device_name if on is None else on.gpu.device_name,
        how=_how(hardware, f"{steps} steps", measured=stage.measured_bytes is not None),
        stages=(stage,),
        techniques=compare_training(what, hardware, reporter=reporter) if settings.compare else (),
        attention=attention_costs(hardware, what.model, reporter=reporter) if compares_attention else (),
        batch=training_batch(what, limit_bytes=limit, reporter=reporter) if settings.adaptive_batch else None,
        files=_files(settings),
    )


def _profile_training(
    settings: TrainSettings, hardware: Hardware, on: PlannedMachine | None, *, runs: int, reporter: Reporter
) -> tuple[StageProfile, TrainingMemory, TrainingMemory]:
    """Return the profile of a step, timed in `runs` runs, its predicted memory, and the memory that is shown: measured
    if possible.

    A step that would not fit, or would take too long, is only predicted.
    """
    with reporter.stage("predict", total=1, unit="step") as progress:
        predicted = estimate_training(settings)
        progress.advance()
    reason = why_not_measured(predicted.peak_bytes, hardware)
    if on is not None:
        reason = f"{on.given} is not in this machine"
    elif settings.parallel.world_size > 1:
        reason = f"this is the first of {settings.parallel.world_size} ranks, and the others do not run"
    if reason is not None:
        return _training_stage(predicted, None, reason), predicted, predicted
    with reporter.stage("measure", total=1, unit="step") as progress:
        measured = measure_training(settings, runs=runs)
        progress.advance()
    return _training_stage(predicted, measured, None), predicted, measured


def _training_stage(predicted: TrainingMemory, measured: TrainingMemory | None, reason: str | None) -> StageProfile:
    shown = measured or predicted
    parts = [
        Part(name=name, predicted_bytes=size, measured_bytes=None if measured is None else measured.at_peak[name])
        for name, size in predicted.at_peak.items()
        if name != BUFFERS or size
    ]
    held = None if measured is None else measured.held_for_backward
    parts.append(Part(name="held for backward", predicted_bytes=predicted.held_for_backward, measured_bytes=held))
    modules = module_shares(
        {f"model.{name}": sizes for name, sizes in shown.by_weight.items()}, shown.activations_by_module
    )
    return StageProfile(
        name=STEP,
        parts=tuple(parts),
        predicted_bytes=predicted.peak_bytes,
        measured_bytes=None if measured is None else measured.peak_bytes,
        not_measured=reason,
        modules=modules,
        timeline=Timeline.of(shown.counter),
        times=timed_parts(shown.times),
    )


def _how(hardware: Hardware, steps: str, *, measured: bool) -> str:
    if not measured:
        return "nothing: all is predicted"
    counted = "what torch's allocator had in use"
    if hardware.device.type == "cpu":
        counted = "on the CPU, without a GPU: the bytes of all tensors, counted as they came and went"
    return f"{counted}; {steps}, {_RANDOM}"


def _files(settings: MemProfileSettings) -> dict[str, str]:
    return {kind: path for kind, path in (("snapshot", settings.snapshot), ("plot", settings.plot)) if path is not None}


def _write_snapshot(settings: MemProfileSettings, counters: list[TensorBytes], hardware: Hardware) -> None:
    if settings.snapshot is not None:
        write_snapshot(Path(settings.snapshot), counters, device=hardware.device, replace=settings.overwrite)
