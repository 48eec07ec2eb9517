"""Measures the demo model: does it show what the prompt says, and how fast.

    python examples/demo/demo_quality.py
    python examples/demo/demo_quality.py --part prompts --choosing --guidance-scale 3 --guidance-scale 5 --steps 20

Four parts, on scenes whose combination of place, weather, time and thing was held out of all training:

- `vae`: how well the autoencoder gives clips back: PSNR, SSIM and detail.
- `prompts`: how often a classifier reads back what the prompt says, from videos made for complete captions; the same of
  the harder ones (by night, in rain or snow); and in how many the thing has the same shape and colour from the first
  third to the last. It was trained on rendered clips alone; its accuracy on held-out renders stands beside. Shares have
  intervals of 95 % confidence. With `--choosing`, prompts are of combinations that are not held out: checkpoints, steps
  and guidance are chosen by these, so that what is reported was not chosen by itself. `--language ko` takes the same
  scenes in Korean words.
- `conditions`: for each way of giving frames, how well they come back, in dB of PSNR, and what is read from the video.
- `seconds`: how long `osora generate` takes on this machine, from start to finish, as its own process.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from batch_generate import Clips, generate_clips, given_of, reconstruct
from clip_quality import detail, psnr_db, ssim
from demo_world.captions import caption_scene
from demo_world.scenes import Scene, Time, Weather, render_scene, sample_scene
from demo_world.translated_captions import Language
from opensora_cli.core.conditions import CONDITION_MODES, ConditionMode
from opensora_cli.core.exceptions import OsoraError
from opensora_cli.core.progress import SilentReporter
from opensora_cli.engine.generate.models import LoadedModels
from opensora_cli.engine.generate.plan import Plan
from opensora_cli.engine.generate.planning import make_plan
from opensora_cli.engine.generate.references import GivenFramesPSNR, with_mode
from opensora_cli.models.registry import DEMO
from opensora_cli.settings.explain import Given
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.layers import collect_overrides
from opensora_cli.settings.load import GenerateRequest, load_generate_settings
from quality_report import SCHEMA, percent, report_lines
from scene_reader import (
    ANSWERS,
    Reader,
    Readers,
    accuracy,
    confidence_interval,
    is_stable,
    obtain_readers,
    right_answers,
)

PARTS = ("vae", "prompts", "conditions", "seconds")
# Every part draws its own scenes, whatever else is measured.
_VAE_SCENES, _PROMPT_SCENES, _CONDITION_SCENES, _READER_SCENES = range(4)


def scene_set(
    count: int, *, seed: int, part: int, held_out: bool = True, language: Language | None = None
) -> tuple[list[Scene], list[str]]:
    """Return scenes of combinations that nothing was trained on, or that may have been, each with a moving thing, and a
    complete caption, in English unless another `language` is given.
    """
    rng = np.random.default_rng((seed, part))
    scenes = [sample_scene(rng, held_out=held_out, thing_share=1.0) for _ in range(count)]
    return scenes, [caption_scene(scene, rng, complete=True, language=language) for scene in scenes]


def film(scenes: Sequence[Scene], plan: Plan) -> Clips:
    """Return the scenes as clips of the plan's size, length and rate."""
    video = plan.settings.video
    return np.stack(
        [render_scene(scene, size=plan.height, num_frames=video.num_frames, fps=video.fps) for scene in scenes]
    )


def measure_vae(plan: Plan, models: LoadedModels, reader: Reader, *, count: int, seed: int) -> dict[str, Any]:
    """Return the mean PSNR of reconstructed clips, for each weather too, their SSIM and detail, and what the reader
    makes of them.
    """
    scenes, _ = scene_set(count, seed=seed, part=_VAE_SCENES)
    clips = film(scenes, plan)
    decoded = reconstruct(plan, models, clips)
    values = psnr_db(decoded, clips)
    by_weather = {
        weather.value: float(np.mean(chosen))
        for weather in Weather
        if (chosen := [value for value, scene in zip(values, scenes, strict=True) if scene.weather is weather])
    }
    return {
        "clips": count,
        "psnr_db": float(np.mean(values)),
        "lowest_psnr_db": min(values),
        "ssim": ssim(decoded, clips),
        "detail_of_renders": detail(decoded) / detail(clips),
        "psnr_db_by_weather": by_weather,
        "reader_accuracy": accuracy(reader.read(decoded, fps=plan.settings.video.fps), scenes),
    }


