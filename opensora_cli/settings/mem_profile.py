"""Settings of `osora mem-profile`: what is profiled, and which results are written."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from pydantic import Field, NonNegativeInt, model_validator

from opensora_cli.core.exceptions import RequestError
from opensora_cli.settings.base import ByteSize, PlotFile, Section
from opensora_cli.settings.enums import ModelName
from opensora_cli.settings.explain import Given
from opensora_cli.settings.files import read_yaml, settings_path
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.layers import collect_overrides
from opensora_cli.settings.load import GenerateRequest
from opensora_cli.settings.reference import is_for_training
from opensora_cli.settings.train import TrainSettings, load_train_settings

_ANY_PROMPT = "a boat on the sea"


class MemProfileSettings(Section):
    """Which results a profile has, and where they are written."""

    compare: bool = Field(default=False, description="measure techniques that save memory, one by one")
    adaptive_batch: bool = Field(default=False, description="find the largest batch that fits")
    memory_limit: ByteSize | None = Field(
        default=None, description="memory that the batch must fit into, of what is free, as in 24GiB; none: all of it"
    )
    runs: NonNegativeInt = Field(
        default=3, le=1000, description="times that what is measured is run again, to be timed; 0: not timed"
    )
    snapshot: str | None = Field(default=None, min_length=1, description="file for PyTorch's memory viewer")
    plot: PlotFile | None = Field(default=None, description="file for charts: .png, .svg or .pdf")
    overwrite: bool = Field(default=False, description="replace existing files")

    @model_validator(mode="after")
    def _options_agree(self) -> Self:
        if self.memory_limit is not None and not self.adaptive_batch:
            raise ValueError(f"memory_limit={self.memory_limit} has no effect without adaptive_batch")
        if self.snapshot and self.plot and os.path.abspath(self.snapshot) == os.path.abspath(self.plot):
            raise ValueError(f"snapshot={self.snapshot} and plot must be two files")
        return self


def profiled_settings(
    config: Path | None,
    *,
    assignments: Sequence[str],
    device: str | None,
    environment: Mapping[str, str],
    gpus: int | None = None,
) -> GenerateRequest | TrainSettings:
    """Return what is to be profiled: a request to generate, or a training.

    `config` is a YAML file, a `.py` file of the reference implementation, or the name of a packaged recipe or preset;
    one with the key `target` is a training. None: the demo, generating. Raises RequestError if there is no such recipe,
    a key is unknown, or a value breaks a rule, and FileProblem if the file is missing or broken.
    """
    shared = {} if gpus is None else {"parallel.gpus": Given(gpus, "--gpus")}
    if config is not None and _is_training(config):
        if device not in (None, "auto", "cpu"):
            raise RequestError(
                f"--device {device} is not possible: a training is profiled on the CPU", hint="drop --device"
            )
        overrides = collect_overrides(TrainSettings, shared, assignments)
        return load_train_settings(config=config, overrides=overrides, environment=environment)
    flags = {} if device is None else {"runtime.device": Given(device, "--device")}
    overrides = collect_overrides(GenerateSettings, {**flags, **shared}, assignments)
    overrides.setdefault("prompt", Given(_ANY_PROMPT, "mem-profile"))
    if config is None:
        overrides.setdefault("runtime.model_choice", Given(ModelName.DEMO.value, "mem-profile"))
        return GenerateRequest(overrides=overrides, environment=environment, others=(TrainSettings,))
    return GenerateRequest(overrides=overrides, config=config, environment=environment, others=(TrainSettings,))


def _is_training(config: Path) -> bool:
    path = settings_path(config, "train", "generate")
    if path.suffix == ".py":
        return is_for_training(path)
    return "target" in read_yaml(path)
