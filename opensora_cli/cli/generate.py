"""`osora generate`: from a prompt to a video."""

import os
import shlex
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opensora_cli.cli import errors, options, output
from opensora_cli.cli.command import Command
from opensora_cli.core.exceptions import RequestError
from opensora_cli.settings.enums import ModelName

if TYPE_CHECKING:
    from opensora_cli.settings.load import GenerateRequest

_PROFILED_RUNS = 3
PRESETS_SCHEMA = "osora.presets/1"

_TABLE_ENDINGS = frozenset({".csv", ".jsonl", ".parquet", ".txt"})
_TEXT_ENDINGS = frozenset({".md", ".tsv"})


class GenerateCommand(Command):
    """`osora generate`, whose defaults are those of the presets."""

    def defaults(self) -> Mapping[str, str]:
        """Return the values of the released model's presets, and the demo's where they are others."""
        from opensora_cli.settings.files import list_presets
        from opensora_cli.settings.flags import FLAGS, option_of
        from opensora_cli.settings.load import load_preset

        values = {name: load_preset(name, prompt="any").model_dump(mode="json") for name in list_presets("generate")}
        demo, released = values.pop(ModelName.DEMO.value), next(iter(values.values()))
        return {
            option_of(name): shown if shown == own else f"{shown}; of the demo {own}"
            for name, flag in FLAGS.items()
            if (shown := _shown(released, flag.key)) and (own := _shown(demo, flag.key))
        }


def _shown(values: Mapping[str, Any], key: str) -> str:
    """Return a setting as it can be typed; empty where its being unset is explained in words."""
    *sections, name = key.split(".")
    for section in sections:
        values = values[section]
    value = values[name]
    if value is None:
        return "none" if key == "prompt_suffix.motion_score" else ""
    return (
        ""
        if value == "" or isinstance(value, bool | list)
        else f"{value:g}"
        if isinstance(value, float)
        else f"{value}"
    )


