"""Settings of `osora train`: what is trained, on what, for how long, and where it is kept."""

import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Self

from pydantic import Field, PositiveInt, field_validator, model_validator

from opensora_cli.core.attention_kinds import attention_problems
from opensora_cli.core.exceptions import FileProblem, RequestError
from opensora_cli.core.formatting import shown_path
from opensora_cli.core.ranks import is_of_launcher
from opensora_cli.core.reading import read_json_object
from opensora_cli.settings.base import Section
from opensora_cli.settings.components import ModelSettings, VAESettings
from opensora_cli.settings.data import DataSettings
from opensora_cli.settings.devices import without_retired_keys
from opensora_cli.settings.explain import Given
from opensora_cli.settings.files import list_presets, settings_path
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.ignored import ignored_settings
from opensora_cli.settings.layers import Layer, read_environment, read_sections, validate
from opensora_cli.settings.lora import LoraSettings
from opensora_cli.settings.reference import read_reference_training, read_settings
from opensora_cli.settings.strategy import Strategy, TrainParallelSettings, strategy_problems
from opensora_cli.settings.train_loop import (
    CheckpointSettings,
    Compute,
    LoopSettings,
    OptimizerName,
    OptimizerSettings,
    PrecisionSettings,
    TrainMemorySettings,
)
from opensora_cli.settings.train_objectives import MMDiTTrainSettings, TextTrainSettings, VAETrainSettings
from opensora_cli.settings.watching import SampleSettings, ValidationSettings, WatchingSettings


class TrainTarget(StrEnum):
    """Which part of the video model is trained."""

    VAE = "vae"
    TEXT = "text"
    MMDIT = "mmdit"


class TrainSettings(Section):
    """Everything that a training run depends on."""

    target: TrainTarget = Field(description="the part that is trained")
    output: str = Field(
        default="runs/train", min_length=1, description="folder of checkpoints, log and exported weights"
    )
    init: str | None = Field(
        default=None,
        min_length=1,
        description="file or folder of the first weights; none: random ones, demo: osora's own",
    )
    weights: tuple[str, ...] = Field(
        default=(),
        description="folders to look for the frozen parts in, demo: osora's own; their names: train_mmdit.files",
    )
    device: str = Field(default="auto", description="auto, cpu, cuda or cuda:N; auto: cuda if there is a GPU")
    threads: PositiveInt | None = Field(
        default=None, le=1024, description="threads that compute on the CPU; none: chosen by work, cores and load"
    )
    data: DataSettings = DataSettings()
    model: ModelSettings = ModelSettings()
    vae: VAESettings = VAESettings()
    text: TextTrainSettings = TextTrainSettings()
    train_vae: VAETrainSettings = VAETrainSettings()
    train_mmdit: MMDiTTrainSettings = MMDiTTrainSettings()
    lora: LoraSettings = LoraSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    precision: PrecisionSettings = PrecisionSettings()
    loop: LoopSettings = LoopSettings()
    checkpoints: CheckpointSettings = CheckpointSettings()
    watching: WatchingSettings = WatchingSettings()
    validation: ValidationSettings = ValidationSettings()
    samples: SampleSettings = SampleSettings()
    memory: TrainMemorySettings = TrainMemorySettings()
    strategy: Strategy = Field(default=Strategy.DDP, description="what each of several devices holds of the model")
    parallel: TrainParallelSettings = TrainParallelSettings()
    compile: bool = Field(default=False, description="compile the transformer's blocks with torch.compile")

    @field_validator("device")
    @classmethod
    def _device_exists(cls, value: str) -> str:
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", value):
            raise ValueError(f"device={value} must be auto, cpu, cuda or cuda:N, as in cuda:1")
        return value

    @model_validator(mode="after")
    def _rules_hold(self) -> Self:
        problems = [
            *_device_problems(self),
            *_strategy_problems(self),
            *self.watching.problems(device=self.device, steps=self.loop.steps),
            *self.validation.problems(self.data),
            *self.precision.problems(trains_transformer=self.target is TrainTarget.MMDIT),
            *self.precision.tf32_problems(key="device", device=self.device),
            *self.memory.problems(
                trains_adapter=self.lora.is_on,
                shards=self.strategy.shards,
                compiles=self.compile,
                device=self.device,
            ),
            *self.lora.problems(
                trains_transformer=self.target is TrainTarget.MMDIT,
                init=self.init,
                hidden_size=self.model.hidden_size,
                fp8_linears=self.precision.fp8_linears,
                divides_tokens=self.strategy is Strategy.HYBRID,
            ),
        ]
        if self.target is TrainTarget.TEXT and self.init is not None:
            problems.append(f"init={self.init} has no effect with target=text, whose encoders start at random: drop it")
        if self.target is TrainTarget.VAE:
            problems += _vae_problems(self)
        if self.target is TrainTarget.MMDIT:
            problems += _transformer_problems(self)
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @property
    def device_name(self) -> str:
        """The device of a process that trains alone, as in `device`."""
        devices = self.parallel.devices
        return f"cuda:{devices[0]}" if devices and self.device != "cpu" else self.device


