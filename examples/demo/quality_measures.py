"""Measures of the demo model: autoencoder, prompts, pictures and conditions."""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from batch_generate import Clips, generate_clips, given_of, reconstruct
from breakups import Steadiness, is_broken, lowest_steadiness
from clip_quality import detail, psnr_db, root_mean_square, ssim
from demo_world.scenes import Scene, Shape, Time, Weather
from measured_scenes import (
    CONDITION_SCENES,
    PICTURE_SCENES,
    PROMPT_SCENES,
    READER_SCENES,
    VAE_SCENES,
    film,
    scene_set,
)
from opensora_cli.core.conditions import CONDITION_MODES, ConditionMode
from opensora_cli.engine.generate.models import LoadedModels
from opensora_cli.engine.generate.plan import Plan, make_plan
from opensora_cli.engine.generate.references import GivenFramesPSNR
from scene_reader import (
    ANSWERS,
    STILL,
    Reader,
    accuracy,
    confidence_interval,
    read_frame,
    right_answers,
)


def measure_vae(plan: Plan, models: LoadedModels, reader: Reader, *, count: int, seed: int) -> dict[str, Any]:
    """Return the mean PSNR of reconstructed clips, for each weather too, their SSIM and detail, and what the reader
    makes of them.
    """
    scenes, _ = scene_set(count, seed=seed, part=VAE_SCENES)
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
    scenes, _ = scene_set(count, seed=seed, part=READER_SCENES)
    return {
        "clips": count,
        "accuracy": accuracy(reader.read(film(scenes, plan), fps=plan.settings.video.fps), scenes),
    }


def measure_prompts(
    plan: Plan,
    models: LoadedModels,
    reader: Reader,
    options: argparse.Namespace,
    *,
    lowest: Mapping[Shape, Steadiness],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Return how well the reader reads back what prompts say, from the videos made for them with the plan.

    `lowest` has the figures of unbroken clips; see `breakups`. `diversity` is the mean distance between the videos of a
    prompt with one seed and the next, as a share of the range of pixels; None for one seed.
    """
    count, fps = options.prompts, plan.settings.video.fps
    scenes, prompts = scene_set(
        count, seed=options.seed, part=PROMPT_SCENES, held_out=not options.choosing, language=options.language
    )
    sampling = plan.settings.sampling
    start = time.perf_counter()
    read, frames, broken, details, distances = [], [], [], [], []
    other: Clips | None = None
    for done in range(0, count * options.seeds, count):

        def on_done(more: int, done: int = done) -> None:
            seconds, left = time.perf_counter() - start, count * options.seeds - done - more
            say(f"prompts: {done + more} videos, {seconds:.0f} s, {seconds / (done + more) * left:.0f} s to go")

        first = sampling.seed + done
        clips = generate_clips(plan, models, prompts, seeds=range(first, first + count), on_done=on_done)
        read.append(reader.read(clips, fps=fps))
        middle = clips[:, clips.shape[1] // 2]
        frames.append(read_frame(reader, middle, num_frames=clips.shape[1], fps=fps))
        broken += [is_broken(clip, scene, lowest) for clip, scene in zip(clips, scenes, strict=True)]
        details.append(detail(clips))
        distances += [] if other is None else [root_mean_square(clips, other)]
        other = clips
    seconds, videos = time.perf_counter() - start, count * options.seeds
    read_NA, shown = torch.cat(read), scenes * options.seeds
    shares = accuracy(read_NA, shown)
    return {
        "videos": videos,
        "choosing": options.choosing,
        "language": options.language or "en",
        "num_inference_steps": sampling.num_inference_steps,
        "model_evaluations": plan.model_evaluations,
        "detail_of_renders": float(np.mean(details)) / detail(film(scenes, plan)),
        "diversity": float(np.mean(distances)) if distances else None,
        "guidance_scale": sampling.guidance_scale,
        "accuracy": shares,
        "intervals": {name: confidence_interval(shares[name], videos) for name in ANSWERS},
        "worst": min(shares[name] for name in ANSWERS),
        "middle_frame_accuracy": accuracy(torch.cat(frames), shown, attributes=STILL),
        "hard": measured_hard(read_NA, shown),
        "broken": [index for index, comes_apart in enumerate(broken) if comes_apart],
        "seconds_per_video": seconds / videos,
        "misread": misread(read_NA, shown, prompts * options.seeds),
    }


def measure_pictures(
    plan: Plan,
    models: LoadedModels,
    reader: Reader,
    options: argparse.Namespace,
    *,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Return how well the reader reads back what prompts say, from single pictures and from first frames of renders."""
    count, video = options.pictures, plan.settings.video
    scenes, prompts = scene_set(count, seed=options.seed, part=PICTURE_SCENES)
    first = plan.settings.sampling.seed
    pictures = generate_clips(
        make_plan(plan.settings.replace({"video.num_frames": 1})),
        models,
        prompts,
        seeds=range(first, first + count),
        on_done=lambda done: say(f"pictures: {done} of {count}"),
    )
    renders = film(scenes, plan)

    def read(frames_NHWC: Clips) -> dict[str, float]:
        answers = read_frame(reader, frames_NHWC, num_frames=video.num_frames, fps=video.fps)
        return accuracy(answers, scenes, attributes=STILL)

    return {
        "pictures": count,
        "accuracy": read(pictures[:, 0]),
        "accuracy_of_renders": read(renders[:, 0]),
        "detail_of_renders": detail(pictures) / detail(renders[:, :1]),
    }


def is_hard(scene: Scene) -> bool:
    """Return whether it is night, or rain or snow falls."""
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
    scenes, prompts = scene_set(options.given, seed=options.seed, part=CONDITION_SCENES)
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


def measure_unbroken(plan: Plan, models: LoadedModels, *, count: int, seed: int) -> dict[Shape, Steadiness]:
    """Return for each shape the lowest figures of `count` or more rendered clips, encoded and decoded."""
    scenes, _ = scene_set(-(-count // len(Shape)), seed=seed, part=VAE_SCENES)
    each = [
        replace(scene, thing=replace(scene.thing, shape=shape)) for scene in scenes for shape in Shape if scene.thing
    ]
    return lowest_steadiness([*reconstruct(plan, models, film(each, plan))], each)
