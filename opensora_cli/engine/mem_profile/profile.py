"""`osora mem-profile`: predicted and measured memory of a generation or a training."""

from contextlib import ExitStack
from pathlib import Path

from opensora_cli.core.device_names import GPU
from opensora_cli.core.files import require_writable
from opensora_cli.core.progress import Reporter
from opensora_cli.engine.components.hardware import Hardware, out_of_memory_reported, pick_hardware
from opensora_cli.engine.generate.dry_run import chain_to_plan
from opensora_cli.engine.generate.plan import VIDEO
from opensora_cli.engine.generate.predicted import predict_known_time
from opensora_cli.engine.generate.request import resolve
from opensora_cli.engine.mem_profile.batch import training_batch
from opensora_cli.engine.mem_profile.compare import attention_costs, compare_generation, compare_training
from opensora_cli.engine.mem_profile.files import profile_figure, recorded_history, write_snapshot
from opensora_cli.engine.mem_profile.measured_stages import profile_generation, why_not_measured
from opensora_cli.engine.mem_profile.report import MemProfile, Part, StageProfile, Timeline, module_shares
from opensora_cli.engine.train.early import warn_of_missing_inputs
from opensora_cli.engine.train.estimate import STEP, TrainingMemory, estimate_training, measure_training
from opensora_cli.engine.train.fake_ranks import BUFFERS
from opensora_cli.engine.train.memory import largest_batch_shape
from opensora_cli.engine.train.objectives import find_objective
from opensora_cli.engine.train.plan import RankMemory, judge, settings_on
from opensora_cli.media.plots import new_figure, write_figure
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
    files = {"snapshot": settings.snapshot, "plot": settings.plot}
    paths = {kind: path for kind, path in files.items() if path is not None}
    for path in paths.values():
        require_writable(Path(path), overwrite=settings.overwrite)
    if settings.plot is not None:
        new_figure()  # a missing matplotlib fails before the measurement
    if isinstance(what, GenerateRequest):
        what = resolve(what, reporter=reporter)
    hint = "profile fewer frames or a smaller batch with --set, or close what else uses the device"
    with out_of_memory_reported(hint=hint):
        if isinstance(what, TrainSettings):
            profile = _of_training(what, settings, paths, reporter, on)
        else:
            profile = _of_generation(what, settings, paths, reporter, on)
    if settings.plot is not None:
        write_figure(profile_figure(profile), settings.plot, replace=settings.overwrite)
    return profile


def _of_generation(
    what: GenerateSettings,
    settings: MemProfileSettings,
    files: dict[str, str],
    reporter: Reporter,
    on: PlannedMachine | None,
) -> MemProfile:
    chain = chain_to_plan(what, reporter=reporter, on=on)
    plan, hardware = chain.video, chain.video.hardware
    if others := ", ".join(role for role in chain.by_role if role != VIDEO):
        reporter.note(f"the verdict includes {others}, which is no part of the stages")
    with ExitStack() as stack:
        if settings.snapshot is not None:
            stack.enter_context(recorded_history(hardware.device))
        stages, counters = profile_generation(plan, runs=settings.runs, reporter=reporter)
        if settings.snapshot is not None:
            write_snapshot(Path(settings.snapshot), counters, device=hardware.device, replace=settings.overwrite)
    model, predicted = plan.settings.model, predict_known_time(chain, on)
    return MemProfile(
        verdict=chain.verdict(None if predicted is None else predicted.seconds),
        fits=None if chain.usable_bytes is None else chain.fits,
        host=chain.host,
        of=f"generating with {model.name}, {plan.width}x{plan.height}, {plan.settings.video.num_frames} frames",
        device=str(hardware.device),
        device_name=hardware.device_name,
        how=_how(hardware, "two sampling steps", measured=bool(counters)),
        stages=stages,
        notes=tuple(f"offload: {line}" for line in plan.offload.lines()),
        techniques=compare_generation(plan, reporter=reporter) if settings.compare else (),
        attention=attention_costs(hardware, model, reporter=reporter) if settings.compare else (),
        files=files,
    )


def _of_training(
    what: TrainSettings,
    settings: MemProfileSettings,
    files: dict[str, str],
    reporter: Reporter,
    on: PlannedMachine | None,
) -> MemProfile:
    if on is not None:
        what = settings_on(what, on)
    else:
        warn_of_missing_inputs(what, reporter)
    hardware, ranks = pick_hardware("cpu", "auto"), what.parallel.world_size
    with reporter.stage("predict", total=1, unit="step") as progress:
        predicted = estimate_training(what)
        progress.advance()
    reason = why_not_measured(predicted.peak_bytes, hardware)
    if on is not None:
        reason = f"{on.given} is not in this machine"
    elif ranks > 1:
        reason = f"this is the first of {ranks} ranks, and the others do not run"
    measured = None
    if reason is None:
        with reporter.stage("measure", total=1, unit="step") as progress:
            measured = measure_training(what, runs=settings.runs)
            progress.advance()
    judged = judge(what, RankMemory.of(predicted), machine=on)
    if settings.snapshot is not None:
        counters = [(measured or predicted).counter]
        write_snapshot(Path(settings.snapshot), counters, device=hardware.device, replace=settings.overwrite)
    limit = settings.memory_limit or judged.free_bytes or hardware.free_bytes
    compares_attention = settings.compare and what.trains_transformer
    devices = f", devices {what.parallel.describe(what.strategy)}" if ranks > 1 else ""
    steps = len(find_objective(what).measured_steps(what))
    return MemProfile(
        verdict=judged.verdict,
        fits=judged.fits,
        host=judged.host,
        of=f"training {what.target}, batch {largest_batch_shape(what).batch_size}{devices}",
        device=str(hardware.device) if on is None else GPU,
        device_name=hardware.device_name if on is None else on.gpu.device_name,
        how=_how(hardware, f"{steps} steps", measured=measured is not None),
        stages=(_training_stage(predicted, measured, reason),),
        techniques=compare_training(what, hardware, reporter=reporter) if settings.compare else (),
        attention=attention_costs(hardware, what.model, reporter=reporter) if compares_attention else (),
        batch=training_batch(what, limit_bytes=limit, reporter=reporter) if settings.adaptive_batch else None,
        files=files,
    )


def _training_stage(predicted: TrainingMemory, measured: TrainingMemory | None, reason: str | None) -> StageProfile:
    """Return the profile of a step; a step that would not fit, or would take too long, is only predicted."""
    shown, held = measured or predicted, "held for backward"
    real = {} if measured is None else {**measured.at_peak, held: measured.held_for_backward}
    return StageProfile(
        name=STEP,
        parts=tuple(
            Part(name=name, predicted_bytes=size, measured_bytes=real.get(name))
            for name, size in {**predicted.at_peak, held: predicted.held_for_backward}.items()
            if name != BUFFERS or size
        ),
        predicted_bytes=predicted.peak_bytes,
        measured_bytes=None if measured is None else measured.peak_bytes,
        not_measured=reason,
        modules=module_shares(
            {f"model.{name}": sizes for name, sizes in shown.by_weight.items()}, shown.activations_by_module
        ),
        timeline=Timeline.of(shown.counter),
        times=shown.times,
    )


def _how(hardware: Hardware, steps: str, *, measured: bool) -> str:
    if not measured:
        return "nothing: all is predicted"
    counted = "what torch's allocator had in use"
    if hardware.device.type == "cpu":
        counted = "on the CPU, without a GPU: the bytes of all tensors, counted as they came and went"
    return f"{counted}; {steps}, {_RANDOM}"
