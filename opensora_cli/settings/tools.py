"""Settings of the commands that measure, serve and show, and of `osora vae`."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import Field, PositiveInt, ValidationError

from opensora_cli.core.exceptions import FileProblem, RequestError
from opensora_cli.core.formatting import nearest
from opensora_cli.core.section import MAX_FRAMES, Applies, ByteSize, FileName, PlotFile, Section, changed, shown
from opensora_cli.models.registry import ARCHITECTURES, AUTO, DEMO
from opensora_cli.settings.applies import PARALLEL, SAME_FOR_ALL_RUNS, VAE, refuse_without_effect
from opensora_cli.settings.components import VAESettings, settings_of
from opensora_cli.settings.devices import DeviceKind, ParallelSettings, PlacementSettings
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.layers import (
    ConfigFile,
    Given,
    Layer,
    check_key,
    explain,
    open_config,
    read_environment,
    read_sections,
    validate,
)
from opensora_cli.settings.load import few_evaluations

MIB = 2**20
_BenchBytes = Annotated[ByteSize, Field(le=2**40)]

EnvProfile = StrEnum("EnvProfile", ["LOCAL", "CLOUD", "CLUSTER"])
"""Kind of machine for recommended settings."""

Collective = StrEnum("Collective", "ALL_REDUCE ALL_GATHER REDUCE_SCATTER ALL_TO_ALL BROADCAST SEND_RECV")
"""Collective that `osora bench-comm` measures."""

Scaling = StrEnum("Scaling", ["STRONG", "WEAK"])
"""Scaling test of `osora bench-comm`: the total work (strong), or the work of each rank (weak) is constant."""


class BenchCommSettings(Section):
    """Measurements between ranks."""

    applies = PARALLEL

    parallel: ParallelSettings = Field(ParallelSettings(), description="Ranks. Default: one a GPU, or two on CPUs.")
    device: DeviceKind = Field("auto", description="auto (GPUs if present), cpu or a type of accelerator.")
    min_bytes: _BenchBytes = Field(8, description="Smallest size, as in 8 or 1KiB.")
    max_bytes: _BenchBytes | None = Field(None, description="Largest size. None: 1 GiB on GPUs, 4 MiB on CPUs.")
    iters: int = Field(20, ge=1, le=100_000, description="Timed repeats of each size.")
    warmup: int = Field(5, ge=2, le=100_000, description="Repeats before the timed ones.")
    collectives: tuple[Collective, ...] = Field(tuple(Collective), min_length=1, description="Collectives to measure.")
    scaling: Scaling | None = Field(None, description="Also time steps of sampling at 1, 2, 4 .. ranks.")

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

    files: tuple[str, ...] = Field((), description="Dockerfiles and shell files with variables to check.")
    all_reduce: bool = Field(True, description="Run an all-reduce over the devices.")
    all_reduce_seconds: float = Field(60.0, gt=0, le=600, description="Timeout of the all-reduce in seconds.")
    bug_report: bool = Field(False, description="Hide users, hosts, folders and tokens.")


class MemProfileSettings(Section):
    """Measurements and files of a memory profile."""

    applies = (Applies("memory_limit", lambda s: s.adaptive_batch, "without adaptive_batch: give it, too"),)

    compare: bool = Field(False, description="Measure attention backends.")
    adaptive_batch: bool = Field(False, description="Predict the largest batch of a training.")
    memory_limit: ByteSize | None = Field(None, description="Memory for the batch, as in 24GiB. None: free memory.")
    runs: int = Field(3, ge=0, le=1000, description="Timed runs after the measured one; 0 for none.")
    snapshot: FileName | None = Field(None, description="Write a file for PyTorch's memory viewer, on a GPU.")
    plot: PlotFile | None = Field(None, description="Write a chart: .png, .svg or .pdf.")
    overwrite: bool = Field(False, description="Replace existing files.")

    def rules(self) -> Iterator[str]:
        if self.snapshot and self.plot and os.path.abspath(self.snapshot) == os.path.abspath(self.plot):
            yield f"snapshot={self.snapshot} and plot must be two files"


LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Names of this machine that others cannot reach."""


