"""Requests to generate, from options: shared by the command line and Python, and made before torch is imported."""

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
    """Return a request with the variables of the environment.

    Args:
        given: options and prompt.
        below: settings that lose to `given` and `assignments`, and win over everything else.
        assignments: see `collect_overrides`.
        sidecar: sidecar of an earlier run, to make its video again.
        config: preset by name, or file of settings.

    Raises:
        RequestError: an assignment is wrong.
        FileProblem: the sidecar is missing or broken.
    """
    others: tuple[type[Section], ...] = ()
    if any(name.startswith("OSORA_") for name in os.environ):
        # Variables of training are no errors. Its settings take time to import.
        from opensora_cli.settings.train import TrainSettings

        others = (TrainSettings,)
    return GenerateRequest(
        overrides={**(below or {}), **collect_overrides(GenerateSettings, given, assignments)},
        saved=read_sidecar(sidecar, is_own=is_of_launcher(sidecar, os.environ)) if sidecar else None,
        config=config,
        environment=os.environ,
        others=others,
    )
