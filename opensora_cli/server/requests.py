"""Requests of clients: their bodies, and the way from the fields of the API to the settings of a job, without torch."""

import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.datastructures import UploadFile

from opensora_cli.core.conditions import CONDITION_MODES
from opensora_cli.core.exceptions import RequestError
from opensora_cli.core.progress import SilentReporter
from opensora_cli.engine.components.few_steps import turbo_path
from opensora_cli.engine.generate.request import resolve
from opensora_cli.models.registry import ARCHITECTURES
from opensora_cli.settings.applies import refuse_without_effect
from opensora_cli.settings.flags import FLAGS, given_flags
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.layers import Given, Layer, list_presets
from opensora_cli.settings.load import generate_request, load_preset, usual_settings

MOST_FILES = max(mode.max_references for mode in CONDITION_MODES.values())
_CODES = {401: "invalid_token", 403: "forbidden", 404: "not_found", 405: "method_not_allowed", 413: "too_large"}
_TYPES = {401: "authentication_error", 403: "permission_error"}
_LARGEST_JSON = 2**20
_FIELDS = ("prompt", "model", "seconds", "size", "seed", "settings")
_ALLOWED = {"prompt", "negative_prompt", "prompts_at", "prompt_suffix", "video", "sampling", "draft"}
_ALLOWED |= {"condition.mode", "condition.fit", "condition.seamless"}
_ALLOWED |= {"picture.first", "output.last_frame"}
"""Settings of a client: they describe the video, and name no file, server, device or memory."""
_SIDES = {"video.width", "video.height"}
_SHAPE = {"video.resolution", "video.aspect_ratio"}
_SAME = {"seconds": {"video.num_frames"}, "size": _SIDES, "seed": {"sampling.seed"}}
"""Settings that a field stands for."""
_OF_ONE_VIDEO = ("sampling.num_samples", "sampling.stop_at")
"""Settings that do not make one whole video."""
_MAX_PROMPT = 4000
_SIZE = re.compile(r"(\d{1,5})x(\d{1,5})", re.ASCII | re.IGNORECASE)


class ApiError(Exception):
    """An answer with an error in the shape of OpenAI's; its code is that of the status unless it has its own."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers
        kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        code = code or _CODES.get(status, "invalid_request")
        self.error = {"code": code, "message": message, "param": param, "type": kind}

    def response(self) -> JSONResponse:
        return JSONResponse({"error": self.error}, self.status, headers=self.headers)


class InvalidField(RequestError):
    """A field of a request is invalid."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


async def read_body(request: Request) -> tuple[dict[str, Any], list[UploadFile]]:
    """Return the fields of a request in JSON or of a form, and the uploaded references."""
    if request.headers.get("content-type", "").startswith("multipart/form-data"):
        form = await request.form(max_files=MOST_FILES, max_fields=50)
        given: list[Any] = form.getlist("input_reference")
        fields: dict[str, Any] = {name: value for name, value in form.items() if name != "input_reference"}
        if isinstance(fields.get("settings"), str):
            fields["settings"] = _read_json(fields["settings"])
        for name in [name for name in fields if name.startswith("settings[")]:
            if isinstance(settings := fields.setdefault("settings", {}), dict):
                settings[name[9:-1]] = fields.pop(name)
    else:
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > _LARGEST_JSON:
                raise ApiError(413, f"a request in JSON may have {_LARGEST_JSON} bytes")
        fields = _read_json(body.decode("utf-8", "replace"))
        if not isinstance(fields, dict):
            raise ApiError(400, "the body must be a JSON object", code="invalid_json")
        given = [fields.pop("input_reference")] if "input_reference" in fields else []
    if not all(isinstance(each, UploadFile) for each in given):
        message = "input_reference must be a file, uploaded as multipart/form-data"
        raise ApiError(400, message, code="invalid_reference", param="input_reference")
    return fields, given


