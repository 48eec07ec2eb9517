"""Profiling a training: three of its steps, with fresh weights, predicted and measured."""

from opensora_cli.core.progress import Reporter
from opensora_cli.engine.components.hardware import Hardware
from opensora_cli.engine.mem_profile.feasible import why_not_measured
from opensora_cli.engine.mem_profile.report import (
    BufferUse,
    Part,
    StageProfile,
    Timeline,
    module_shares,
)
from opensora_cli.engine.train.estimate import TrainingMemory, estimate_training, measure_training
from opensora_cli.settings.train import TrainSettings


def profile_training(
    settings: TrainSettings, hardware: Hardware, *, reporter: Reporter
) -> tuple[StageProfile, TrainingMemory, BufferUse | None]:
    """Return the profile of a step, what it is made from, and how the buffer of activations was used.

    A step that would not fit, or would take too long, is only predicted.

    Args:
        settings: the training.
        hardware: where it runs.
        reporter: shown progress.
    """
    with reporter.stage("predict", total=1, unit="step") as progress:
        predicted = estimate_training(settings)
        progress.advance()
    reason = why_not_measured(predicted.peak_bytes, hardware)
    if reason is not None:
        return _profile(predicted, None, reason), predicted, _buffer(predicted)
    with reporter.stage("measure", total=1, unit="step") as progress:
        measured = measure_training(settings)
        progress.advance()
    return _profile(predicted, measured, None), measured, _buffer(measured)


def _profile(predicted: TrainingMemory, measured: TrainingMemory | None, reason: str | None) -> StageProfile:
    shown = measured or predicted
    parts = [
        Part(name=name, predicted_bytes=size, measured_bytes=None if measured is None else measured.at_peak[name])
        for name, size in predicted.at_peak.items()
    ]
    held = None if measured is None else measured.held_for_backward
    parts.append(Part(name="held for backward", predicted_bytes=predicted.held_for_backward, measured_bytes=held))
    modules = module_shares(
        {f"model.{name}": sizes for name, sizes in shown.by_weight.items()}, shown.activations_by_module
    )
    return StageProfile(
        name="training step",
        parts=tuple(parts),
        predicted_bytes=predicted.peak_bytes,
        measured_bytes=None if measured is None else measured.peak_bytes,
        not_measured=reason,
        modules=modules,
        timeline=Timeline.of(shown.counter),
    )


def _buffer(memory: TrainingMemory) -> BufferUse | None:
    if not memory.buffer_bytes:
        return None
    return BufferUse(size_bytes=memory.buffer_bytes, used_bytes=memory.buffer_used_bytes)
