"""The smaller video that is made first: what asks for it, derived from what asks for the video. Needs no torch."""

import math
from collections.abc import Sequence

from opensora_cli.core.exceptions import RequestError
from opensora_cli.sampling.sizes import image_size, num_pixels
from opensora_cli.settings.generate import GenerateSettings


def draft_settings(settings: GenerateSettings, *, height: int, width: int) -> GenerateSettings | None:
    """Return what asks for the draft of a video of this size; None where none is made.

    Seed, steps, prompt and references are those of the video. A RequestError if it is not smaller.
    """
    resolution = settings.draft.resolution
    if resolution is None or settings.from_latents is not None:
        return None
    if settings.video.height is None:
        size = image_size(resolution, settings.video.aspect_ratio, multiple=settings.size_multiple)
    else:
        size = _same_shape(num_pixels(resolution), height, width, multiple=settings.size_multiple)
    if size[0] * size[1] >= height * width:
        raise RequestError(
            f"draft.resolution={resolution} makes {size[1]}x{size[0]}, which is not smaller than the video's "
            f"{width}x{height}",
            hint="use a smaller --draft-res, or a larger --res",
        )
    return settings.replace(
        {
            "draft": {},
            "video.height": size[0],
            "video.width": size[1],
            "output.save_latents": False,
            "output.save_state_every": None,
            "output.last_frame": False,
            "output.preview_every": None,
            "output.explore": False,
            "resume": None,
            "sampling.stop_at": None,
        }
    )


def _same_shape(pixels: float, height: int, width: int, *, multiple: int) -> tuple[int, int]:
    scale = math.sqrt(pixels / (height * width))
    return max(1, round(height * scale / multiple)) * multiple, max(1, round(width * scale / multiple)) * multiple


def start_step(timesteps: Sequence[float], strength: float) -> int:
    """Return the step at whose time, the nearest to `strength`, the video starts; the first and the last are none."""
    return min(range(1, len(timesteps) - 1), key=lambda step: abs(timesteps[step] - strength))