def generate(
    prompt: options.Prompt = None,
    prompt_text: options.PromptText = None,
    prompts: options.Prompts = None,
    shard: options.ShardOption = None,
    negative_prompt: options.NegativePrompt = None,
    refine: options.Refine = False,
    res: options.Resolution = None,
    aspect_ratio: options.Aspect = None,
    width: options.Width = None,
    height: options.Height = None,
    num_frames: options.NumFrames = None,
    fps: options.Fps = None,
    extend: options.Extend = None,
    prompt_at: options.PromptAt = None,
    motion_score: options.MotionScore = None,
    steps: options.Steps = None,
    fast: options.Fast = False,
    solver: options.SolverOption = None,
    stop_at: options.StopAt = None,
    explore: options.Explore = None,
    explore_steps: options.ExploreSteps = None,
    draft_res: options.DraftResolution = None,
    draft_strength: options.DraftStrength = None,
    guidance_scale: options.GuidanceScale = None,
    image_guidance_scale: options.ImageGuidanceScale = None,
    seed: options.Seed = None,
    num_samples: options.NumSamples = None,
    cond: options.Condition = None,
    ref: options.References = None,
    seamless: options.Seamless = False,
    fit: options.FitOption = None,
    ref_fps: options.ReferenceFps = None,
    t2i2v: options.PictureFirst = False,
    save_picture: options.SavePicture = False,
    lora: options.Loras = None,
    out: options.Out = None,
    format: options.Format = None,
    name_from: options.NameFromOption = None,
    overwrite: options.Overwrite = False,
    save_last_frame: options.SaveLastFrame = False,
    save_state_every: options.SaveStateEvery = None,
    preview_every: options.PreviewEvery = None,
    no_metadata: options.NoMetadata = False,
    json_: options.Json = False,
    quiet: options.Quiet = False,
    model: options.Model = None,
    weights: options.Weights = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    attention: options.Attention = None,
    threads: options.Threads = None,
    no_cache: options.NoCache = False,
    offload: options.Offload = None,
    resident_blocks: options.ResidentBlocks = None,
    memory_limit: options.MemoryLimit = None,
    gpus: options.Gpus = None,
    devices: options.Devices = None,
    dry_run: options.DryRun = False,
    on: options.On = None,
    profile: options.Profile = False,
    profile_runs: options.ProfileRuns = None,
    config: options.Config = None,
    set_: options.Assignments = None,
    from_: options.FromSidecar = None,
    from_latents: options.FromLatents = None,
    resume: options.Resume = None,
    list_presets: options.ListPresets = False,
) -> None:
    """Make a video from a prompt, and from pictures or videos if given.

    Examples:

      osora generate "raining, sea"

      osora generate "the boat turns around" --ref boat.png --out boat.mp4

      osora generate "a red boat on the sea" --t2i2v --save-picture

      osora generate "raining, sea" --lora runs/style/lora:0.8

      osora generate --from samples/raining-sea_seed42.mp4.json --seed 7

      osora generate --prompts prompts.csv --out videos
    """
    typed = locals()
    if list_presets:
        _print_presets(as_json=json_)
        return
    _check_prompt(prompt, prompt_text)
    if shard is not None and prompts is None:
        raise RequestError("--shard has no effect without --prompts: drop it")
    if explore is not None or explore_steps is not None:
        _check_explored(typed)
    if prompts is not None:
        for option, value in (
            ("PROMPT", prompt),
            ("--prompt-text", prompt_text),
            ("--from-latents", from_latents),
            ("--resume", resume),
            ("--profile", profile or None),
            ("--on", on),
        ):
            if value is not None:
                raise RequestError(f"{option} cannot go with --prompts: drop one of them")
    if on is not None and not dry_run:
        raise RequestError(f"--on {on} has no effect without --dry-run, which plans for it: give both, or none")
    if profile_runs is not None and not profile:
        raise RequestError("--profile-runs has no effect without --profile: give both, or none")
    with errors.interruptible():
        from opensora_cli.api.request import generate_request
        from opensora_cli.settings.explain import Given
        from opensora_cli.settings.flags import FLAGS, given_flags, option_of

        runs = (profile_runs or _PROFILED_RUNS) if profile else 0
        # Those that are settings have the names of their parameters; a switch that is off was not given.
        flags = {name: typed[name] for name in FLAGS if typed[name] is not False}
        source, words = ("PROMPT", prompt) if prompt_text is None else ("--prompt-text", prompt_text)
        named = {} if words is None else {"prompt": Given(words, source)}
        if explore is not None:
            named |= {
                "output.explore": Given(True, "--explore"),
                "sampling.num_samples": Given(explore, "--explore"),
                "sampling.stop_at": Given(explore_steps, "--explore-steps"),
            }
        request = generate_request(
            named | given_flags(flags, called=option_of),
            assignments=set_ or [],
            sidecar=from_,
            config=config,
            profiled_runs=runs,
        )
        if on is not None:
            from opensora_cli.settings.hardware import read_machine

            machine = read_machine(on)
            counted = {**machine.counts(request.overrides), **request.overrides}
            request = replace(request, on=machine, overrides=counted)
        if prompts is None:
            from opensora_cli.engine.generate.early import dry_run_named

            with nullcontext() if dry_run else dry_run_named(request):
                _run(request, dry_run=dry_run, as_json=json_, quiet=quiet)
        else:
            _run_rows(request, prompts, shard, sidecar=from_, dry_run=dry_run, as_json=json_, quiet=quiet)


def _check_explored(typed: Mapping[str, Any]) -> None:
    for missing, there in (("explore", "explore_steps"), ("explore_steps", "explore")):
        if typed[missing] is None:
            raise RequestError(f"--{there.replace('_', '-')} needs --{missing.replace('_', '-')}: give both, or none")
    for name in ("prompts", "from_latents", "resume", "stop_at", "num_samples", "profile"):
        if typed[name]:
            raise RequestError(f"--{name.replace('_', '-')} cannot go with --explore: drop one of them")


def _check_prompt(prompt: str | None, prompt_text: str | None) -> None:
    if prompt is not None and prompt_text is not None:
        raise RequestError(f"the prompt is there twice: drop {prompt!r}, or --prompt-text")
    if prompt is not None and (hint := _hint_of_file(prompt)) is not None:
        kind = "folder" if Path(prompt).is_dir() else "file"
        raise RequestError(
            f"{prompt} is a {kind}, and no prompt", hint=f"{hint}; --prompt-text {shlex.quote(prompt)} insists"
        )


