"""The JSON file beside a result: everything that is needed to make it again, and what making it took."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import opensora_cli
from opensora_cli.core.files import write_json_atomic
from opensora_cli.engine.components.hardware import versions
from opensora_cli.engine.generate.outputs import SampleFiles
from opensora_cli.engine.generate.plan import ExecutionPlan
from opensora_cli.engine.generate.text import full_prompt
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.load import SIDECAR_SCHEMA


def sample_settings(plan: ExecutionPlan, sample: SampleFiles) -> GenerateSettings:
    """Return the settings that make this one sample again, with its own seed, from whatever folder they are used in."""
    settings = plan.settings
    output = settings.output
    changes: dict[str, object] = {
        "runtime.model_choice": settings.model.name.value,
        "sampling.seed": sample.seed,
        "sampling.num_samples": 1,
        "condition.references": tuple(str(Path(path).absolute()) for path in settings.condition.references),
        "from_latents": None,
        # However many devices there are then: they change no more than rounding.
        "parallel": {},
        # To replace files is never carried over to a later run.
        "output.overwrite": False,
    }
    if plan.loras:
        # By their contents too: a file of the same name may be another one by then.
        changes["loras"] = tuple(
            {"path": str(lora.path.absolute()), "scale": lora.scale, "sha256": lora.sha256} for lora in plan.loras
        )
    if output.named_format is not None and plan.num_samples > 1:
        changes["output.path"] = str(sample.target)
    return settings.replace(changes)


def write_sidecar(
    plan: ExecutionPlan,
    sample: SampleFiles,
    *,
    timings_s: Mapping[str, float],
    peak_memory_gib: Mapping[str, float],
    given_frames_psnr_db: float | None,
) -> None:
    """Write the sidecar of `sample`, if one is wanted.

    Args:
        plan: of the run.
        sample: whose file it is.
        timings_s: stage to seconds; loading and text are those of the whole run.
        peak_memory_gib: of the run so far, as `hardware.peak_memory_gib` returns it.
        given_frames_psnr_db: how well the references came back.

    Raises:
        OutputError: it cannot be written.
    """
    if sample.sidecar is not None:
        write_json_atomic(
            sample.sidecar,
            sidecar_document(
                plan,
                sample,
                timings_s=timings_s,
                peak_memory_gib=peak_memory_gib,
                given_frames_psnr_db=given_frames_psnr_db,
            ),
        )


def sidecar_document(
    plan: ExecutionPlan,
    sample: SampleFiles,
    *,
    timings_s: Mapping[str, float],
    peak_memory_gib: Mapping[str, float],
    given_frames_psnr_db: float | None,
) -> dict[str, Any]:
    """Return what `write_sidecar` writes."""
    settings = plan.settings
    return {
        "schema": SIDECAR_SCHEMA,
        "file": sample.media.name,
        "prompt": settings.prompt,
        "full_prompt": full_prompt(settings),
        "negative_prompt": settings.negative_prompt,
        "seed": sample.seed,
        "model": settings.model.name.value,
        "condition_mode": plan.mode.name,
        "height": plan.height,
        "width": plan.width,
        "num_frames": settings.video.num_frames,
        "fps": settings.video.fps,
        "model_evaluations": plan.evaluations_per_sample,
        "given_frames_psnr_db": None if given_frames_psnr_db is None else round(given_frames_psnr_db, 2),
        "device": str(plan.hardware.device),
        "device_name": plan.hardware.device_name,
        "dtype": str(plan.hardware.dtype).removeprefix("torch."),
        "timings_s": {stage: round(seconds, 3) for stage, seconds in timings_s.items()},
        **peak_memory_gib,
        "mesh": asdict(plan.mesh),
        "offload": asdict(plan.offload),
        "versions": versions(),
        "settings": sample_settings(plan, sample).model_dump(mode="json"),
    }


def media_tags(plan: ExecutionPlan, sample: SampleFiles) -> dict[str, str]:
    """Return what is written into the media file itself; empty where no metadata is wanted.

    No time and no place: the same request makes the same bytes.
    """
    if not plan.settings.output.metadata:
        return {}
    return {
        "prompt": plan.settings.prompt,
        "seed": str(sample.seed),
        "model": plan.settings.model.name.value,
        "software": f"osora {opensora_cli.__version__}",
    }
