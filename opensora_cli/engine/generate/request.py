"""Refuse wrong requests before torch is imported, and derive the settings of a picture or draft that comes first."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pydantic import ValidationError

from opensora_cli.core.exceptions import CheckpointError, OsoraError, RequestError
from opensora_cli.core.media_choices import MediaFormat
from opensora_cli.core.progress import Reporter
from opensora_cli.engine.components.weights import choose_model_early, require_weights_of
from opensora_cli.engine.generate.refinement import require_refinement
from opensora_cli.engine.generate.targets import num_samples, read_made, sample_files
from opensora_cli.media.files import readable_file
from opensora_cli.media.results import refuse_existing
from opensora_cli.sampling.sizes import image_size, nearest_training_size, num_pixels, ratio_value
from opensora_cli.settings.explain import explain
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.load import GenerateRequest, load_generate_settings


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


PICTURE_MODE = "i2v_head"
"""Condition mode of a picture that is made first, if no mode is set."""

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
        "runtime.model_choice": picture.model.name,
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


_PER_NODE = 8
"""GPUs of a machine with H100s."""

LATENTS_HINT = "--from-latents and --resume take the .latents.safetensors file of an unfinished run"


def refuse_early(request: GenerateRequest, *, dry_run: bool, reporter: Reporter) -> None:
    """Refuse a wrong request before torch is imported, with the notes of the request. Otherwise the run reports them.

    Raises:
        RequestError: A value breaks a rule, or a refined prompt has no server.
        FileProblem: A reference, saved latents, an adapter or instructions are missing.
        CheckpointError: Weights are missing, and this is no dry run.
        OutputError: A named result exists already, and this is no dry run.
    """
    try:
        settings = settings_early(request)
        if settings is None:
            return
        for reference in settings.condition.references:
            readable_file(reference)
        for lora in settings.loras if settings.from_latents is None else ():
            if ":" not in lora.path and not Path(lora.path).exists():
                raise CheckpointError(f"{lora.path} is no folder with an adapter, and no file of one")
        if not dry_run:
            require_refinement(settings)
            _require_weights(settings)
            _refuse_named(settings)
    except (OsoraError, ValueError):
        for line in request.notes:
            reporter.note(line)
        raise


@contextmanager
def dry_run_named(request: GenerateRequest) -> Iterator[None]:
    """Name in what a request for several GPUs is refused for, where there are none, the dry run that plans for them."""
    try:
        yield
    except OsoraError as error:
        gpus, device = (request.overrides.get(key) for key in ("parallel.gpus", "runtime.device"))
        count = int(str(gpus.value)) if gpus is not None and str(gpus.value).isdigit() else 1
        is_here = any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()
        if count > 1 and not is_here and (device is None or device.value != "cpu"):
            whole = count if count <= _PER_NODE else -(-count // _PER_NODE) * _PER_NODE
            planned = f"--dry-run --on {whole}xH100 plans it for GPUs that are not here"
            error.hint = "; ".join(filter(None, (error.hint, planned)))
        raise


def require_latents(path: str | Path) -> None:
    """Raise CheckpointError if a file of latents is not there."""
    if not Path(path).is_file():
        raise CheckpointError(f"{path} does not exist or is no file", hint=LATENTS_HINT)


def settings_early(request: GenerateRequest) -> GenerateSettings | None:
    """Return the settings of a request, or None if only torch can tell them. Errors are those of `refuse_early`."""
    latents = request.overrides.get("from_latents")
    latents = latents or request.overrides.get("resume")
    if latents is not None:
        require_latents(str(latents.value))
        if request.saved is None:
            return None  # The file has them.
    device = request.text("runtime.device") or "auto"
    model = choose_model_early(request.model, weights=request.text("runtime.weights"), device=device)
    return None if model is None else load_generate_settings(request, model=model)


def _require_weights(settings: GenerateSettings) -> None:
    picture = picture_settings(settings)
    if picture is not None:
        try:
            require_weights_of(picture)
        except CheckpointError as error:
            hint = f"{error.hint}; --set picture.first=false makes no picture first"
            raise CheckpointError(error.message, hint=hint) from error
    require_weights_of(settings)


def _refuse_named(settings: GenerateSettings) -> None:
    """Refuse a named result that is there, unless it may be what the same request has made before."""
    if settings.output.named_format is None or settings.output.overwrite:
        return
    for index in range(num_samples(settings)):
        sample = sample_files(settings, index)
        made = read_made(sample)
        if (made.get("seed"), made.get("prompt")) != (sample.seed, settings.prompt):
            refuse_existing(sample.media, sample.sidecar)