def _read_json(text: str) -> Any:
    try:
        values = json.loads(text)
        # What an answer cannot repeat is refused, too: NaN, and halves of surrogate pairs.
        json.dumps(values, ensure_ascii=False, allow_nan=False).encode()
        return values
    except (ValueError, RecursionError):
        raise ApiError(400, "the body is no JSON", code="invalid_json") from None


def read_request(
    values: Mapping[str, Any], *, model: str, base: Layer, folder: Path, references: Sequence[Path] = ()
) -> tuple[GenerateSettings, dict[str, Any]]:
    """Return the settings of a request, and its fields as answers repeat them.

    Args:
        values: fields of the request: prompt, model, seconds, size, seed, settings.
        model: model of the server.
        base: settings of the server, which give way to those of the request.
        folder: folder of the job, in which the result is written.
        references: uploaded pictures or videos.

    Raises:
        InvalidField: a field is unknown or has another type.
        RequestError: a setting is unknown or out of range, or settings contradict each other.
    """
    for name in values:
        if name not in _FIELDS:
            raise InvalidField(name, f"{name} is not a field of a video: use one of {', '.join(_FIELDS)}")
    prompt = _text(values, "prompt")
    if prompt is None or not prompt.strip():
        raise InvalidField("prompt", "prompt is empty: describe the video")
    if len(prompt) > _MAX_PROMPT:
        raise InvalidField("prompt", f"prompt has {len(prompt)} characters, and may have {_MAX_PROMPT}")
    if values.get("model") not in (None, "", "auto", model):
        raise InvalidField("model", f"model={values['model']} is not loaded: this server has {model}")
    options = _options(values)
    flags = {name: value for name, value in options.items() if "." not in name}
    assignments = {name: value for name, value in options.items() if "." in name}
    preset = flags.pop("config", None)
    if preset is not None and preset not in presets_of(model):
        raise InvalidField("settings", f"config={preset} is no preset of {model}: {', '.join(presets_of(model))}")
    usual = usual_settings(model)
    if (seconds := _text(values, "seconds")) is not None:
        of_server = base["video.fps"].value if "video.fps" in base else usual.video.fps
        fps = flags.get("fps") or assignments.get("video.fps") or of_server
        flags.setdefault("num_frames", _frames(seconds, fps, usual))
    if (size := _text(values, "size")) is not None:
        if (sides := _SIZE.fullmatch(size)) is None:
            raise InvalidField("size", f"size={size} must be WIDTHxHEIGHT, such as 128x128")
        flags = {"width": sides[1], "height": sides[2], **flags}
    if values.get("seed") is not None:
        flags.setdefault("seed", values["seed"])
    given = {"prompt": Given(prompt, "prompt"), **given_flags(flags)}
    for key in [*given, *assignments]:
        if not _is_allowed(key):
            raise InvalidField("settings", f"{key} is chosen by the server, not by requests")
    own: dict[str, Any] = {"runtime.model_choice": model, "output.path": str(folder), "output.preview_every": 5}
    if references:
        own["condition.references"] = tuple(map(str, references))
    request = generate_request(
        {**given, **{key: Given(value, "the server") for key, value in own.items()}},
        assignments=assignments,
        config=None if preset is None else Path(preset),
    )
    # A setting of the server that has no effect beside those of the request is no error of the client.
    request = replace(request, environment={**request.environment, **base})
    settings = resolve(request, reporter=SilentReporter())
    settings = settings.replace({"output.path": str(folder / f"video.{settings.output_format}")})
    video = settings.video
    if settings.sampling.turbo and not turbo_path(settings).exists():
        raise InvalidField("settings", f"turbo needs a few-step adapter, and this server has none for {model}")
    if "video.num_frames" not in options:
        options.setdefault("num_frames", video.num_frames)
    # Settings of the server that had an effect are repeated, too: a remix and the command line make the same video.
    for key in sorted(base.keys() - given.keys() - assignments.keys() - set[str]().union(*_SAME.values())):
        if _is_allowed(key):
            with suppress(RequestError):
                refuse_without_effect(settings, {key: base[key]})
                options[key] = base[key].value
    answered = {
        "prompt": prompt,
        "model": model,
        "seconds": f"{settings.num_frames / video.fps:g}",
        "size": video.resolution if video.width is None else f"{video.width}x{video.height}",
        "settings": options,
        "seed": settings.sampling.seed,
        "num_frames": settings.num_frames,
        "fps": video.fps,
        "num_references": len(references),
    }
    return settings, answered


