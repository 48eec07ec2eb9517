"""The estimate of the stages of a plan, and the bytes that a stage really takes."""

from collections.abc import Callable
from dataclasses import replace

import torch

from opensora_cli.engine.estimate.generation import estimate_generation
from opensora_cli.engine.estimate.offload import OffloadPlan, StageMemory
from opensora_cli.engine.generate.plan import Plan
from opensora_cli.engine.mem_profile.measured_stages import measure_stage
from opensora_cli.memory.counting import TensorBytes


def estimated(plan: Plan, offload: OffloadPlan, device_type: str = "cpu") -> dict[str, StageMemory]:
    """Return the stages of a plan by name, as estimated with another offload."""
    hardware = replace(plan.hardware, device=torch.device(device_type))
    stages = estimate_generation(replace(plan, hardware=hardware, files=None), offload)
    return {stage.name: stage for stage in stages}


def beside_weights(stage: StageMemory) -> int:
    return stage.data_bytes + stage.activation_bytes


def measured(plan: Plan, offload: OffloadPlan, name: str) -> int:
    """Return the peak of a stage with random weights beside these."""
    found = measure_stage(replace(plan, offload=offload), name)
    return found.peak_bytes - found.counter.marks[0].live_bytes


def counted(run: Callable[[], object]) -> int:
    """Return the peak of the bytes of the tensors that a function makes."""
    with torch.inference_mode(), TensorBytes() as counter:
        kept = run()
        del kept
    return counter.peak_bytes
