"""Resolve a request to the settings of its jobs, and refuse wrong requests before torch is imported."""

import math
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

from pydantic import ValidationError

from opensora_cli.core.choices import MediaFormat
from opensora_cli.core.conditions import CONTINUING, T2V, suggested_mode
from opensora_cli.core.exceptions import CheckpointError, MediaError, RequestError
from opensora_cli.core.formatting import format_bytes
from opensora_cli.core.limits import read_private_memory
from opensora_cli.core.progress import Reporter, SilentReporter
from opensora_cli.core.ranks import RankContext
from opensora_cli.engine.components.few_steps import asked_sampling, described, require_turbo
from opensora_cli.engine.components.weights import choose_model, require_named_demo, require_weights_of
from opensora_cli.engine.generate.sample import LATENTS_ENDING, open_latents
from opensora_cli.media.results import readable_file
from opensora_cli.models.registry import AUTO, DEMO, OPEN_SORA_V2
from opensora_cli.sampling.sizes import image_size, nearest_training_size, num_pixels, ratio_value
from opensora_cli.settings.applies import warnings_without_effect
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.layers import Given, explain
from opensora_cli.settings.load import GenerateRequest, SavedSettings, load_generate_settings, usual_settings

PICTURE_MODE = "i2v_head"
"""Condition mode of a video whose picture is made first, if no mode is set."""

_VIDEO_ONLY: Mapping[str, object] = {
    "draft": {},
    "output.save_latents": False,
    "output.save_state_every": None,
    "output.last_frame": False,
    "output.preview_every": None,
    "output.explore": False,
    "resume": None,
    "sampling.stop_at": None,
}
"""Changes for the picture or draft that is made before a video: options that concern the video alone."""


