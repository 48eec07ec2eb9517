"""Measures the demo model: does it show what the prompt says, and how fast.

    python benchmarks/demo_quality.py
    python benchmarks/demo_quality.py --part prompts --guidance-scale 3 --guidance-scale 5 --steps 20 --steps 30

Four parts, on scenes whose combination of place, weather, time and thing was held out of all training:

- `vae`: how well the autoencoder gives clips back: PSNR, SSIM and detail.
- `prompts`: how often a classifier reads back what the prompt says, from videos made for complete captions. It was
  trained on rendered clips alone; its accuracy on held-out renders stands beside. Shares have intervals of 95 %
  confidence.
- `first-frame`: how well a given first frame comes back, in dB of PSNR.
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
from pathlib import Path
from typing import Any

import numpy as np
import torch
from batch_generate import Clips, as_pixels, generate_clips, reconstruct
from quality_report import SCHEMA, percent, report_lines
from scene_reader import (
    ANSWERS,
    Reader,
    accuracy,
    confidence_interval,
    load_reader,
    right_answers,
    save_reader,
    train_reader,
)

from opensora_cli.core.exceptions import OsoraError
from opensora_cli.core.progress import SilentReporter
from opensora_cli.data.captions import caption_scene
from opensora_cli.data.scenes import Scene, Weather, render_scene, sample_scene
from opensora_cli.engine.generate.execution_plan import ExecutionPlan
from opensora_cli.engine.generate.loaded import LoadedModels
from opensora_cli.engine.generate.plan import make_plan
from opensora_cli.engine.generate.references import GivenFramesPSNR, Reference, with_mode
from opensora_cli.media import similarity
from opensora_cli.settings.enums import ModelName
from opensora_cli.settings.explain import Given
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.layers import collect_overrides
from opensora_cli.settings.load import GenerateRequest, load_generate_settings

PARTS = ("vae", "prompts", "first-frame", "seconds")
READER_STEPS = 700
# Every part draws its own scenes, whatever else is measured.
_VAE_SCENES, _PROMPT_SCENES, _FIRST_FRAME_SCENES, _READER_SCENES = range(4)
_PIXELS_BATCH = 4


def scene_set(count: int, *, seed: int, part: int) -> tuple[list[Scene], list[str]]:
    """Return scenes of combinations that nothing was trained on, each with a moving thing, and a complete caption."""
    rng = np.random.default_rng((seed, part))
    scenes = [sample_scene(rng, held_out=True) for _ in range(count)]
    return scenes, [caption_scene(scene, rng, complete=True) for scene in scenes]


def film(scenes: Sequence[Scene], plan: ExecutionPlan) -> Clips:
    """Return the scenes as clips of the plan's size, length and rate."""
    video = plan.settings.video
    return np.stack(
        [render_scene(scene, size=plan.height, num_frames=video.num_frames, fps=video.fps) for scene in scenes]
    )


def psnr_db(clips_NTHWC: Clips, others_NTHWC: Clips) -> list[float]:
    """Return the PSNR of each clip against the other, over all frames, in dB of the range 0 to 255; 99 at most."""
    pairs = zip(torch.from_numpy(clips_NTHWC), torch.from_numpy(others_NTHWC), strict=True)
    return [similarity.psnr_db(clip, other) for clip, other in pairs]


def ssim(clips_NTHWC: Clips, others_NTHWC: Clips) -> float:
    """Return the mean SSIM of all frames with the others."""
    pairs = zip(*(torch.from_numpy(clips).flatten(0, 1) for clips in (clips_NTHWC, others_NTHWC)), strict=True)
    return float(np.mean([similarity.ssim(frame_HWC, other_HWC) for frame_HWC, other_HWC in pairs]))


def detail(clips_NTHWC: Clips) -> float:
    """Return how sharp clips are: the mean squared difference of pixels that are side by side or above each other."""
    squares = [
        clip_THWC.float().diff(dim=axis).square().mean().item()
        for clip_THWC in torch.from_numpy(clips_NTHWC)
        for axis in (1, 2)
    ]
    return float(np.mean(squares))