class ServeSettings(Section):
    """Address, folder and limits of a server."""

    model: str = Field(AUTO, description="Model: auto, demo or a released model.")
    host: str = Field("127.0.0.1", description="Address to listen at. Others than loopback need --token-file.")
    port: int = Field(8000, ge=1, le=65_535, description="Port to listen at.")
    folder: FileName = Field("serve", description="Folder of jobs and their results.")
    token_file: FileName | None = Field(None, description="File with the secret that requests must bring.")
    max_queue: int = Field(100, ge=1, le=100_000, description="Most videos that wait.")
    save_every: float = Field(30.0, gt=0, le=86_400, description="Seconds of work between saves of a video's state.")
    groups: int = Field(1, ge=1, le=64, description="Videos made at the same time, each on its own devices.")

    def rules(self) -> Iterator[str]:
        if self.host not in LOOPBACK and self.token_file is None:
            yield f"host={self.host} lets other machines make videos: give --token-file, too"


class GallerySettings(Section):
    """Folder of results, and the page about it."""

    folder: FileName = Field(description="Folder of results, with the folders in it.")
    output: FileName | None = Field(None, description="Page to write. None means FOLDER/gallery.html.")
    overwrite: bool = Field(False, description="Replace an existing page.")

    def rules(self) -> Iterator[str]:
        if self.output is not None and not self.output.endswith(".html"):
            yield f"output={self.output} must end with .html"


_DEFAULT_PRESET = "demo"
_RELEASED_WEIGHTS = ("OSORA_WEIGHTS", "OSORA_RUNTIME__WEIGHTS")


class VAEWeightsSettings(Section):
    """Location of the weights."""

    file: FileName = Field(ARCHITECTURES[DEMO].files.vae, description="Name of the file in the weights folder.")
    hub_repo: FileName | None = Field(None, description="Hub repository. None means that osora contains it.")


class ClipSettings(Section):
    """Length of clips."""

    num_frames: PositiveInt = Field(33, le=MAX_FRAMES, description="Frames to encode at once. Longer videos are split.")


class VAEOutputSettings(Section):
    """Files of results."""

    folder: FileName = Field("reconstructed", description="Folder of the results.")
    overwrite: bool = Field(False, description="Replace existing files.")
    metadata: bool = Field(True, description="Write a sidecar beside each result.")


class EncodeSettings(Section):
    """Autoencoder and files to encode. Statistics of latents depend on all of these settings."""

    applies = VAE

    files: tuple[str, ...] = Field(min_length=1, description="Pictures and videos.")
    vae: VAESettings = VAESettings()
    weights: VAEWeightsSettings = VAEWeightsSettings()
    clip: ClipSettings = ClipSettings()
    runtime: PlacementSettings = PlacementSettings()


class ReconstructSettings(EncodeSettings):
    """Settings of a reconstruction."""

    output: VAEOutputSettings = VAEOutputSettings()


EncodeSettingsT = TypeVar("EncodeSettingsT", bound=EncodeSettings)


def load_vae_settings(
    schema: type[EncodeSettingsT], *, config: Path | None, overrides: Layer, environment: Mapping[str, str]
) -> EncodeSettingsT:
    """Return the settings of a run: `overrides` over the environment over the file over the defaults.

    `config` is a preset by name, a YAML file, or a recipe of `osora train` or the `settings.json` of its run, for the
    autoencoder in its folder. None means the demo. `OSORA_WEIGHTS`, the folder of the released models, is ignored for
    other weights.

    Raises:
        RequestError: There is no such preset, a key is unknown, or a value breaks a rule.
        FileProblem: The file is missing or broken.
    """
    file = _read(schema, open_config(config or Path(_DEFAULT_PRESET), "vae", "train"))
    given_repo = {**file, **overrides}.get("weights.hub_repo")
    if given_repo is None or given_repo.value is None:
        environment = {name: value for name, value in environment.items() if name not in _RELEASED_WEIGHTS}
    return validate(schema, {**file, **read_environment(schema, environment), **overrides})