def resolve(
    request: GenerateRequest,
    *,
    reporter: Reporter,
    context: RankContext | None = None,
    is_row: bool = False,
    loading: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> GenerateSettings:
    """Return the settings that a request means on this machine, without torch unless the choice of the model needs it.

    The model decides the preset, and saved latents bring the settings that made them.

    Args:
        context: set in one of several ranks.
        is_row: whether the request is a row of `--prompts`, which devices share by rows.
        loading: context of an import of torch.
    """
    if context is not None and {"parallel.gpus", "parallel.devices", "parallel.nnodes"}.isdisjoint(request.overrides):
        from opensora_cli.engine.launch.rank import rank_counts

        counted = {key: Given(value, "the number of ranks") for key, value in rank_counts(context).items()}
        request = replace(request, overrides={**counted, **request.overrides})
    request, latents = _with_saved_latents(request)
    choice, weights, device = request.model, request.text("runtime.weights"), request.text("runtime.device") or "auto"

    @contextmanager
    def loading_torch() -> Iterator[None]:
        try:  # Refuse what neither of the models that `auto` may choose allows.
            load_generate_settings(request, model=DEMO)
        except RequestError:
            load_generate_settings(request, model=OPEN_SORA_V2)
        with loading():
            yield

    model, reason = choose_model(choice, weights=weights, device=device, loading=loading_torch)
    for line in request.notes:
        reporter.note(line)
    settings = load_generate_settings(request, model=model)
    if choice == DEMO and "runtime.weights" in request.overrides:
        require_named_demo(settings)
    if request.saved is None and (asked := asked_sampling(settings)):
        settings = load_generate_settings(replace(request, config={**asked, **request.config}), model=model)
        for line in described(asked, settings):
            reporter.note(line)
    if latents is not None and "output.path" not in request.overrides:
        name = f"{latents.name.removesuffix(LATENTS_ENDING)}.{settings.output_format}"
        settings = settings.replace({"output.path": str(latents.with_name(name))})
    degree = settings.parallel.data_parallel_degree
    if not is_row and degree is not None and degree > 1:
        raise RequestError(
            f"parallel.data_parallel_degree={degree} spreads the rows of --prompts, and this is one request",
            hint="drop it: the devices share the video",
        )
    if choice == AUTO:
        reporter.note(f"model: {model} ({reason})")
    for line in warnings_without_effect(settings, request.overrides):
        reporter.warn(line)
    return settings


def _with_saved_latents(request: GenerateRequest) -> tuple[GenerateRequest, Path | None]:
    """Return the request with the settings in the latents that it decodes or continues, and their file, if any."""
    decodes = "resume" not in request.overrides
    given = request.overrides.get("from_latents" if decodes else "resume")
    if given is None:
        return request, None
    latents = str(given.value)
    values = open_latents(latents).settings
    if request.saved is not None:
        return request, None
    saved = SavedSettings(source=latents, values=values, decodes=decodes)
    try:
        _ = saved.layer
    except RequestError as error:
        raise CheckpointError(f"{latents} holds settings that this version of osora does not know") from error
    return replace(request, saved=saved), Path(latents)


def refuse_early(settings: GenerateSettings, *, dry_run: bool) -> None:
    """Raise an error for missing files, before torch is imported."""
    for reference in settings.condition.references:
        readable_file(reference)
    for lora in settings.loras if settings.from_latents is None else ():
        if ":" not in lora.path and not Path(lora.path).exists():
            raise CheckpointError(f"{lora.path} is no folder with an adapter, and no file of one")
    if dry_run:
        return
    from opensora_cli.engine.generate.refinement import require_refinement

    require_turbo(settings)
    require_refinement(settings, SilentReporter())
    for part in filter(None, (picture_settings(settings), settings)):
        require_weights_of(part)


def refined_with_mode(settings: GenerateSettings, reporter: Reporter) -> GenerateSettings:
    """Return `settings` with the prompt refined if requested, and with a condition mode."""
    from opensora_cli.engine.generate.refinement import refined

    return with_mode(refined(settings, reporter=reporter), reporter)


def with_mode(settings: GenerateSettings, reporter: Reporter) -> GenerateSettings:
    """Return `settings` with a condition mode, suggested by the references or by the clip to continue."""
    if settings.condition.continued == 0:
        settings = _as_continued(settings, reporter)
    if settings.condition.mode is not None:
        return settings
    references = settings.condition.references
    if settings.picture.first and settings.from_latents is None:
        name = PICTURE_MODE
    elif not references:
        name = T2V.name
    else:
        from opensora_cli.media.read import is_picture, read_video

        for path in references:  # A broken file suggests no mode.
            if not is_picture(path):
                read_video(path, num_frames=1)
        mode = suggested_mode([is_picture(path) for path in references])
        if mode is None:
            raise RequestError(
                f"no condition mode suits these {len(references)} references by itself",
                hint="choose one with --cond, and give one file for each end of the video",
            )
        name = mode.name
    if references:
        given = "reference" if len(references) == 1 else f"{len(references)} references"
        reporter.note(f"condition: {name}, which suits the {given} given")
    return replaced(settings, {"condition.mode": name})


def replaced(settings: GenerateSettings, changes: Mapping[str, object], *, what: str = "") -> GenerateSettings:
    """Return settings with changes by key. Raises RequestError if they break a rule."""
    try:
        return settings.replace(changes)
    except ValidationError as error:
        raise RequestError("\n".join(f"{what}{line}" for line in explain(error))) from error


def _as_continued(settings: GenerateSettings, reporter: Reporter) -> GenerateSettings:
    """Return settings with the length, size and rate of the clip to continue; MediaError if it cannot be continued."""
    from opensora_cli.media.read import probe

    [path], video, multiple = settings.condition.references, settings.video, settings.size_multiple
    facts, mode = probe(path), settings.condition.mode or CONTINUING.name
    if facts.fps is None:
        raise MediaError(f"{path} is a picture, and --continue needs a video", hint=f"--ref {path} starts from it")
    if facts.num_frames < settings.given_frames:
        frames = "1 frame" if facts.num_frames == 1 else f"{facts.num_frames} frames"
        hint = "give a longer video; --ref with --cond i2v_head starts from a single frame"
        raise MediaError(f"{path} has {frames}, and {mode} needs {settings.given_frames}", hint=hint)
    if facts.is_uneven:
        hint = f"make its rate constant: ffmpeg -i {shlex.quote(str(path))} -r 24 even.mp4"
        raise MediaError(f"{path} has frames of uneven length, and the result has one rate", hint=hint)
    most = max(num_pixels(name) for name in video.resolutions)
    scale = min(1.0, math.sqrt(most / (facts.height * facts.width)))
    # The largest size within the limit: rounding up could exceed it.
    height, width = (max(1, int(side * scale) // multiple) * multiple for side in (facts.height, facts.width))
    fps = round(facts.fps)
    needed, free = facts.num_frames * height * width * 3, read_private_memory().free_bytes
    if needed > free // 2:
        raise MediaError(
            f"{path} is too large: its {facts.num_frames:,} frames take {format_bytes(needed)} of memory, and "
            f"{format_bytes(free)} are free",
            hint=f"continue its end alone: ffmpeg -sseof -10 -i {shlex.quote(str(path))} end.mp4",
        )
    if (width, height) != (facts.width, facts.height):
        size = f"{facts.width}x{facts.height} becomes {width}x{height}, a size of the {settings.model.name} model"
        reporter.note(f"continue: {size} (condition.fit={settings.condition.fit})")
    if abs(fps - facts.fps) > 1e-3:
        reporter.note(f"continue: {facts.fps:g} frames a second become {fps}")
    changes = {"video.height": height, "video.width": width, "video.fps": fps}
    return replaced(settings, {"condition.mode": mode, "condition.continued": facts.num_frames, **changes})


def draft_settings(settings: GenerateSettings) -> GenerateSettings | None:
    """Return the settings of the draft from which a video starts; None without one."""
    resolution, multiple = settings.draft.resolution, settings.size_multiple
    if resolution is None or settings.from_latents is not None:
        return None
    height, width, _ = pixel_size(settings)
    if settings.video.height is None:
        rows, columns = image_size(resolution, settings.video.aspect_ratio, multiple=multiple)
    else:
        scale = math.sqrt(num_pixels(resolution) / (height * width))
        rows, columns = (max(1, round(side * scale / multiple)) * multiple for side in (height, width))
    if rows * columns >= height * width:
        raise RequestError(
            f"draft.resolution={resolution} makes {columns}x{rows}, which is not smaller than the video's "
            f"{width}x{height}",
            hint="use a smaller --draft-res, or a larger --res",
        )
    return settings.replace({**_VIDEO_ONLY, "video.height": rows, "video.width": columns})


def picture_settings(settings: GenerateSettings) -> GenerateSettings | None:
    """Return the settings of the picture that is made before a video; None without one.

    As in the reference, its size is a training size in multiples of a token of the video, and its prompt has no frame
    rate and no motion score. Raises RequestError if settings contradict each other.
    """
    picture, output = settings.picture, settings.output
    if not picture.first or settings.from_latents is not None:
        return None
    height, width, _ = size_of_picture(settings, picture.resolution)
    changes: dict[str, object] = {
        **_VIDEO_ONLY,
        "picture": {},
        "video.height": height,
        "video.width": width,
        "video.num_frames": 1,
        "video.causal_lengths": False,
        "video.extend": 0,
        "prompts_at": (),
        "condition": {"mode": "t2v"},
        "prompt_suffix": {"motion_score": None, "add_fps": False},
        "output.format": MediaFormat.PNG,
        # A picture has fewer tokens than the video, and a distilled model has no branches to share.
        **{f"parallel.{name}": None for name in ("ulysses_degree", "ring_degree", "cfg_parallel_degree")},
    }
    if output.named_format is not None:
        changes["output.path"] = str(picture_path(Path(output.path)))
    if not picture.own_model:
        changes |= {
            "model": picture.model.model_dump(),
            "vae": picture.vae.model_dump(),
            **{f"files.{name}": value for name, value in picture.files.model_dump().items()},
            "runtime.model_choice": picture.model.name,
            "video.picture_frames": 1,
            "loras": (),
            "sampling.turbo": False,
        }
        # An adapter of the video asks for sampling that another model does not want.
        usual = usual_settings(settings.model.name)
        for key, given in asked_sampling(settings).items():
            if attrgetter(key)(settings) == given.value:
                changes[key] = attrgetter(key)(usual)
    return replaced(settings, changes, what="the picture: ")


def size_of_picture(settings: GenerateSettings, resolution: str) -> tuple[int, int, str | None]:
    """Return the height and width of a picture of the video's shape, and a note if that is not the requested shape."""
    video = settings.video
    wanted: str | float = video.aspect_ratio
    asked, shape = str(wanted), ratio_value(video.aspect_ratio)
    if video.height is not None and video.width is not None:
        asked, wanted = f"{video.width}x{video.height}", (shape := video.width / video.height)
    ratio, height, width = nearest_training_size(resolution, wanted, multiple=settings.size_multiple)
    if asked == ratio or width / height == shape:
        return height, width, None
    note = f"pictures of {resolution} have no size of {asked}: the nearest is {width}x{height}, that of {ratio}"
    return height, width, note


def pixel_size(settings: GenerateSettings) -> tuple[int, int, str | None]:
    """Return the height and width of a video or picture, and a note as of `size_of_picture`."""
    video = settings.video
    if video.height is not None and video.width is not None:
        return video.height, video.width, None
    if settings.vae.kind.makes_videos:
        return *image_size(video.resolution, video.aspect_ratio, multiple=settings.size_multiple), None
    return size_of_picture(settings, video.resolution)


def picture_path(video: Path) -> Path:
    return video.with_name(f"{video.stem}.picture.png")
