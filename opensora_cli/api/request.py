"""From options to a request to generate: what the command line and Python have in common before torch is imported."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from opensora_cli.core.ranks import is_of_launcher
from opensora_cli.settings.base import Section
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.layers import Layer, collect_overrides
from opensora_cli.settings.load import GenerateRequest, read_sidecar


def generate_request(
    given: Layer,
    *,
    below: Layer | None = None,
    assignments: Iterable[str] | Mapping[str, object] = (),
    sidecar: Path | None = None,
    config: Path | None = None,
) -> GenerateRequest:
    """Return what was asked for, with the variables of the environment.

    Args:
        given: the options, and the prompt.
        below: what gives way to them and to the assignments, and wins over all else.
        assignments: as in `collect_overrides`.
        sidecar: of an earlier run, whose description of the video is taken.
        config: a preset by name, or a file of settings.

    Raises:
        RequestError: an assignment is wrong.
        FileProblem: the sidecar is missing or broken.
    """
    return GenerateRequest(
        overrides={**(below or {}), **collect_overrides(GenerateSettings, given, assignments)},
        saved=read_sidecar(sidecar, is_own=is_of_launcher(sidecar, os.environ)) if sidecar else None,
        config=config,
        environment=os.environ,
        others=_other_settings(),
    )


def _other_settings() -> tuple[type[Section], ...]:
    """Return training's settings, whose variables are not refused; imported only where there are variables of osora."""
    if not any(name.startswith("OSORA_") for name in os.environ):
        return ()
    from opensora_cli.settings.train import TrainSettings

    return (TrainSettings,)