def measure_vae(plan: ExecutionPlan, models: LoadedModels, reader: Reader, *, count: int, seed: int) -> dict[str, Any]:
    """Return the mean PSNR of reconstructed clips, for each weather too, their SSIM and detail, and what the reader
    makes of them.
    """
    scenes, _ = scene_set(count, seed=seed, part=_VAE_SCENES)
    clips = film(scenes, plan)
    decoded = reconstruct(plan, models, clips, batch=_PIXELS_BATCH)
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


def measure_reader(reader: Reader, plan: ExecutionPlan, *, count: int, seed: int) -> dict[str, Any]:
    """Return how well the reader reads held-out renders."""
    scenes, _ = scene_set(count, seed=seed, part=_READER_SCENES)
    return {
        "clips": count,
        "accuracy": accuracy(reader.read(film(scenes, plan), fps=plan.settings.video.fps), scenes),
    }


def measure_prompts(
    plan: ExecutionPlan,
    models: LoadedModels,
    reader: Reader,
    *,
    count: int,
    seed: int,
    batch: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Return how well the reader reads back what prompts say, from the videos made for them with the plan."""
    scenes, prompts = scene_set(count, seed=seed, part=_PROMPT_SCENES)
    sampling = plan.settings.sampling
    start = time.perf_counter()

    def on_done(done: int) -> None:
        seconds = time.perf_counter() - start
        say(f"prompts: {done} of {count} videos, {seconds:.0f} s, {seconds / done * (count - done):.0f} s to go")

    clips = generate_clips(
        plan, models, prompts, seeds=range(sampling.seed, sampling.seed + count), batch=batch, on_done=on_done
    )
    seconds = time.perf_counter() - start
    read_NA = reader.read(clips, fps=plan.settings.video.fps)
    shares = accuracy(read_NA, scenes)
    return {
        "videos": count,
        "num_inference_steps": sampling.num_inference_steps,
        "model_evaluations": plan.model_evaluations,
        "detail_of_renders": detail(clips) / detail(film(scenes, plan)),
        "guidance_scale": sampling.guidance_scale,
        "accuracy": shares,
        "intervals": {name: confidence_interval(shares[name], count) for name in ANSWERS},
        "worst": min(shares[name] for name in ANSWERS),
        "seconds_per_video": seconds / count,
        "misread": misread(read_NA, scenes, prompts),
    }


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


def measure_first_frame(
    plan: ExecutionPlan, models: LoadedModels, *, count: int, seed: int, batch: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Return how well given first frames come back in the videos that go on from them."""
    scenes, prompts = scene_set(count, seed=seed, part=_FIRST_FRAME_SCENES)
    pictures_NHWC = film(scenes, plan)[:, 0]
    first = plan.settings.sampling.seed
    clips = generate_clips(
        plan,
        models,
        prompts,
        seeds=range(first, first + count),
        pictures_NHWC=pictures_NHWC,
        batch=batch,
        on_done=lambda done: say(f"first frame: {done} of {count} videos"),
    )
    values = []
    for clip, picture in zip(clips, pictures_NHWC, strict=True):
        psnr = GivenFramesPSNR([Reference(as_pixels(plan, picture[None]), at_head=True)], num_frames=len(clip))
        psnr.add(torch.from_numpy(clip))
        values.append(psnr.db)
    return {"clips": count, "psnr_db": float(np.mean(values)), "lowest_psnr_db": min(values)}


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


def obtain_reader(path: Path, *, say: Callable[[str], None]) -> Reader:
    """Return the reader in `path`; where there is none, train it and save it there."""
    if path.exists():
        return load_reader(path)
    say(f"training the reader, {READER_STEPS} steps, for {path}")
    reader = train_reader(steps=READER_STEPS, say=say)
    save_reader(reader, path)
    return reader


def demo_settings(weights: str | None, assignments: Sequence[str], *, seed: int) -> GenerateSettings:
    """Return the demo's preset, on the CPU, with what the command line changes in it.

    Raises:
        RequestError: a key is unknown, or a value breaks a rule.
    """
    flags = {
        "prompt": Given("raining, sea", "this benchmark"),
        "runtime.device": Given("cpu", "this benchmark"),
        "sampling.seed": Given(seed, "--seed"),
    }
    if weights is not None:
        flags["runtime.weights"] = Given(str(Path(weights).resolve()), "--weights")
    overrides = collect_overrides(GenerateSettings, flags, assignments)
    return with_mode(
        load_generate_settings(GenerateRequest(overrides=overrides), model=ModelName.DEMO), SilentReporter()
    )


def try_guidance(
    settings: GenerateSettings,
    models: LoadedModels,
    reader: Reader,
    options: argparse.Namespace,
    *,
    say: Callable[[str], None],
) -> tuple[list[dict[str, Any]], ExecutionPlan]:
    """Return a report for each choice of steps and guidance that is asked for, and the plan of the best on average."""
    sampling = settings.sampling
    trials = []
    for steps, scale in itertools.product(
        options.steps or [sampling.num_inference_steps], options.guidance_scale or [sampling.guidance_scale]
    ):
        plan = make_plan(settings.replace({"sampling.num_inference_steps": steps, "sampling.guidance_scale": scale}))
        trial = measure_prompts(
            plan, models, reader, count=options.prompts, seed=options.seed, batch=options.batch, say=say
        )
        say(f"{steps} steps, guidance {scale:g}: {percent(trial['accuracy'])}")
        trials.append((trial, plan))
    _, best = max(trials, key=lambda tried: float(tried[0]["accuracy"]["mean"]))
    return [trial for trial, _ in trials], best


def measure(options: argparse.Namespace, *, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure what the command line asks for, and return the report."""
    settings = demo_settings(options.weights, options.set, seed=options.seed)
    plan = make_plan(settings)
    models = LoadedModels(stay=True)
    report: dict[str, Any] = {"schema": SCHEMA, "seed": options.seed, "settings": settings.model_dump(mode="json")}
    if {"vae", "prompts"} & set(options.part):
        reader = obtain_reader(options.reader, say=say)
        report["reader"] = measure_reader(reader, plan, count=options.reader_clips, seed=options.seed)
    if "vae" in options.part:
        say(f"autoencoder: {options.clips} clips")
        report["vae"] = measure_vae(plan, models, reader, count=options.clips, seed=options.seed)
    best = plan
    if "prompts" in options.part:
        report["prompts"], best = try_guidance(settings, models, reader, options, say=say)
    if "first-frame" in options.part:
        report["first_frame"] = measure_first_frame(
            best, models, count=options.pictures, seed=options.seed, batch=options.batch, say=say
        )
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
    parser.add_argument("--part", choices=PARTS, action="append", help="measure only this; may be repeated")
    parser.add_argument("--prompts", type=_count, default=200, metavar="N", help="videos to read (%(default)s)")
    parser.add_argument("--clips", type=_count, default=96, metavar="N", help="clips to reconstruct (%(default)s)")
    parser.add_argument("--pictures", type=_count, default=24, metavar="N", help="first frames to give (%(default)s)")
    parser.add_argument("--reader-clips", type=_count, default=500, metavar="N", help="renders to read (%(default)s)")
    parser.add_argument("--steps", type=_count, action="append", metavar="N", help="steps to try; may be repeated")
    parser.add_argument(
        "--guidance-scale", type=float, action="append", metavar="S", help="guidance to try; may be repeated"
    )
    parser.add_argument("--seed", type=int, default=0, help="of scenes, captions and noise (%(default)s)")
    parser.add_argument("--batch", type=_count, default=8, metavar="N", help="videos made together (%(default)s)")
    parser.add_argument(
        "--reader", type=Path, default=Path("runs/reader.pt"), metavar="FILE",
        help="the trained reader; trained first if it is not there (%(default)s)",
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
