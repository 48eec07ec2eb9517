"""Settings and facts that results, sidecars, saved latents and checkpoints record. Needs no torch."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from opensora_cli.core.documents import Document
from opensora_cli.core.exceptions import CheckpointError, FileProblem
from opensora_cli.core.formatting import duration, plain
from opensora_cli.core.reading import read_json_object, reading
from opensora_cli.engine.generate.sample import REQUEST_KEY, STEPS_KEY, open_latents
from opensora_cli.media.results import read_tags, sidecar_path
from opensora_cli.settings.layers import Given
from opensora_cli.settings.load import SavedSettings, read_sidecar

_MEDIA_ENDINGS = frozenset({".gif", ".mp4", ".png"})
_WEIGHTS_ENDING = ".safetensors"
_RUN_SETTINGS = "settings.json"
_MODEL_KEYS = ("model", "device_name", "dtype")


class Shown(Document):
    """Settings and facts that a file records."""

    SCHEMA = "osora.show/1"

    path: Path
    kind: str
    """result, sidecar, settings, state (latents of an unfinished run), latents, run or checkpoint."""
    prompt: str | None = None
    negative_prompt: str | None = None
    seed: int | None = None
    timings_s: dict[str, float] = Field(default={})
    """Seconds of each stage."""
    settings: dict[str, Any] = Field(default={})
    recorded: dict[str, Any] = Field(default={})
    """Other facts in the file."""
    summary: tuple[str, ...] = ()
    """Lines about a checkpoint."""

    def lines(self) -> list[str]:
        sizes = [self.recorded.get(key) for key in ("width", "height", "num_frames", "fps")]
        facts = {
            "file": f"{self.path} ({self.kind})",
            "prompt": self.prompt,
            "negative": self.negative_prompt,
            "seed": self.seed,
            "model": ", ".join(str(self.recorded[key]) for key in _MODEL_KEYS if self.recorded.get(key)),
            "video": None if None in sizes else "{}x{}, {} frames at {} fps".format(*sizes),
            "steps": self.recorded.get(STEPS_KEY),
            "timings": ", ".join(f"{stage} {duration(seconds)}" for stage, seconds in self.timings_s.items()),
        }
        known = [f"{name:9} {value}" for name, value in facts.items() if value not in (None, "")]
        return [*known, *self.summary, *(f"setting   {line}" for line in _flat(self.settings))]


def show_recorded(path: Path) -> Shown | None:
    """Return the facts in a file; None for weights, whose tensors `osora ckpt inspect` reads.

    Raises FileProblem if the file is missing, broken, or of no known kind.
    """
    with reading(path):
        path.stat()
    kind, document = "sidecar", dict[str, Any]()
    if _is_media(path):
        kind, sidecar = "result", sidecar_path(path)
        if sidecar.is_file():
            document = read_json_object(sidecar, hint="it is not a sidecar")
        elif tags := read_tags(path):
            document = {**tags, "seed": int(tags["seed"])} if tags.get("seed", "").isdecimal() else dict(tags)
        else:
            raise FileProblem(f"{path} records nothing, and has no sidecar {sidecar.name} beside it")
    elif path.suffix == _WEIGHTS_ENDING:
        try:
            latents = open_latents(path)
        except CheckpointError:
            return None
        kind = "latents" if latents.steps is None else "state"
        document = {"settings": latents.settings, REQUEST_KEY: latents.request_sha256, STEPS_KEY: latents.steps}
    elif path.suffix == ".json":
        document = read_json_object(path, hint="osora show reads sidecars and settings")
        if not isinstance(document.get("settings"), dict):
            kind, document = "settings", {"settings": document}
    else:
        return None
    # Prompt and seed may be in the settings only.
    settings = found if isinstance(found := document.get("settings"), dict) else {}
    sampling = settings.get("sampling")
    own = ("prompt", "negative_prompt", "seed", "timings_s", "settings")
    try:
        return Shown(
            path=path,
            kind=kind,
            prompt=document.get("prompt", settings.get("prompt")),
            negative_prompt=document.get("negative_prompt", settings.get("negative_prompt")),
            seed=document.get("seed", sampling.get("seed") if isinstance(sampling, dict) else None),
            timings_s=document.get("timings_s", {}),
            settings=settings,
            recorded={key: value for key, value in document.items() if key not in own},
        )
    except ValueError as error:
        raise FileProblem(f"{path} is damaged: {plain(str(error).splitlines()[0])}") from error


def continued(path: Path, given: dict[str, Given]) -> SavedSettings | None:
    """Return the settings in the sidecar that `--from` names.

    Without one, `given` gets what the file records, unless it is given: the setting that continues saved latents, or
    the prompt and seed of a result.

    Raises FileProblem if the sidecar is missing or broken, and a result has no prompt in itself.
    """
    if path.name.endswith(_WEIGHTS_ENDING):
        try:
            is_begun = open_latents(path).steps is not None
        except CheckpointError:  # The run says what is wrong with the file.
            is_begun = False
        given["resume" if is_begun else "from_latents"] = Given(str(path), "--from")
        return None
    sidecar = sidecar_path(path) if _is_media(path) else path
    if sidecar is path or sidecar.is_file():
        return read_sidecar(sidecar)
    if not path.exists():
        raise FileProblem(f"{path} does not exist")
    tags = read_tags(path)
    if "prompt" not in tags:
        raise FileProblem(f"{path} has no sidecar {sidecar.name} beside it, and no prompt in itself")
    for key, tag in (("prompt", "prompt"), ("sampling.seed", "seed")):
        if tag in tags:
            given.setdefault(key, Given(tags[tag], f"--from {path}"))
    return None


def _is_media(path: Path) -> bool:
    """Return whether a path is a result: a picture, a video, or the folder of a PNG sequence."""
    return any(path.glob("frame_*.png")) if path.is_dir() else path.suffix.lower() in _MEDIA_ENDINGS


def run_settings(path: Path) -> dict[str, Any]:
    """Return the settings of the training run that wrote weights; empty for weights from elsewhere."""
    folders = (path, *path.parents[:2]) if path.is_dir() else path.parents[:2]
    file = next((folder / _RUN_SETTINGS for folder in folders if (folder / _RUN_SETTINGS).is_file()), None)
    return {} if file is None else read_json_object(file, hint="it is not the settings of a run")


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield each setting in the form that `--set` reads."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}={value if isinstance(value, str) else json.dumps(value)}"