def remixed(before: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a remix: those of an earlier request, as answers repeat them, replaced by new ones."""
    fields = {"prompt": before["prompt"], "seed": before["seed"], **values}
    options = _options(values)
    new = {_key(name) for name in options}
    new |= {key for field, keys in _SAME.items() if values.get(field) is not None for key in keys}
    inherited = dict(before["settings"])
    if size := _SIZE.fullmatch(before["size"]):
        inherited |= {"width": size[1], "height": size[2]}
    if new & _SHAPE:
        new |= _SIDES  # a size in pixels would win over the shape
    elif new & _SIDES:
        new |= _SHAPE
    if "sampling.seed" in new and values.get("seed") is None:
        del fields["seed"]
    kept = {name: value for name, value in inherited.items() if _key(name) not in new}
    return {**fields, "settings": kept | options}


def _key(name: str) -> str:
    return FLAGS[name].key if name in FLAGS else name


@cache
def presets_of(model: str) -> tuple[str, ...]:
    """Return the names of a model's presets, the usual one first."""
    usual = ARCHITECTURES[model].presets
    others = (name for name in list_presets("generate") if load_preset(name).model.name == model)
    return tuple(dict.fromkeys((*usual, *others)))


def _options(values: Mapping[str, Any]) -> dict[str, Any]:
    options = values.get("settings", {})
    if options is None:
        return {}
    if not isinstance(options, dict):
        raise InvalidField("settings", "settings must be an object of options, such as {'steps': 20}")
    return {name if "." in name else name.replace("-", "_"): value for name, value in options.items()}


def _is_allowed(key: str) -> bool:
    sections = key, ".".join(key.split(".")[:2]), key.partition(".")[0]
    return key not in _OF_ONE_VIDEO and not _ALLOWED.isdisjoint(sections)


def _frames(seconds: str, fps: Any, usual: GenerateSettings) -> int:
    """Return the number of frames nearest to a time that the model can make."""
    grid, longest = usual.vae.grid, usual.video.max_frames
    try:
        length, longest_s = float(seconds), longest / float(fps)
        frames = length * float(fps)
    except (TypeError, ValueError, ArithmeticError):
        raise InvalidField("seconds", f"seconds={seconds} is no number, or fps={fps} is none above 0") from None
    if not (0 < length <= longest_s + 1 and frames < math.inf):
        raise InvalidField("seconds", f"seconds={seconds} must be above 0 and at most {longest_s:.3g}")
    ratio = grid.time_compression_ratio
    steps = max(1, round((frames - grid.is_causal) / ratio))
    return min(steps * ratio + grid.is_causal, longest)


def _text(values: Mapping[str, Any], name: str) -> str | None:
    value = values.get(name)
    if value is None or value == "":
        return None
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise InvalidField(name, f"{name} must be text")
    return str(value)


def command_of(fields: Mapping[str, Any]) -> str:
    """Return the command line that makes the video of a request."""
    words = ["osora", "generate", fields["prompt"], "--model", fields["model"], "--seed", str(fields["seed"])]
    settings = dict(fields["settings"])
    if size := _SIZE.fullmatch(fields["size"]):
        settings |= {"width": size[1], "height": size[2]}
    settings.pop("seed", None)
    for name, value in settings.items():
        if name not in FLAGS and name != "config":
            words += ["--set", f"{name}={value}"]
        elif value is not False:
            words.append(f"--{name.replace('_', '-')}")
            if value is not True:
                words.append(str(value))
    return shlex.join([*words, *["--ref", "FILE"] * fields["num_references"]])
