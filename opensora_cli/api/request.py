"""Requests to generate, as the command line and Python make them before torch is imported."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from opensora_cli.core.ranks import is_of_launcher
from opensora_cli.core.section import Section
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.layers import Layer, collect_overrides
from opensora_cli.settings.load import GenerateRequest, read_request, read_sidecar


def generate_request(
    given: Layer,
    *,
    below: Layer | None = None,
    assignments: Iterable[str] | Mapping[str, object] = (),
    sidecar: Path | None = None,
    config: Path | None = None,
    on: str | None = None,
) -> GenerateRequest:
    """Return the settings of a request from all sources, with the variables of the environment.

    Args:
        given: Options, and the prompt.
        below: Settings that give way to `given` and `assignments` alone.
        assignments: Settings by key; see `collect_overrides`.
        sidecar: Sidecar of an earlier run, whose description of the video is taken.
        config: Preset by name, or file of settings.
        on: Machine that a dry run plans for, as in `8xH100`.

    Raises:
        RequestError: A key is unknown, an assignment is wrong, or there is no such machine.
        FileProblem: A file of settings or the sidecar is missing or broken.
    """
    overrides = {**(below or {}), **collect_overrides(GenerateSettings, given, assignments)}
    machine = None
    if on is not None:
        from opensora_cli.settings.hardware import read_machine

        machine = read_machine(on)
        overrides = {**machine.counts(overrides), **overrides}
    others: tuple[type[Section], ...] = ()
    if any(name.startswith("OSORA_") for name in os.environ):
        # Variables of training are not refused.
        from opensora_cli.settings.train import TrainSettings

        others = (TrainSettings,)
    return read_request(
        overrides=overrides,
        saved=read_sidecar(sidecar, is_own=is_of_launcher(sidecar, os.environ)) if sidecar else None,
        config=config,
        environment=os.environ,
        others=others,
        on=machine,
    )
