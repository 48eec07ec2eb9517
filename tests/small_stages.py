"""Stages that fit anywhere, for plans whose estimate, which takes seconds on fake tensors, is not the subject."""

from opensora_cli.engine.estimate.offload import AUTOENCODER, DECODE, DENOISE, ENCODE, TEXT, OffloadPlan, StageMemory
from opensora_cli.settings.enums import OffloadMode
from opensora_cli.settings.generate import GenerateSettings


def small_stages(settings: GenerateSettings, *, offload: OffloadPlan, **sizes: object) -> tuple[StageMemory, ...]:
    """Stand in for `estimate_generation`."""
    kept = ((AUTOENCODER, 1),) if offload.mode is OffloadMode.NONE else ()
    stages = {name: StageMemory(name, weight_bytes=1, data_bytes=1) for name in (TEXT, ENCODE, DENOISE, DECODE)}
    stages[DENOISE] = StageMemory(DENOISE, weight_bytes=1 + len(kept), data_bytes=1, kept=kept)
    return (stages[DECODE],) if settings.from_latents is not None else tuple(stages.values())
