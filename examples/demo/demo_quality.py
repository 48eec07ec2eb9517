"""Measures the demo model: does it show what the prompt says, and how fast.

    python examples/demo/demo_quality.py
    python examples/demo/demo_quality.py --part prompts --choosing --guidance-scale 3 --guidance-scale 5 --steps 20

Five parts, on scenes whose combination of place, weather, time and thing was held out of all training:

- `vae`: how well the autoencoder gives clips back: PSNR, SSIM and detail.
- `prompts`: how often a classifier reads back what the prompt says, from videos made for complete captions; the same of
  the harder ones (by night, in rain or snow); and in how many the thing comes apart for some frames. The classifier was
  trained on rendered clips alone; its accuracy on held-out renders stands beside. Shares have intervals of 95 %
  confidence. With `--choosing`, prompts have combinations that are not held out: checkpoints, steps and guidance are
  chosen by these, so that what is reported was not chosen by itself. `--language ko` takes the same scenes in Korean
  words. `--mode fast --mode turbo` measures `--fast` and `--turbo`. With several seeds, diversity is the distance
  between videos of one prompt.
- `pictures`: the same of single pictures, as far as one frame shows it.
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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from breakups import Steadiness
from demo_world.scenes import Shape
from demo_world.translated_captions import Language
from opensora_cli.core.exceptions import OsoraError
from opensora_cli.core.progress import SilentReporter
from opensora_cli.engine.generate.models import LoadedModels
from opensora_cli.engine.generate.plan import Plan, make_plan
from opensora_cli.engine.generate.request import resolve, with_mode
from opensora_cli.models.registry import DEMO
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.layers import Given, collect_overrides
from opensora_cli.settings.load import GenerateRequest
from quality_measures import (
    measure_conditions,
    measure_pictures,
    measure_prompts,
    measure_reader,
    measure_unbroken,
    measure_vae,
)
from quality_report import SCHEMA, percent, report_lines
from scene_reader import Reader, obtain_reader

PARTS = ("vae", "prompts", "pictures", "conditions", "seconds")
MODES: Mapping[str, tuple[str, ...]] = {"exact": (), "fast": ("sampling.fast=true",), "turbo": ("sampling.turbo=true",)}
"""Settings of each way to make a video."""


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
    """Return the demo's preset with changes, and with the sampling that its few-step adapter asks for, if one is used.

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
    request = GenerateRequest(overrides={**overrides, "runtime.model_choice": Given(DEMO, "this benchmark")})
    return with_mode(resolve(request, reporter=SilentReporter()), SilentReporter())


def try_guidance(
    settings: GenerateSettings,
    models: LoadedModels,
    reader: Reader,
    options: argparse.Namespace,
    *,
    lowest: Mapping[Shape, Steadiness],
    say: Callable[[str], None],
) -> tuple[list[dict[str, Any]], Plan]:
    """Return a report for each choice of steps and guidance that is asked for, and the plan of the best on average."""
    sampling = settings.sampling
    trials = []
    for steps, scale in itertools.product(
        options.steps or [sampling.num_inference_steps], options.guidance_scale or [sampling.guidance_scale]
    ):
        plan = make_plan(settings.replace({"sampling.num_inference_steps": steps, "sampling.guidance_scale": scale}))
        trial = measure_prompts(plan, models, reader, options, lowest=lowest, say=say)
        say(f"{steps} steps, guidance {scale:g}: {percent(trial['accuracy'])}")
        trials.append((trial, plan))
    _, best = max(trials, key=lambda tried: float(tried[0]["accuracy"]["mean"]))
    return [trial for trial, _ in trials], best


def measure(options: argparse.Namespace, *, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure what the command line asks for, and return the report. Pictures and conditions are of the first mode."""
    modes = {
        mode: demo_settings(options.weights, [*options.set, *MODES[mode]], seed=options.seed, device=options.device)
        for mode in options.mode
    }
    settings = modes[options.mode[0]]
    plan = make_plan(settings)
    models = LoadedModels(stay=True)
    report: dict[str, Any] = {"schema": SCHEMA, "seed": options.seed, "settings": settings.model_dump(mode="json")}
    if set(options.part) - {"seconds"}:
        reader = obtain_reader(
            options.reader, num_frames=plan.settings.video.num_frames, fps=plan.settings.video.fps, say=say
        )
        report["reader"] = measure_reader(reader, plan, count=options.reader_clips, seed=options.seed)
    if "vae" in options.part:
        say(f"autoencoder: {options.clips} clips")
        report["vae"] = measure_vae(plan, models, reader, count=options.clips, seed=options.seed)
    best = {mode: make_plan(own) for mode, own in modes.items()}
    if "prompts" in options.part:
        report["prompts"] = []
        lowest = measure_unbroken(plan, models, count=options.clips, seed=options.seed)
        for mode, own in modes.items():
            trials, best[mode] = try_guidance(own, models, reader, options, lowest=lowest, say=say)
            report["prompts"] += [{"mode": mode, **trial} for trial in trials]
    if "pictures" in options.part:
        report["pictures"] = measure_pictures(best[options.mode[0]], models, reader, options, say=say)
    if "conditions" in options.part:
        report["conditions"] = measure_conditions(best[options.mode[0]], models, reader, options, say=say)
    if "seconds" in options.part:
        say("osora generate, as its own process")
        weights = ["--weights", str(Path(options.weights).resolve())] if options.weights else []
        report["generate"] = {}
        for mode in modes:
            changes = [part for each in (*options.set, *MODES[mode]) for part in ("--set", each)]
            report["generate"][mode] = measure_seconds([*weights, "--device", "cpu", *changes])
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
    parser.add_argument("--mode", choices=list(MODES), action="append", help="may be repeated; default: exact")
    parser.add_argument("--prompts", type=_count, default=200, metavar="N", help="videos to read (%(default)s)")
    parser.add_argument("--seeds", type=_count, default=1, metavar="N", help="of noise, for each prompt (%(default)s)")
    parser.add_argument("--pictures", type=_count, default=200, metavar="N", help="pictures to read (%(default)s)")
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
        "--reader", type=Path, default=Path("runs/reader.pt"), metavar="FILE",
        help="the trained reader; trained first if it is not there (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the report there too, misread prompts included"
    )
    options = parser.parse_args(arguments)
    options.part = options.part or list(PARTS)
    options.mode = options.mode or ["exact"]
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
