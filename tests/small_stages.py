"""Stages that fit anywhere, for plans whose estimate, which takes seconds on fake tensors, is not the subject."""

from opensora_cli.engine.estimate.offload import AUTOENCODER, DECODE, DENOISE, ENCODE, TEXT, OffloadPlan, StageMemory
from opensora_cli.engine.generate.plan import Plan
from opensora_cli.settings.devices import OffloadMode


def small_stages(plan: Plan, offload: OffloadPlan) -> tuple[StageMemory, ...]:
    kept = ((AUTOENCODER, 1),) if offload.mode is OffloadMode.NONE else ()
    stages = {name: StageMemory(name, weight_bytes=1, data_bytes=1) for name in (TEXT, ENCODE, DENOISE, DECODE)}
    stages[DENOISE] = StageMemory(DENOISE, weight_bytes=1 + len(kept), data_bytes=1, kept=kept)
    return (stages[DECODE],) if plan.decodes_only else tuple(stages.values())