def _hint_of_file(prompt: str) -> str | None:
    """Return what a file or folder that was given as the prompt may have been meant for; None where there is none.

    A plain word is a prompt, also where a folder has that name: only one with a separator, or `.` or `..`, is a path.
    """
    path = Path(prompt)
    try:
        if path.is_dir() and (prompt in (".", "..") or "/" in prompt or os.sep in prompt):
            return "give the words themselves, in quotes"
        if not path.is_file():
            return None
    except (OSError, ValueError):  # too long for a name, or with a null in it
        return None
    name = shlex.quote(prompt)
    ending = path.suffix.lower()
    if prompt.endswith(".latents.safetensors"):
        return f"saved latents are decoded with --from-latents {name}"
    if ending == ".safetensors":
        return f"an adapter is added with --lora {name}"
    if ending == ".json":
        return f"the settings beside a result are used again with --from {name}"
    if ending in (".yaml", ".yml", ".py"):
        return f"settings are read with --config {name}"
    if ending in _TABLE_ENDINGS:
        return f"many prompts are read with --prompts {name}"
    if ending in _TEXT_ENDINGS:
        return "give the words themselves, in quotes"
    return f"a picture or a video is given with --ref {name}" if ending else "give the words themselves, in quotes"


def _run(request: "GenerateRequest", *, dry_run: bool, as_json: bool, quiet: bool) -> None:
    from opensora_cli.core.ranks import find_context

    context = find_context(os.environ)
    is_main = context is None or context.is_main
    reporter = output.make_reporter(quiet=quiet or not is_main)
    if context is None:
        from opensora_cli.engine.generate.early import refuse_early

        refuse_early(request, dry_run=dry_run, reporter=reporter)
    output.note_start(reporter)
    with errors.uninterrupted():
        from opensora_cli.api.pipeline import Pipeline
        from opensora_cli.engine.generate import dry_run as planning

    if dry_run:
        if request.profiled_runs:
            reporter.note(f"profile: everything is to be run {request.profiled_runs} times, and once before to warm up")
        plan = planning.plan_from_request(request, reporter=reporter, context=context)
        if is_main:
            output.print_result(plan, as_json=as_json)
        plan.require_fit()
        return
    flags = [flag for flag, is_on in (("--json", as_json), ("--quiet", quiet)) if is_on]
    if request.profiled_runs:
        flags += ["--profile", "--profile-runs", str(request.profiled_runs)]
    with Pipeline.reporting_to(reporter, stay=False) as pipe:
        result = pipe.run(request, context=context, rank_flags=flags)
    if result is not None and is_main:
        output.print_result(result, as_json=as_json)


def _run_rows(
    request: "GenerateRequest",
    prompts: Path,
    part: str | None,
    *,
    sidecar: Path | None,
    dry_run: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    from opensora_cli.core.ranks import find_context
    from opensora_cli.engine.generate.prompts import Shard, read_prompts

    context = find_context(os.environ)
    is_main = context is None or context.is_main
    shard = Shard() if part is None else Shard.of(part)
    rows = read_prompts(prompts)
    reporter = output.make_reporter(quiet=quiet or not is_main)
    output.note_start(reporter)
    with errors.uninterrupted():
        from opensora_cli.api.pipeline import Pipeline
        from opensora_cli.engine.generate.batch import plan_rows

    if dry_run:
        plan = plan_rows(request, rows, shard=shard, reporter=reporter)
        if is_main:
            output.print_result(plan, as_json=as_json)
        plan.require_fit()
        return
    arguments = [
        "generate",
        f"--prompts={prompts}",
        *(argument for key, at in request.overrides.items() for argument in given_again(key, at.value)),
    ]
    for option, value in (("--shard", part), ("--config", request.config), ("--from", sidecar)):
        arguments += [] if value is None else [f"{option}={value}"]
    arguments += [flag for flag, is_on in (("--json", as_json), ("--quiet", quiet)) if is_on]
    with Pipeline.reporting_to(reporter, stay=True) as pipe:
        result = pipe.run_rows(request, rows, shard=shard, context=context, rank_arguments=arguments)
    if result is None:
        return
    if is_main:
        output.print_result(result, as_json=as_json)
    # In every rank, so that it is the error of all.
    result.require_whole()


def given_again(key: str, value: object) -> list[str]:
    """Return the arguments that give a setting of this command line to a rank."""
    from opensora_cli.settings.flags import FLAGS, option_of

    if not isinstance(value, list | tuple):
        return [f"--set={key}={value}"]
    # Joined to one text, they would be parted where one of them has the separator.
    [option] = [option_of(name) for name, flag in FLAGS.items() if flag.key == key]
    return [f"{option}={each}" for each in value]


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
    width = max(map(len, presets))
    output.print_lines(
        [
            f"{name:{width}} {preset.model.name} at {preset.video.resolution} {preset.video.aspect_ratio}, "
            f"{preset.video.num_frames} frames at {preset.video.fps} fps, "
            f"{preset.sampling.num_inference_steps} steps"
            for name, preset in presets.items()
        ]
    )
