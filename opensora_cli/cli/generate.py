"""`osora generate`: from a prompt to a video."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from opensora_cli.cli import errors, options, output
from opensora_cli.core.exceptions import RequestError

if TYPE_CHECKING:
    from opensora_cli.settings.base import Section
    from opensora_cli.settings.load import GenerateRequest

PRESETS_SCHEMA = "osora.presets/1"


def generate(
    prompt: options.Prompt = None,
    negative_prompt: options.NegativePrompt = None,
    res: options.Resolution = None,
    aspect_ratio: options.Aspect = None,
    num_frames: options.NumFrames = None,
    fps: options.Fps = None,
    motion_score: options.MotionScore = None,
    steps: options.Steps = None,
    guidance_scale: options.GuidanceScale = None,
    image_guidance_scale: options.ImageGuidanceScale = None,
    seed: options.Seed = None,
    num_samples: options.NumSamples = None,
    cond: options.Condition = None,
    ref: options.References = None,
    fit: options.FitOption = None,
    lora: options.Loras = None,
    out: options.Out = None,
    format_: options.Format = None,
    overwrite: options.Overwrite = False,
    no_metadata: options.NoMetadata = False,
    json_: options.Json = False,
    quiet: options.Quiet = False,
    model: options.Model = None,
    weights: options.Weights = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    offload: options.Offload = None,
    resident_blocks: options.ResidentBlocks = None,
    memory_limit: options.MemoryLimit = None,
    gpus: options.Gpus = None,
    devices: options.Devices = None,
    dry_run: options.DryRun = False,
    config: options.Config = None,
    set_: options.Assignments = None,
    from_: options.FromSidecar = None,
    from_latents: options.FromLatents = None,
    list_presets: options.ListPresets = False,
) -> None:
    """Make a video from a prompt, and from pictures or videos if given.

    Examples:

      osora generate "raining, sea"

      osora generate "the boat turns around" --ref boat.png --out boat.mp4

      osora generate "raining, sea" --lora runs/style/lora:0.8

      osora generate --from samples/raining-sea_seed42.mp4.json --seed 7
    """
    if list_presets:
        _print_presets(as_json=json_)
        return
    if lora and from_latents:
        raise RequestError("--lora has no effect with --from-latents, which the model has made already: drop --lora")
    flags = {
        "prompt": ("PROMPT", prompt),
        "negative_prompt": ("--negative-prompt", negative_prompt),
        "from_latents": ("--from-latents", from_latents),
        "video.resolution": ("--res", res),
        "video.aspect_ratio": ("--aspect-ratio", aspect_ratio),
        "video.num_frames": ("--num-frames", num_frames),
        "video.fps": ("--fps", fps),
        "prompt_suffix.motion_score": ("--motion-score", motion_score),
        "sampling.num_inference_steps": ("--steps", steps),
        "sampling.guidance_scale": ("--guidance-scale", guidance_scale),
        "sampling.image_guidance_scale": ("--image-guidance-scale", image_guidance_scale),
        "sampling.seed": ("--seed", seed),
        "sampling.num_samples": ("--num-samples", num_samples),
        "condition.mode": ("--cond", cond),
        "condition.references": ("--ref", _joined(ref, "--ref", "a picture or a video")),
        "condition.fit": ("--fit", fit),
        "loras": ("--lora", _joined(lora, "--lora", "an adapter")),
        "output.path": ("--out", out),
        "output.format": ("--format", format_),
        "output.overwrite": ("--overwrite", True if overwrite else None),
        "output.metadata": ("--no-metadata", False if no_metadata else None),
        "runtime.model_choice": ("--model", model),
        "runtime.weights": ("--weights", weights),
        "runtime.device": ("--device", device),
        "runtime.dtype": ("--dtype", dtype),
        "memory.offload": ("--offload", offload),
        "memory.resident_blocks": ("--resident-blocks", resident_blocks),
        "memory.limit": ("--memory-limit", memory_limit),
        "parallel.gpus": ("--gpus", gpus),
        "parallel.devices": ("--devices", devices),
    }
    with errors.interruptible():
        request = _request(flags, assignments=set_ or [], sidecar=from_, config=config)
        _run(request, dry_run=dry_run, as_json=json_, quiet=quiet)


def _joined(files: list[str] | None, flag: str, what: str) -> str | None:
    """Return files as one text; several may already be in one, separated by `;`."""
    if not files:
        return None
    if not all(file.strip(" ;") for file in files):
        # Most often an unset variable of a script: without a word it would become a video from text alone.
        raise RequestError(f"{flag} is empty: name {what}, or drop {flag}")
    return ";".join(files)


def _request(
    flags: Mapping[str, tuple[str, object]], *, assignments: Sequence[str], sidecar: Path | None, config: Path | None
) -> "GenerateRequest":
    """Return what was asked for, from dotted keys to each flag and its value (None: not given)."""
    from opensora_cli.settings.explain import Given
    from opensora_cli.settings.generate import GenerateSettings
    from opensora_cli.settings.layers import collect_overrides
    from opensora_cli.settings.load import GenerateRequest, read_sidecar

    given = {key: Given(value, flag) for key, (flag, value) in flags.items() if value is not None}
    return GenerateRequest(
        overrides=collect_overrides(GenerateSettings, given, assignments),
        saved=read_sidecar(sidecar) if sidecar else None,
        config=config,
        environment=os.environ,
        others=_other_settings(),
    )


def _other_settings() -> tuple[type["Section"], ...]:
    """Return training's settings, whose variables are not refused; imported only where there are variables of osora."""
    if not any(name.startswith("OSORA_") for name in os.environ):
        return ()
    from opensora_cli.settings.train import TrainSettings

    return (TrainSettings,)


def _run(request: "GenerateRequest", *, dry_run: bool, as_json: bool, quiet: bool) -> None:
    from opensora_cli.core.ranks import find_context

    with errors.uninterrupted():
        from opensora_cli.engine.generate import run as engine

    context = find_context(os.environ)
    is_main = context is None or context.is_main
    reporter = output.make_reporter(quiet=quiet or not is_main)
    if dry_run:
        plan = engine.plan_from_request(request, reporter=reporter, context=context)
        if is_main:
            output.print_result(plan, as_json=as_json)
        plan.require_fit()
        return
    flags = [flag for flag, is_on in (("--json", as_json), ("--quiet", quiet)) if is_on]
    result = engine.generate_from_request(request, reporter=reporter, context=context, rank_flags=flags)
    if result is not None and is_main:
        output.print_result(result, as_json=as_json)


def _print_presets(*, as_json: bool) -> None:
    from opensora_cli.settings.files import list_presets
    from opensora_cli.settings.load import load_preset

    presets = {name: load_preset(name, prompt="any") for name in list_presets("generate")}
    if as_json:
        documents = [
            {"name": name, "settings": preset.model_dump(mode="json", exclude={"prompt"})}
            for name, preset in presets.items()
        ]
        output.print_json({"schema": PRESETS_SCHEMA, "presets": documents})
        return
    output.print_lines(
        [
            f"{name:8} {preset.model.name} at {preset.video.resolution} {preset.video.aspect_ratio}, "
            f"{preset.video.num_frames} frames at {preset.video.fps} fps, "
            f"{preset.sampling.num_inference_steps} steps"
            for name, preset in presets.items()
        ]
    )
