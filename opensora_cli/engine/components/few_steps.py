"""Few-step adapters: the adapter that `--turbo` adds, and the sampling that adapters ask for. It needs no torch.

An adapter that was distilled to few steps (Meng et al., "On Distillation of Guided Diffusion Models", arXiv 2210.03142)
works with its own steps and without guidance. Its file states them as JSON in the metadata `osora.sampling`.
"""

import json
from collections.abc import Iterator, Mapping
from operator import attrgetter
from pathlib import Path

from safetensors import SafetensorError, safe_open

from opensora_cli.checkpoint.formats.peft import adapter_files
from opensora_cli.core.exceptions import CheckpointError, RequestError
from opensora_cli.core.reading import parse_object
from opensora_cli.core.section import shown
from opensora_cli.engine.components.weights import DEFAULT_FOLDER, Component, find_weights
from opensora_cli.settings.components import LoraFile
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.generate_sections import SamplingSettings
from opensora_cli.settings.layers import Given

METADATA_KEY = "osora.sampling"
_ASKED = ("num_inference_steps", "timesteps", "solver", "guidance_scale", "image_guidance_scale")
_USUAL = {"num_inference_steps": 4, "guidance_scale": 1.0, "image_guidance_scale": 1.0}
"""Sampling that a dry run assumes for an adapter that is missing."""


def adapters_of(settings: GenerateSettings) -> tuple[LoraFile, ...]:
    """Return the adapters of a generation, with that of `sampling.turbo` if its file exists."""
    if not settings.sampling.turbo or not (path := turbo_path(settings)).exists():
        return settings.loras
    return (*settings.loras, LoraFile(path=str(path)))


def turbo_path(settings: GenerateSettings) -> Path:
    """Return the place of the model's few-step adapter, beside the weights of its transformer. It may not exist."""
    transformer = find_weights(settings).paths.get(Component.TRANSFORMER)
    folder = Path(settings.runtime.weights or DEFAULT_FOLDER) if transformer is None else transformer.parent
    return folder / settings.files.turbo


def require_turbo(settings: GenerateSettings) -> None:
    """Raise CheckpointError if `sampling.turbo` is set and the model has no few-step adapter."""
    if not settings.sampling.turbo or (path := turbo_path(settings)).exists():
        return
    raise CheckpointError(
        f"sampling.turbo=true needs a few-step adapter of {settings.model.name}: {path} does not exist",
        hint="train one with osora train --config distill, and copy its folder there",
    )


def asked_sampling(settings: GenerateSettings) -> dict[str, Given]:
    """Return the settings that the adapters of a generation ask for, by dotted key.

    Raises CheckpointError if metadata are damaged or meant for another model, and RequestError if adapters contradict
    each other.
    """
    asked: dict[str, Given] = {}
    for lora in adapters_of(settings):
        for name, value in _stated(Path(lora.path), settings.model.name).items():
            given = Given(value, lora.path)
            other = asked.setdefault(f"sampling.{name}", given)
            if other.value != value:
                raise RequestError(
                    f"{lora.path} asks for {name}={shown(value)}, and {other.source} for {shown(other.value)}",
                    hint=f"use one of them, or set sampling.{name}",
                )
    if settings.sampling.turbo and not turbo_path(settings).exists():
        asked |= {f"sampling.{name}": Given(value, "--turbo") for name, value in _USUAL.items()}
    return asked


def described(asked: Mapping[str, Given], settings: GenerateSettings) -> Iterator[str]:
    """Yield a line for each adapter: the sampling that it asks for, and the settings that are used instead."""
    for source in dict.fromkeys(given.source for given in asked.values()):
        own = {key: given.value for key, given in asked.items() if given.source == source}
        used = {key: attrgetter(key)(settings) for key in own}
        wanted = ", ".join(f"{key.removeprefix('sampling.')}={shown(value)}" for key, value in own.items())
        instead = [f"{key}={shown(used[key])}" for key, value in own.items() if used[key] != value]
        yield f"adapter: {source} asks for {wanted}" + (f"; used instead: {', '.join(instead)}" if instead else "")


def _stated(path: Path, model: str) -> dict[str, object]:
    """Return the sampling in the metadata of an adapter; empty without one, or if the file cannot be read."""
    file = next((weights for place in (path, path / "lora") if (weights := adapter_files(place)[1]).is_file()), None)
    if file is None or file.suffix != ".safetensors":
        return {}
    try:
        with safe_open(file, "numpy") as opened:
            text = (opened.metadata() or {}).get(METADATA_KEY)
    except (SafetensorError, OSError):
        return {}  # The reader of adapters reports it.
    if text is None:
        return {}
    try:
        stated = parse_object(text.encode())
        found = {name: stated["sampling"][name] for name in _ASKED if name in stated["sampling"]}
        SamplingSettings.model_validate(found)
        trained_for = str(stated["model"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file}: the metadata {METADATA_KEY} are damaged") from error
    if trained_for != model:
        raise CheckpointError(
            f"{file} is a few-step adapter for {shown(trained_for)}, and the model is {model}",
            hint=f"use --model {shown(trained_for)}, or another adapter",
        )
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}


def sampling_metadata(model: str, sampling: Mapping[str, object]) -> dict[str, str]:
    """Return the metadata of the file of an adapter that asks for `sampling`, by the names of its settings."""
    return {METADATA_KEY: json.dumps({"model": model, "sampling": dict(sampling)})}
