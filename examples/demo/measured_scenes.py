"""Scenes on which the demo model is measured, with captions and as clips."""

from collections.abc import Sequence

import numpy as np

from batch_generate import Clips
from demo_world.captions import caption_scene
from demo_world.scenes import Scene, render_scene, sample_scene
from demo_world.translated_captions import Language
from opensora_cli.engine.generate.plan import Plan

# Each part of the report samples its own scenes, whatever else is measured.
VAE_SCENES, PROMPT_SCENES, CONDITION_SCENES, READER_SCENES, PICTURE_SCENES = range(5)


def scene_set(
    count: int, *, seed: int, part: int, held_out: bool = True, language: Language | None = None
) -> tuple[list[Scene], list[str]]:
    """Return scenes, each with a moving thing, and a complete caption for each, in English by default.

    Their combinations are held out of all training, or with `held_out=False` may be part of it.
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