def load_train_settings(
    *,
    config: Path | None,
    overrides: Layer,
    environment: Mapping[str, str],
    saved: Path | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> TrainSettings:
    """Return the settings of a run: `overrides` above the environment above the file above the defaults.

    `config` is a YAML file, a `.py` file of the reference implementation, or the name of a packaged recipe; `report`
    gets a line for each setting of a `.py` file that has no place here. `saved` is the `settings.json` of an earlier
    run, which is complete and so goes above the environment. One of them is needed: no defaults would suit every
    target. Variables for `osora generate` alone are left alone, and so is `OSORA_WEIGHTS`, the folder of the released
    model. A run writes only into the folder of `saved`, or where `overrides` say.

    Raises:
        RequestError: no file is given, or both; a key is unknown, a value breaks a rule, or an override has no effect;
            or `saved` names a folder elsewhere to write to.
        FileProblem: the file is missing or broken.
    """
    if config is None and saved is None:
        recipes = " or ".join(f"--config {name}" for name in list_presets("train"))
        raise RequestError("--config is missing: it names what to train", hint=f"use {recipes}, or your own file")
    if config is not None and saved is not None:
        raise RequestError(
            f"--config {config} cannot go with --from {saved}, whose settings are complete",
            hint="change single settings with --set",
        )
    ours = {name: value for name, value in environment.items() if name != "OSORA_WEIGHTS"}
    variables = read_environment(TrainSettings, ours, others=(GenerateSettings,))
    if config is not None:
        path = settings_path(config, "train")
        sections = read_settings(path, read_reference_training, report)
        given = {**read_sections(TrainSettings, sections, source=str(path)), **variables}
        if path.suffix == ".py" and "data.table" not in {*given, *overrides}:
            raise RequestError(f"{path} names no table of clips", hint="give one: --set data.table=clips.csv")
    else:
        given = {**variables, **_read_saved(saved)} if saved is not None else variables
    settings = validate(TrainSettings, {**given, **overrides})
    _refuse_without_effect(overrides, settings)
    if saved is not None and not is_of_launcher(saved, environment):
        _refuse_other_folders(saved, overrides, settings)
    return settings


def _read_saved(path: Path) -> Layer:
    hint = "--from takes the settings.json in the folder of a run"
    document = read_json_object(path, hint=hint)
    if "target" not in document:
        raise FileProblem(f"{path} holds no settings of a run", hint=hint)
    return read_sections(TrainSettings, without_retired_keys(document), source=str(path))


def _refuse_other_folders(saved: Path, overrides: Layer, settings: TrainSettings) -> None:
    """Refuse to write where only a file says so, which may have been made elsewhere."""
    run = saved.resolve().parent
    cache = settings.train_mmdit.cache if settings.target is TrainTarget.MMDIT else None
    for key, folder in (("output", settings.output), ("train_mmdit.cache", cache)):
        if folder is not None and key not in overrides and not Path(folder).resolve().is_relative_to(run):
            raise RequestError(
                f"{key}={shown_path(folder)} (from {saved}) is outside the folder of that file, and no file decides "
                "that a run writes there",
                hint=f"to write there, or into another folder: --set {shlex.quote(f'{key}={shown_path(folder)}')}",
            )


def _refuse_without_effect(overrides: Mapping[str, Given], settings: TrainSettings) -> None:
    # Allowed in a file, which others may extend; an error on the command line, where it was typed for an effect.
    idle = list(ignored_settings(settings))
    for key, given in overrides.items():
        for each in idle:
            if key == each.key or key.startswith(f"{each.key}."):
                raise RequestError(
                    f"{key}={given.value} (from {given.source}) has no effect with {each.beside}", hint=each.hint
                )


def _device_problems(settings: TrainSettings) -> Iterator[str]:
    parallel, device = settings.parallel, settings.device
    if device == "cpu" and parallel.devices is not None:
        yield "parallel.devices picks GPUs, and the device is cpu: drop one of them"
    if parallel.world_size > 1 and device.startswith("cuda:"):
        yield f"device={device} is one GPU, and there are {parallel.world_size} ranks: use cuda, or parallel.devices"


def _strategy_problems(settings: TrainSettings) -> list[str]:
    return strategy_problems(
        settings.strategy,
        settings.parallel,
        trains_transformer=settings.target is TrainTarget.MMDIT,
        num_heads=settings.model.num_heads,
        micro_batches=settings.loop.micro_batches,
        compiles=settings.compile,
        computes_in_fp32=settings.precision.compute is Compute.FP32,
        uses_muon=settings.optimizer.name is OptimizerName.MUON,
        uses_lora=settings.lora.is_on,
        uses_fp8_linears=settings.precision.fp8_linears,
    )


def _vae_problems(settings: TrainSettings) -> list[str]:
    data, grid = settings.data, settings.vae.grid
    return [
        *data.length_problems(grid),
        *data.size_problems(grid.spatial_compression_ratio),
        *settings.train_vae.problems(settings.vae, init=settings.init, procedural=data.table is None),
    ]


def _transformer_problems(settings: TrainSettings) -> list[str]:
    data, model, memory, grid = settings.data, settings.model, settings.memory, settings.vae.grid
    problems = [
        *data.length_problems(grid),
        *data.size_problems(grid.spatial_compression_ratio * model.patch_size),
        *settings.train_mmdit.problems(
            model=model, grid=grid, longest=max(data.lengths()), procedural=data.table is None
        ),
        *settings.samples.problems(data, grid=grid, patch_size=model.patch_size),
        *attention_problems(
            settings.train_mmdit.attention,
            setting="train_mmdit.attention",
            ring_degree=settings.parallel.ring_degree,
            is_fp32=settings.precision.compute is Compute.FP32,
        ),
    ]
    for kind, count, most in (
        ("double", memory.checkpoint_double_blocks, model.depth),
        ("single", memory.checkpoint_single_blocks, model.depth_single_blocks),
    ):
        if count is not None and count > most:
            problems.append(f"memory.checkpoint_{kind}_blocks={count} must be at most the model's: use 0 to {most}")
    return problems