def measure_reader(reader: Reader, plan: Plan, *, count: int, seed: int) -> dict[str, Any]:
    """Return how well the reader reads held-out renders."""
    scenes, _ = scene_set(count, seed=seed, part=_READER_SCENES)
    return {
        "clips": count,
        "accuracy": accuracy(reader.read(film(scenes, plan), fps=plan.settings.video.fps), scenes),
    }


def measure_prompts(
    plan: Plan,
    models: LoadedModels,
    readers: Readers,
    options: argparse.Namespace,
    *,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Return how well the readers read back what prompts say, from the videos made for them with the plan."""
    count, fps = options.prompts, plan.settings.video.fps
    scenes, prompts = scene_set(
        count, seed=options.seed, part=_PROMPT_SCENES, held_out=not options.choosing, language=options.language
    )
    sampling = plan.settings.sampling
    start = time.perf_counter()
    read, stable, details = [], [], []
    for done in range(0, count * options.seeds, count):

        def on_done(more: int, done: int = done) -> None:
            seconds, left = time.perf_counter() - start, count * options.seeds - done - more
            say(f"prompts: {done + more} videos, {seconds:.0f} s, {seconds / (done + more) * left:.0f} s to go")

        first = sampling.seed + done
        clips = generate_clips(plan, models, prompts, seeds=range(first, first + count), on_done=on_done)
        read.append(readers.whole.read(clips, fps=fps))
        stable.append(is_stable(readers.third, clips, fps=fps))
        details.append(detail(clips))
    seconds, videos = time.perf_counter() - start, count * options.seeds
    read_NA, shown, stable_N = torch.cat(read), scenes * options.seeds, torch.cat(stable)
    shares, stable_share = accuracy(read_NA, shown), stable_N.double().mean().item()
    return {
        "videos": videos,
        "choosing": options.choosing,
        "language": options.language or "en",
        "num_inference_steps": sampling.num_inference_steps,
        "model_evaluations": plan.model_evaluations,
        "detail_of_renders": float(np.mean(details)) / detail(film(scenes, plan)),
        "guidance_scale": sampling.guidance_scale,
        "accuracy": shares,
        "intervals": {name: confidence_interval(shares[name], videos) for name in ANSWERS},
        "worst": min(shares[name] for name in ANSWERS),
        "hard": measured_hard(read_NA, shown),
        "stable": stable_share,
        "stable_interval": confidence_interval(stable_share, videos),
        "seconds_per_video": seconds / videos,
        "misread": misread(read_NA, shown, prompts * options.seeds),
    }


def is_hard(scene: Scene) -> bool:
    """Whether it is night, or rain or snow falls."""
    return scene.time is Time.NIGHT or scene.weather is not Weather.CLEAR


def measured_hard(read_NA: torch.Tensor, scenes: Sequence[Scene]) -> dict[str, Any] | None:
    """Return how many scenes are hard, and what is read from these; None: none is."""
    hard = [index for index, scene in enumerate(scenes) if is_hard(scene)]
    if not hard:
        return None
    shares = accuracy(read_NA[hard], [scenes[index] for index in hard])
    return {"videos": len(hard), "accuracy": shares, "worst": min(shares[name] for name in ANSWERS)}


def misread(read_NA: torch.Tensor, scenes: Sequence[Scene], prompts: Sequence[str]) -> list[dict[str, Any]]:
    """Return the prompts of which something was read otherwise: their index, and attribute to what was read."""
    found = []
    for index, (read, scene, prompt) in enumerate(zip(read_NA.tolist(), scenes, prompts, strict=True)):
        wrong = {
            name: ANSWERS[name][got]
            for name, got, right in zip(ANSWERS, read, right_answers(scene), strict=True)
            if got != right
        }
        if wrong:
            found.append({"index": index, "prompt": prompt, "read": wrong})
    return found


def measure_conditions(
    plan: Plan,
    models: LoadedModels,
    reader: Reader,
    options: argparse.Namespace,
    *,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Return for each way of giving frames how well these come back, and what is read from the videos around them."""
    scenes, prompts = scene_set(options.given, seed=options.seed, part=_CONDITION_SCENES)
    filmed, first = film(scenes, plan), plan.settings.sampling.seed

    def measured(mode: ConditionMode) -> dict[str, Any]:
        given_plan, values = replace(plan, mode=mode), []
        clips = generate_clips(
            plan,
            models,
            prompts,
            seeds=range(first, first + len(prompts)),
            mode=mode,
            filmed_NTHWC=filmed if mode.needs_reference else None,
            on_done=lambda done: say(f"{mode.name}: {done} of {len(prompts)} videos"),
        )
        for clip, whole in zip(clips, filmed, strict=True):
            psnr = GivenFramesPSNR(given_of(given_plan, whole), num_frames=len(clip))
            psnr.add(torch.from_numpy(clip))
            values.append(psnr.db)
        figures = {"clips": len(clips), "accuracy": accuracy(reader.read(clips, fps=plan.settings.video.fps), scenes)}
        given = [value for value in values if value is not None]
        return figures | ({"psnr_db": float(np.mean(given)), "lowest_psnr_db": min(given)} if given else {})

    return {name: measured(mode) for name, mode in CONDITION_MODES.items()}


def measure_seconds(arguments: Sequence[str], *, prompt: str = "raining, sea") -> dict[str, Any]:
    """Return how long the command takes, from the start of Python to the saved video, and each of its stages.

    Args:
        arguments: further options of `osora generate`.
        prompt: what to make.

    Raises:
        OsoraError: the command failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "opensora_cli", "generate", prompt, "--model", "demo", "--json", "--quiet"]
        start = time.perf_counter()
        done = subprocess.run(
            [*command, "--out", str(Path(folder) / "video.mp4"), *arguments],
            cwd=Path(__file__).resolve().parents[1],
            capture_output=True,
            text=True,
            check=False,
        )
        seconds = time.perf_counter() - start
    if done.returncode:
        raise OsoraError(f"osora generate failed with exit code {done.returncode}: {done.stderr.strip()[-500:]}")
    result = json.loads(done.stdout)
    return {
        "prompt": prompt,
        "seconds": seconds,
        "model_evaluations": result["model_evaluations"],
        "stages_s": result["timings_s"],
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }


def demo_settings(
    weights: str | None, assignments: Sequence[str], *, seed: int, device: str = "cpu"
) -> GenerateSettings:
    """Return the demo's preset with what the command line changes in it.

    Raises:
        RequestError: a key is unknown, or a value breaks a rule.
    """
    flags = {
        "prompt": Given("raining, sea", "this benchmark"),
        "runtime.device": Given(device, "--device"),
        "sampling.seed": Given(seed, "--seed"),
    }
    if weights is not None:
        flags["runtime.weights"] = Given(str(Path(weights).resolve()), "--weights")
    overrides = collect_overrides(GenerateSettings, flags, assignments)
    return with_mode(load_generate_settings(GenerateRequest(overrides=overrides), model=DEMO), SilentReporter())


def try_guidance(
    settings: GenerateSettings,
    models: LoadedModels,
    readers: Readers,
    options: argparse.Namespace,
    *,
    say: Callable[[str], None],
) -> tuple[list[dict[str, Any]], Plan]:
    """Return a report for each choice of steps and guidance that is asked for, and the plan of the best on average."""
    sampling = settings.sampling
    trials = []
    for steps, scale in itertools.product(
        options.steps or [sampling.num_inference_steps], options.guidance_scale or [sampling.guidance_scale]
    ):
        plan = make_plan(settings.replace({"sampling.num_inference_steps": steps, "sampling.guidance_scale": scale}))
        trial = measure_prompts(plan, models, readers, options, say=say)
        say(f"{steps} steps, guidance {scale:g}: {percent(trial['accuracy'])}")
        trials.append((trial, plan))
    _, best = max(trials, key=lambda tried: float(tried[0]["accuracy"]["mean"]))
    return [trial for trial, _ in trials], best


def measure(options: argparse.Namespace, *, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure what the command line asks for, and return the report."""
    settings = demo_settings(options.weights, options.set, seed=options.seed, device=options.device)
    plan = make_plan(settings)
    models = LoadedModels(stay=True)
    report: dict[str, Any] = {"schema": SCHEMA, "seed": options.seed, "settings": settings.model_dump(mode="json")}
    if {"vae", "prompts", "conditions"} & set(options.part):
        readers = obtain_readers(
            options.readers, num_frames=plan.settings.video.num_frames, fps=plan.settings.video.fps, say=say
        )
        report["reader"] = measure_reader(readers.whole, plan, count=options.reader_clips, seed=options.seed)
    if "vae" in options.part:
        say(f"autoencoder: {options.clips} clips")
        report["vae"] = measure_vae(plan, models, readers.whole, count=options.clips, seed=options.seed)
    best = plan
    if "prompts" in options.part:
        report["prompts"], best = try_guidance(settings, models, readers, options, say=say)
    if "conditions" in options.part:
        report["conditions"] = measure_conditions(best, models, readers.whole, options, say=say)
    if "seconds" in options.part:
        say("osora generate, as its own process")
        weights = ["--weights", str(Path(options.weights).resolve())] if options.weights else []
        report["generate"] = measure_seconds(
            [*weights, "--device", "cpu", *(part for each in options.set for part in ("--set", each))]
        )
    return report


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        prog="demo_quality.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", metavar="DIR", help="folder of the demo's weights; default: those in the package")
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="as in osora generate")
    parser.add_argument("--device", default="cpu", help="as in osora generate, but for `seconds` (%(default)s)")
    parser.add_argument("--part", choices=PARTS, action="append", help="measure only this; may be repeated")
    parser.add_argument("--prompts", type=_count, default=200, metavar="N", help="videos to read (%(default)s)")
    parser.add_argument("--seeds", type=_count, default=1, metavar="N", help="of noise, for each prompt (%(default)s)")
    parser.add_argument("--choosing", action="store_true", help="take other prompts than those that are reported")
    parser.add_argument(
        "--language", type=Language, choices=list(Language), help="of the prompts that are read; default: English"
    )
    parser.add_argument("--clips", type=_count, default=96, metavar="N", help="clips to reconstruct (%(default)s)")
    parser.add_argument("--given", type=_count, default=24, metavar="N", help="videos of each condition (%(default)s)")
    parser.add_argument("--reader-clips", type=_count, default=500, metavar="N", help="renders to read (%(default)s)")
    parser.add_argument("--steps", type=_count, action="append", metavar="N", help="steps to try; may be repeated")
    parser.add_argument(
        "--guidance-scale", type=float, action="append", metavar="S", help="guidance to try; may be repeated"
    )
    parser.add_argument("--seed", type=int, default=0, help="of scenes, captions and noise (%(default)s)")
    parser.add_argument(
        "--readers", type=Path, default=Path("runs/readers"), metavar="DIR",
        help="the trained readers; trained first if they are not there (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the report there too, misread prompts included"
    )
    options = parser.parse_args(arguments)
    options.part = options.part or list(PARTS)
    return options


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return count


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit code."""
    options = parse(arguments)
    try:
        report = measure(options, say=lambda text: print(text, file=sys.stderr, flush=True))
    except OsoraError as error:
        print(f"error: {error.message}" + (f" ({error.hint})" if error.hint else ""), file=sys.stderr)
        return error.exit_code
    print("\n".join(report_lines(report)))
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
