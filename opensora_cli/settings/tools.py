"""Settings of `osora bench-comm`, `osora env-check` and `osora mem-profile`."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field

from opensora_cli.core.exceptions import RequestError
from opensora_cli.core.section import Applies, ByteSize, FileName, PlotFile, Section
from opensora_cli.models.registry import DEMO
from opensora_cli.settings.applies import PARALLEL
from opensora_cli.settings.devices import DeviceKind, ParallelSettings
from opensora_cli.settings.enums import Collective, Scaling
from opensora_cli.settings.explain import Given
from opensora_cli.settings.files import open_config
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.hardware import PlannedMachine
from opensora_cli.settings.layers import collect_overrides
from opensora_cli.settings.load import ANY_PROMPT, GenerateRequest, read_request
from opensora_cli.settings.train import TrainSettings, load_train_settings

MIB = 2**20
_BenchBytes = Annotated[ByteSize, Field(le=2**40)]


class BenchCommSettings(Section):
    """Measurements between ranks."""

    applies = PARALLEL

    parallel: ParallelSettings = Field(
        default=ParallelSettings(), description="Ranks. The default is one for each GPU, or two on CPUs."
    )
    device: DeviceKind = Field(
        default="auto", description="auto, cpu or a type of accelerator. auto means GPUs if present."
    )
    min_bytes: _BenchBytes = Field(default=8, description="Smallest size, as in 8 or 1KiB.")
    max_bytes: _BenchBytes | None = Field(default=None, description="Largest size. None: 1 GiB on GPUs, 4 MiB on CPUs.")
    iters: int = Field(default=20, ge=1, le=100_000, description="Timed repeats of each size.")
    warmup: int = Field(default=5, ge=2, le=100_000, description="Repeats before the timed ones.")
    collectives: tuple[Collective, ...] = Field(
        default=tuple(Collective), min_length=1, description="Collectives to measure."
    )
    scaling: Scaling | None = Field(default=None, description="Also time sampling at 1, 2, 4 .. ranks.")
    plot: PlotFile | None = Field(default=None, description="Chart file: .png, .svg or .pdf.")
    overwrite: bool = Field(default=False, description="Replace an existing file.")

    def rules(self) -> Iterator[str]:
        parallel = self.parallel
        if parallel.degrees:
            yield (
                f"parallel.{next(iter(parallel.degrees))} has no effect here: "
                f"use none of {', '.join(parallel.degree_names)}"
            )
        if (parallel.gpus is not None or parallel.devices is not None) and parallel.world_size < 2:
            yield f"gpus={parallel.ranks_per_node} must be at least 2: one rank has no peer"
        if self.max_bytes is not None and self.min_bytes > self.max_bytes:
            yield f"min_bytes={self.min_bytes} is over max_bytes={self.max_bytes}: swap them"

    def largest_bytes(self, *, on_gpu: bool) -> int:
        """Return the largest size for a device."""
        if self.max_bytes is not None:
            return self.max_bytes
        return max(1024 * MIB if on_gpu else 4 * MIB, self.min_bytes)


class EnvCheckSettings(Section):
    """Checks of the environment."""

    files: tuple[str, ...] = Field(default=(), description="Dockerfiles and shell files with variables to check.")
    all_reduce: bool = Field(default=True, description="Run an all-reduce over the devices.")
    all_reduce_seconds: float = Field(default=60.0, gt=0, le=600, description="Timeout of the all-reduce in seconds.")
    bug_report: bool = Field(default=False, description="Hide users, hosts, folders and tokens.")


class MemProfileSettings(Section):
    """Measurements and files of a memory profile."""

    applies = (Applies("memory_limit", lambda s: s.adaptive_batch, "without adaptive_batch: give it, too"),)

    compare: bool = Field(default=False, description="Measure techniques that save memory, one by one.")
    adaptive_batch: bool = Field(default=False, description="Predict the largest batch of a training.")
    memory_limit: ByteSize | None = Field(
        default=None, description="Memory for the batch, as in 24GiB. None: free memory."
    )
    runs: int = Field(default=3, ge=0, le=1000, description="Timed repeats. 0 disables timing.")
    snapshot: FileName | None = Field(default=None, description="File for PyTorch's memory viewer.")
    plot: PlotFile | None = Field(default=None, description="Chart file: .png, .svg or .pdf.")
    overwrite: bool = Field(default=False, description="Replace existing files.")

    def rules(self) -> Iterator[str]:
        if self.snapshot and self.plot and os.path.abspath(self.snapshot) == os.path.abspath(self.plot):
            yield f"snapshot={self.snapshot} and plot must be two files"


def profiled_settings(
    config: Path | None,
    *,
    assignments: Sequence[str],
    device: str | None,
    environment: Mapping[str, str],
    gpus: int | None = None,
    on: PlannedMachine | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> GenerateRequest | TrainSettings:
    """Return the request to generate, or the settings of a training run, to profile.

    `config` is a YAML file, a `.py` file of the reference implementation, or the name of a packaged recipe or preset.
    A file with the key `target` is for training. None means generation with the demo. `report` gets a line with the
    names in a `.py` recipe that are not carried over. A request has such a line in its `notes`.
    """
    shared = {} if gpus is None else {"parallel.gpus": Given(gpus, "--gpus")}
    if on is not None:
        shared = {**on.counts(shared), **shared}
    file = None if config is None else open_config(config, "train", "generate")
    if file is not None and file.is_for_training:
        if device not in (None, "auto", "cpu"):
            raise RequestError(f"--device {device} is not possible: training is profiled on the CPU", hint="drop it")
        overrides = collect_overrides(TrainSettings, shared, assignments)
        return load_train_settings(config=file, overrides=overrides, environment=environment, report=report)
    flags = {} if device is None else {"runtime.device": Given(device, "--device")}
    overrides = collect_overrides(GenerateSettings, {**flags, **shared}, assignments)
    overrides.setdefault("prompt", Given(ANY_PROMPT, "mem-profile"))
    if file is None and on is None:
        overrides.setdefault("runtime.model_choice", Given(DEMO, "mem-profile"))
    return read_request(overrides=overrides, config=file, environment=environment, on=on)


def require_profile(settings: MemProfileSettings, what: GenerateRequest | TrainSettings) -> None:
    """Raise RequestError if `settings` ask for what a profile of `what` does not have."""
    if settings.adaptive_batch and not isinstance(what, TrainSettings):
        raise RequestError(
            "adaptive_batch=true needs a training recipe: a generation computes one clip at a time",
            hint="name a recipe, as in --config demo_lora",
        )
    if settings.compare and isinstance(what, TrainSettings) and (ranks := what.parallel.world_size) > 1:
        raise RequestError(f"compare measures in one process, and parallel.gpus={ranks}: drop one of them")