def _read(schema: type[EncodeSettings], file: ConfigFile) -> dict[str, Given]:
    """Return the settings in a file over those in the entry of the model that it names."""
    path, values = file.path, dict(file.values)
    if path.suffix == ".py":
        raise FileProblem(f"{path} is not for osora vae", hint="use a preset, as in --config hunyuan")
    model, is_trained = values.pop("model", None), "target" in values
    name = str(model.get("name")) if isinstance(model, Mapping) else ""
    if is_trained:
        values = {"vae": values.get("vae", {}), "runtime": {"weights": values.get("output")}}
    elif model is not None and (name not in ARCHITECTURES or model != {"name": name}):
        raise RequestError(f"model={model} (from {path}) must be the name of one of {', '.join(ARCHITECTURES)}")
    below: dict[str, Given] = {}
    if name in ARCHITECTURES:
        entry, packaged = settings_of(name), ARCHITECTURES[name].is_packaged
        weights = {"file": entry["files"]["vae"], "hub_repo": None if packaged else entry["files"]["hub_repo"]}
        below = read_sections(schema, {"vae": entry["vae"], "weights": {} if is_trained else weights}, source=name)
    return {**below, **read_sections(schema, values, source=str(path))}


Changes = Mapping[str, object]
"""Settings of a run of bench-generate that differ from the exact run, by dotted key."""
Tries = Mapping[str, Changes] | None
"""Changes by name; None means the standard set."""
EXACT = "exact"
"""Name of the run with the settings as they are given, with which the others are compared."""


# Every other setting must be better than fewer Euler steps.
_SAMPLED = (("euler", 30), ("euler", 15), ("ab2", 30), ("ab2", 15), ("heun", 15))
STANDARD: Mapping[str, Changes] = {
    f"{solver}-{steps}": {"sampling.solver": solver, "sampling.num_inference_steps": steps, "sampling.timesteps": None}
    for solver, steps in _SAMPLED
} | {"fast": {"sampling.fast": True}}
"""Settings that are compared if no `--try` is given."""


def read_tries(texts: Sequence[str]) -> Tries:
    """Return the changes of each `--try`: `exact` for none, a name of the standard set, or KEY=VALUE,KEY=VALUE.

    No text means the standard set.
    """
    # The exact run is always made.
    names = [name for name in map(str.strip, texts) if name != EXACT]
    return {name: STANDARD.get(name) or _changes(name) for name in names} if texts else None


def _changes(text: str) -> Changes:
    if "=" not in text:
        close = nearest(text, STANDARD)
        known = f"did you mean {close}?" if close else f"there are {', '.join((EXACT, *STANDARD))}"
        raise RequestError(
            f"--try {text} is no name of the standard set, and no setting",
            hint=f"{known}; settings are given as --try sampling.solver=ab2,sampling.num_inference_steps=15",
        )
    changes: dict[str, object] = {}
    # A value may be a list, with commas of its own.
    for pair in re.split(r",(?=[^,=]*[A-Za-z_][^,=]*=)", text):
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or not key:
            raise RequestError(f"--try {text} must be KEY=VALUE,KEY=VALUE, and has {pair!r}")
        check_key(GenerateSettings, key, source=f"--try {text}")
        if key in SAME_FOR_ALL_RUNS.covered(GenerateSettings):
            hint = f"drop it, or give it to all runs: --set {key}={value}"
            raise RequestError(f"--try {text}: {key} must be the same for all runs", hint=hint)
        changes[key] = value
    return changes


def refuse_unfit(settings: GenerateSettings) -> None:
    """Raise RequestError if settings ask for something other than one whole video from noise."""
    for key, value in changed(settings).items():
        if key in ("from_latents", "resume", "sampling.num_samples", "sampling.stop_at", "output.explore"):
            what = "bench-generate makes one whole video with each setting"
            raise RequestError(f"{key}={shown(value)} cannot be compared: {what}", hint="drop it")


def tried_settings(exact: GenerateSettings, changes: Changes, *, name: str = "") -> GenerateSettings:
    """Return the settings of the exact run with the changes of `--try NAME` and what their `sampling.fast` stands for.

    Raises RequestError if they break a rule, or if a change has no effect.
    """
    if "sampling.fast" in changes and exact.sampling.fast:
        problem = f"--try {name}: sampling.fast has no effect, because the exact run is fast already"
        raise RequestError(problem, hint="compare with a run without --fast")
    given = {key: Given(value, f"--try {name}") for key, value in changes.items()}
    try:
        tried = exact.replace(changes)
        # What a fast exact run stands for is in its settings already.
        if tried.sampling.fast and not exact.sampling.fast:
            few = few_evaluations(tried.sampling, without=exact.sampling.num_inference_steps)
            tried = tried.replace({key: value for key, value in few.items() if key not in changes})
    except ValidationError as error:
        raise RequestError("\n".join(explain(error, given))) from error
    refuse_without_effect(tried, given)
    return tried
