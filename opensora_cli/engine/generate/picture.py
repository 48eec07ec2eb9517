"""The picture that is made first: what asks for it, derived from what asks for the video. Needs no torch."""

from pathlib import Path

from pydantic import ValidationError

from opensora_cli.core.exceptions import RequestError
from opensora_cli.core.media_choices import MediaFormat
from opensora_cli.sampling.sizes import nearest_training_size, ratio_value
from opensora_cli.settings.explain import explain
from opensora_cli.settings.generate import GenerateSettings

PICTURE_MODE = "i2v_head"
"""How the picture is given where no mode is asked for."""

_CHOSEN_DEGREES = ("ulysses_degree", "ring_degree", "cfg_parallel_degree")


def picture_settings(settings: GenerateSettings) -> GenerateSettings | None:
    """Return what asks for the picture of a video; None where none is made first.

    As in the reference, its size is of the table of the training, in multiples of a token of the video, and the prompt
    is read without frame rate and motion score. A RequestError if something contradicts itself.
    """
    if not settings.picture.first or settings.from_latents is not None:
        return None
    output = settings.output
    height, width, _ = size_of_picture(settings, settings.picture.resolution)
    changes: dict[str, object] = {
        "picture": {},
        "video.height": height,
        "video.width": width,
        "video.num_frames": 1,
        "video.causal_lengths": False,
        "video.extend": 0,
        "prompts_at": (),
        "draft": {},
        "condition": {"mode": "t2v"},
        "prompt_suffix": {"motion_score": None, "add_fps": False},
        "output.format": MediaFormat.PNG,
        "output.save_latents": False,
        "output.last_frame": False,
        "output.save_state_every": None,
        "output.preview_every": None,
        "output.explore": False,
        "resume": None,
        "sampling.stop_at": None,
        # Ranks share it in another way than the video: there are fewer tokens, and a distilled model has no branches.
        **{f"parallel.{name}": None for name in _CHOSEN_DEGREES},
    }
    if output.named_format is not None:
        changes["output.path"] = str(picture_path(Path(output.path)))
    if not settings.picture.own_model:
        changes |= _other_model(settings)
    try:
        return settings.replace(changes)
    except ValidationError as error:
        raise RequestError("\n".join(f"the picture: {line}" for line in explain(error))) from error


def _other_model(settings: GenerateSettings) -> dict[str, object]:
    picture = settings.picture
    return {
        "model": picture.model.model_dump(),
        "vae": picture.vae.model_dump(),
        **{f"files.{name}": value for name, value in picture.files.model_dump().items()},
        "runtime.model_choice": picture.model.name.value,
        "loras": (),
    }


def size_of_picture(settings: GenerateSettings, resolution: str) -> tuple[int, int, str | None]:
    """Return the height and width of a picture of the video's shape, and for people why it is another one.

    Args:
        settings: of the video, or of a picture that is made alone.
        resolution: of the picture.
    """
    video, multiple = settings.video, settings.size_multiple
    if video.height is not None and video.width is not None:
        asked = f"{video.width}x{video.height}"
        ratio, height, width = nearest_training_size(resolution, video.width / video.height, multiple=multiple)
        is_nearest = width * video.height != height * video.width
    else:
        asked = video.aspect_ratio
        ratio, height, width = nearest_training_size(resolution, video.aspect_ratio, multiple=multiple)
        is_nearest = ratio != asked and width / height != ratio_value(asked)
    if not is_nearest:
        return height, width, None
    note = f"pictures of {resolution} have no size of {asked}: the nearest is {width}x{height}, that of {ratio}"
    return height, width, note


def picture_path(video: Path) -> Path:
    """Return where the picture of a video is kept."""
    return video.with_name(f"{video.stem}.picture.png")
