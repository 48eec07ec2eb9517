"""Settings of the commands that measure, serve and show, and of `osora data`, `osora ckpt` and `osora vae`."""

import os
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path, PurePath
from typing import Annotated, TypeVar

from pydantic import Field, PositiveInt

from opensora_cli.core.choices import QKV, Format, Selection
from opensora_cli.core.exceptions import FileProblem, RequestError
from opensora_cli.core.section import (
    MAX_FRAMES,
    Applies,
    ByteSize,
    FileName,
    PlotFile,
    Section,
    ending,
)
from opensora_cli.models.registry import ARCHITECTURES, AUTO, DEMO, DOWNLOADS, DownloadName
from opensora_cli.settings.applies import PARALLEL, VAE
from opensora_cli.settings.components import VAESettings, settings_of
from opensora_cli.settings.devices import DeviceKind, ParallelSettings, PlacementSettings
from opensora_cli.settings.layers import (
    ConfigFile,
    Given,
    Layer,
    open_config,
    read_environment,
    read_sections,
    validate,
)

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


TableFile = Annotated[FileName, ending(".csv", ".parquet")]
PictureFile = Annotated[FileName, ending(".png", ".jpg", ".jpeg", ".webp")]


class ScanSettings(Section):
    """Folder of pictures and videos to make a table of."""

    folder: FileName = Field(description="Folder to scan, with its subfolders.")
    table: TableFile | None = Field(None, description="Table to write, CSV or parquet. None: DIR.csv.")
    workers: int | None = Field(None, ge=1, le=1024, description="Files to read at a time. None: cores.")
    overwrite: bool = Field(False, description="Replace an existing table.")


class ShardSettings(Section):
    """Table to split into parts."""

    table: TableFile = Field(description="CSV or parquet file.")
    parts: int = Field(ge=2, le=100_000, description="Number of files with equally many rows.")
    overwrite: bool = Field(False, description="Replace existing parts.")


class PreviewSettings(Section):
    """Table to make a contact sheet of."""

    table: TableFile = Field(description="CSV or parquet file.")
    sheet: PictureFile = Field(description="Picture to write: .png, .jpg or .webp.")
    count: int = Field(24, ge=1, le=1000, description="Number of random samples.")
    seed: int = Field(0, ge=0, le=2**62, description="Seed of the choice of samples.")
    overwrite: bool = Field(False, description="Replace an existing picture.")


class WeightDType(StrEnum):
    """Floating point type of written weights."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


_FORMAT_OF_ENDING = {".safetensors": Format.SAFETENSORS} | dict.fromkeys((".pt", ".pth", ".bin"), Format.TORCH)


class InspectSettings(Section):
    """Settings of `osora ckpt inspect`."""

    path: FileName = Field(description="File or folder.")
    select: Selection | None = Field(None, description="Weights of a training to use. None: model.")
    all: bool = Field(False, description="Print a row for each tensor, too.")


class VerifySettings(Section):
    """Settings of `osora ckpt verify`."""

    path: FileName = Field(description="File or folder.")
    preset: str | None = Field(None, description="Require names and shapes of a released model.")


class WriteSettings(Section):
    """Place and format of written weights."""

    target: FileName = Field(description="File or folder to write.")
    format: Format | None = Field(None, description="Format to write. None: by the ending, else safetensors shards.")
    shard_size: ByteSize | None = Field(None, description="Size of a shard, as in 4GB. None means 4096 MiB.")
    overwrite: bool = Field(False, description="Replace an existing file.")

    @property
    def resolved_format(self) -> Format:
        """Format that is given, or that of the target's name."""
        return self.format or self.named_format or Format.SAFETENSORS_SHARDS

    @property
    def named_format(self) -> Format | None:
        """Format of the target's ending, or None for an unknown ending."""
        return _FORMAT_OF_ENDING.get(PurePath(self.target).suffix.lower())

    def rules(self) -> Iterator[str]:
        written, named, ending = self.resolved_format, self.named_format, PurePath(self.target).suffix
        # `v1.5` is a name, and letters after a dot are an ending.
        if self.format is None and named is None and ending[1:2].isalpha():
            yield f"target={self.target} has an ending, {ending}, that names no format: add --format"
            return
        if named not in (None, written):
            yield f"format={written} must agree with the ending of target={self.target}, {named}: use another name"
        if self.shard_size is not None and not written.has_shards:
            sharded = ", ".join(format_ for format_ in Format if format_.has_shards)
            yield f"shard_size={self.shard_size} has no effect on format={written}: use one of {sharded}"


class ConvertSettings(WriteSettings):
    """Settings of `osora ckpt convert`."""

    source: FileName = Field(description="File or folder to read.")
    select: Selection | None = Field(None, description="Weights of a training to use. None: model.")
    drop: tuple[FileName, ...] = Field((), description="Drop tensors named like 'double_blocks.*' in SRC.")
    rename: tuple[str, ...] = Field((), description="Replace the start of names.")
    qkv: QKV | None = Field(None, description="Write q, k and v as in Flux (fused) or Open-Sora (split).")
    dtype: WeightDType | None = Field(None, description="Dtype of all floating point weights.")

    @property
    def options(self) -> dict[str, object]:
        """Options that the result depends on, if given."""
        given = self.model_dump(mode="json", include={"select", "drop", "rename", "qkv", "dtype"})
        return {name: value for name, value in given.items() if value}


class MergeLoraSettings(WriteSettings):
    """Settings of `osora ckpt merge-lora`."""

    base: FileName = Field(description="File or folder of the model.")
    adapter: FileName = Field(description="PEFT folder, or a diffusers, ComfyUI or kohya file.")
    scale: float = Field(1.0, ge=-100, le=100, description="Factor of the adapter. -1 removes it from BASE again.")

    @property
    def options(self) -> dict[str, object]:
        """Options that the result depends on."""
        return {"adapter": self.adapter, "scale": self.scale}


class DownloadSettings(Section):
    """Settings of `osora ckpt download`."""

    preset: DownloadName = Field(description=f"Model to download: {', '.join(DOWNLOADS)}.")
    to: FileName = Field("ckpts", description="Folder for the files; osora generate looks in ckpts.")
    overwrite: bool = Field(False, description="Replace files that differ from those on the Hub.")


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
