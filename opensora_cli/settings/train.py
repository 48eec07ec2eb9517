"""Settings of `osora train`: their loading, and the rules between them."""

import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import Field

from opensora_cli.core import device_names
from opensora_cli.core.attention import attention_problems
from opensora_cli.core.conditions import CONDITION_MODES
from opensora_cli.core.exceptions import FileProblem, RequestError
from opensora_cli.core.formatting import shown_path
from opensora_cli.core.ranks import is_of_launcher
from opensora_cli.core.reading import read_json_object
from opensora_cli.core.section import FileName, Section, one_of
from opensora_cli.models.registry import ARCHITECTURES
from opensora_cli.settings import train_sections as sections
from opensora_cli.settings.applies import TRAIN, Pair, pair_problems, refuse_without_effect
from opensora_cli.settings.components import ModelSettings, VAESettings, channel_problems, settings_of
from opensora_cli.settings.devices import (
    INNER_DEGREES,
    Compression,
    DeviceName,
    Strategy,
    Threads,
    TrainParallelSettings,
)
from opensora_cli.settings.layers import (
    ConfigFile,
    Layer,
    list_presets,
    open_config,
    read_environment,
    read_sections,
    validate,
)
from opensora_cli.settings.reference import read_reference_training, read_settings

VAE_FILE = "vae.safetensors"
TRANSFORMER_FILE = "transformer.safetensors"
LORA_FOLDER = "lora"
_Target = Annotated[str, one_of(lambda: TARGETS)]


class TrainSettings(Section):
    """Settings of a training run."""

    applies = TRAIN

    target: _Target = Field(
        description="Objective: mmdit (the transformer), vae (the autoencoder), distill or dmd (a few-step adapter)."
    )
    output: FileName = Field("runs/train", description="Folder of checkpoints, logs and exported weights.")
    init: FileName | None = Field(None, description="First weights, or demo. None means random weights.")
    weights: tuple[str, ...] = Field((), description="Folders with the frozen parts, or demo.")
    device: DeviceName = Field("auto", description=device_names.HELP)
    threads: Threads | None = Field(None, description="CPU threads. None means by work and cores.")
    data: sections.DataSettings = sections.DataSettings()
    model: ModelSettings = ModelSettings()
    vae: VAESettings = VAESettings()
    text: sections.TextTrainSettings = sections.TextTrainSettings()
    train_vae: sections.VAETrainSettings = sections.VAETrainSettings()
    train_mmdit: sections.MMDiTTrainSettings = sections.MMDiTTrainSettings()
    train_distill: sections.DistillTrainSettings = sections.DistillTrainSettings()
    lora: sections.LoraSettings = sections.LoraSettings()
    optimizer: sections.OptimizerSettings = sections.OptimizerSettings()
    precision: sections.PrecisionSettings = sections.PrecisionSettings()
    loop: sections.LoopSettings = sections.LoopSettings()
    checkpoints: sections.CheckpointSettings = sections.CheckpointSettings()
    watching: sections.WatchingSettings = sections.WatchingSettings()
    validation: sections.ValidationSettings = sections.ValidationSettings()
    samples: sections.SampleSettings = sections.SampleSettings()
    memory: sections.TrainMemorySettings = sections.TrainMemorySettings()
    strategy: Strategy = Field(Strategy.DDP, description="Sharding of the model over devices.")
    parallel: TrainParallelSettings = TrainParallelSettings()
    compile: bool = Field(False, description="Compile the transformer's blocks with torch.compile.")

    @property
    def device_name(self) -> str:
        """Device of a process that trains alone, in the form of `device`."""
        devices = self.parallel.devices
        return device_names.indexed(devices[0]) if devices and self.device != "cpu" else self.device

    @property
    def held_out(self) -> "TrainSettings":
        """Settings of the same run on the clips of `validation.table`, in the shapes of the training clips."""
        table, seed = self.validation.table, self.validation.seed
        return self.replace({"data.table": table, "data.workers": 0, "loop.seed": seed, "validation.every": None})

    @property
    def objective(self) -> "Target":
        """The entry of `TARGETS`."""
        return TARGETS[self.target]

    @property
    def trains_transformer(self) -> bool:
        """Whether the transformer or its adapter is trained, and not the autoencoder."""
        return self.objective.trains_transformer

    @property
    def exports(self) -> tuple[str, ...]:
        """Names of a finished run's exports, for generation and for other runs."""
        return (LORA_FOLDER if self.lora.is_on else self.objective.weights_file,)

    @property
    def clip_cache(self) -> str | None:
        """Folder of encoded clips. None means that the objective reads pixels."""
        return self.train_mmdit.cache if self.trains_transformer else None

    def rules(self) -> Iterator[str]:
        yield from pair_problems(self, needs=_NEEDS, conflicts=_CONFLICTS)
        yield from _device_problems(self)
        table = self.validation.table
        if self.validation.every and table is not None and table == self.data.table:
            yield f"validation.table={table} must be another table than data.table"
        yield from self.objective.rules(self)


def load_train_settings(
    *,
    config: Path | ConfigFile | None,
    overrides: Layer,
    environment: Mapping[str, str],
    saved: Path | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> TrainSettings:
    """Return the settings of a run: `overrides` over the environment over a file over the entry of `model.name`.

    The file is `config` (a recipe by name, a YAML file or a `.py` file of the reference), or `saved`: the complete
    `settings.json` of an earlier run, which precedes the environment. A run writes only into the folder of `saved`, or
    where `overrides` say. `report` gets a line with the names in a `.py` file that are not carried over.

    Raises:
        RequestError: A key is unknown, a value breaks a rule, an override has no effect, or no file is named.
        FileProblem: The file is missing or broken.
    """
    if config is not None and saved is not None:
        both = f"--config {config} cannot go with --from {saved}, whose settings are complete"
        raise RequestError(both, hint="change single settings with --set")
    variables = read_environment(TrainSettings, environment)
    if config is not None:
        file = open_config(config, "train")
        path, values = file.path, read_settings(file, read_reference_training, report)
        given = {**read_sections(TrainSettings, values, source=str(path)), **variables}
        if path.suffix == ".py" and "data.table" not in {*given, *overrides}:
            raise RequestError(f"{path} names no table of clips", hint="give one: --set data.table=clips.csv")
    elif saved is not None:
        hint = "--from takes the settings.json in the folder of a run"
        document = read_json_object(saved, hint=hint)
        if "target" not in document:
            raise FileProblem(f"{saved} holds no settings of a run", hint=hint)
        given = {**variables, **read_sections(TrainSettings, document, source=str(saved))}
    else:
        recipes = " or ".join(f"--config {name}" for name in list_presets("train"))
        raise RequestError("--config is missing: it names what to train", hint=f"use {recipes}, or your own file")
    given = {**given, **overrides}
    settings = validate(TrainSettings, given, below=model_entry(given))
    refuse_without_effect(settings, overrides)
    if saved is not None and not is_of_launcher(saved, environment):
        _refuse_other_folders(saved, overrides, settings)
    return settings


def model_entry(given: Layer) -> Layer:
    """Return the settings in the entry of the model that is named, if there is one."""
    name = str(given["model.name"].value) if "model.name" in given else ""
    if name not in ARCHITECTURES:
        return {}
    entry, frozen = settings_of(name), sections.FrozenFileSettings.model_fields
    values = {
        "model": entry["model"],
        "vae": entry["vae"],
        "text": {name: entry["text"][name] for name in ("t5_max_length", "clip_max_length")},
        "train_mmdit": {"files": {name: entry["files"][name] for name in frozen}},
    }
    return read_sections(TrainSettings, values, source=name)


def _refuse_other_folders(saved: Path, overrides: Layer, settings: TrainSettings) -> None:
    """Refuse to write to a folder that only a file names, which somebody else may have made."""
    run = saved.resolve().parent
    for key, folder in (("output", settings.output), ("train_mmdit.cache", settings.clip_cache)):
        if folder is not None and key not in overrides and not Path(folder).resolve().is_relative_to(run):
            raise RequestError(
                f"{key}={shown_path(folder)} (from {saved}) is outside the folder of that file, and no file decides "
                "that a run writes there",
                hint=f"to write there, or into another folder: --set {shlex.quote(f'{key}={shown_path(folder)}')}",
            )


_BESIDE_ADAPTER = "set it, as in lora.rank=16, or use strategy=zero3 and optimizer.offload_states=true"

_NEEDS = (
    Pair("lora.rank", "init", "name the weights that it is trained beside, as in init=demo"),
    Pair("optimizer.offload_states", "strategy!=ddp", "use zero1, zero2, zero3 or hybrid, which divide the states"),
    Pair("parallel.ulysses_degree>1", "strategy=hybrid", "use hybrid"),
    Pair("parallel.ring_degree>1", "strategy=hybrid", "use hybrid"),
    Pair("parallel.tensor_parallel_degree>1", "strategy=hybrid", "use hybrid"),
    Pair("memory.offload=blocks", "lora.rank", _BESIDE_ADAPTER),
    Pair("memory.offload=blocks", "memory.checkpointing!=none", "use full, since blocks are copied again for backward"),
    Pair("memory.fp8_storage", "lora.rank", _BESIDE_ADAPTER),
    Pair("train_vae.decoder_only", "init", "name trained weights, as in init=demo", "trains_transformer!=true"),
    Pair("data.table", "validation.table", "validation needs clips that are not trained on", "validation.every"),
    Pair("samples.every", "samples.prompts", "give samples.prompts", "trains_transformer"),
    Pair("target=distill", "lora.rank", "set it, as in lora.rank=32: an adapter is trained beside its teacher"),
    Pair("target=dmd", "lora.rank", "set it, as in lora.rank=32: an adapter is trained beside its teacher"),
)

_CONFLICTS = (
    Pair("parallel.devices", f"device!=auto|{device_names.GPU}", "drop one of them"),
    Pair("parallel.dp_shard_degree>1", "strategy=ddp", "use zero1 to zero3"),
    Pair("parallel.compression=bf16", "precision.compute!=fp32", "use none, or precision.compute=fp32"),
    Pair("optimizer.name=muon", "strategy!=ddp", "use adamw, or ddp: it needs whole matrices"),
    Pair("compile", "strategy=hybrid", "use zero3, or false: blocks of hybrid communicate"),
    Pair("lora.rank", "parallel.tensor_parallel_degree>1", "use parallel.ulysses_degree or ring_degree instead"),
    Pair("lora.dropout", "strategy=hybrid", "use 0: ranks would drop the same places of different tokens"),
    Pair("memory.offload=blocks", "strategy!=ddp", "use ddp, which keeps blocks whole"),
    Pair("memory.offload=blocks", "compile", "use one of them"),
    Pair("memory.fp8_storage", "strategy!=ddp", "use ddp, which keeps blocks whole"),
    Pair("memory.host_weights=pinned", "device=cpu", "drop it: a CPU reads weights in place"),
    Pair("memory.checkpointing=selective", "compile", "use full: a compiled block decides itself what it keeps"),
    Pair("memory.checkpoint_double_blocks!=none", "memory.offload=blocks", "use none: all blocks are recomputed"),
    Pair("memory.checkpoint_single_blocks!=none", "memory.offload=blocks", "use none: all blocks are recomputed"),
    Pair("watching.nvtx", "device=cpu", "drop it: it marks the work of a GPU"),
)


def _device_problems(settings: TrainSettings) -> Iterator[str]:
    parallel, device, strategy = settings.parallel, settings.device, settings.strategy
    if parallel.world_size > 1 and device_names.has_index(device):
        kind = device_names.type_of(device)
        yield f"device={device} is one GPU, and there are {parallel.world_size} ranks: use {kind}, or parallel.devices"
    if parallel.compression is Compression.FP8:
        yield "parallel.compression=fp8 would round gradients by up to 1/16, which is for generation: use bf16 or none"
    if problems := [*_degree_problems(settings)]:
        yield from problems
        return
    # With one device, torchrun may have started others. The plan of a run checks them.
    if parallel.world_size > 1:
        yield from parallel.exchange_problems(
            ulysses=parallel.ulysses_degree or 1, tensor=parallel.tensor_parallel_degree or 1
        )
    count, ranks = settings.loop.micro_batches, parallel.data_ranks(strategy)
    if count is not None and (over := count % ranks):
        fix = f"use {count - over + ranks}"
        yield f"loop.micro_batches={count} must be a multiple of the {ranks} data-parallel ranks: {fix}"


def _degree_problems(settings: TrainSettings) -> Iterator[str]:
    strategy, parallel, heads = settings.strategy, settings.parallel, settings.model.num_heads
    if strategy is Strategy.HYBRID and not any((getattr(parallel, name) or 1) > 1 for name in INNER_DEGREES):
        yield f"strategy=hybrid needs one of {', '.join(INNER_DEGREES)} over 1: set it, or use zero3"
    if strategy is Strategy.DDP and parallel.dp_replicate_degree not in (None, parallel.world_size):
        yield (
            f"parallel.dp_replicate_degree={parallel.dp_replicate_degree} must be the number of devices with "
            f"strategy=ddp: drop it, or use {parallel.world_size}"
        )
    tensor = parallel.tensor_parallel_degree or 1
    if tensor > heads:
        yield f"parallel.tensor_parallel_degree={tensor} must be at most model.num_heads={heads}"
    else:
        yield from parallel.head_problems(heads)


def _autoencoder_problems(settings: TrainSettings) -> Iterator[str]:
    grid, crop = settings.vae.grid, settings.train_vae.crop_size
    yield from settings.data.length_problems(grid)
    if crop % (side := grid.spatial_compression_ratio):
        yield f"train_vae.crop_size={crop} must be a multiple of {side}, the side of a latent"


def _transformer_problems(settings: TrainSettings) -> Iterator[str]:
    data, model, grid, train = settings.data, settings.model, settings.vae.grid, settings.train_mmdit
    yield from data.length_problems(grid)
    yield from channel_problems(model, grid)
    if (rank := settings.lora.rank or 0) > model.hidden_size:
        yield f"lora.rank={rank} must be at most model.hidden_size={model.hidden_size}: a higher rank adds nothing"
    modes = [CONDITION_MODES[name] for name in train.mode_weights.by_mode()]
    if not model.cond_embed and any(mode.needs_reference for mode in modes):
        yield "train_mmdit.mode_weights must be 0 except for t2v with model.cond_embed=false"
    longest = max(data.lengths())
    most = max(train.lengths.given_latent_frames(mode, causal=grid.is_causal) for mode in modes)
    if most >= grid.latent_frames(grid.longest_clip(longest)):
        yield (
            f"clips of {longest} frames leave nothing to learn in a condition mode that gives {most} latent frames: "
            f"use at least {grid.num_frames(most + 1)} frames, or 0 for such a mode in train_mmdit.mode_weights"
        )
    yield from attention_problems(
        train.attention,
        setting="train_mmdit.attention",
        ring_degree=settings.parallel.ring_degree,
        is_fp32=settings.precision.compute is sections.Compute.FP32,
    )
    for kind, most in (("double", model.depth), ("single", model.depth_single_blocks)):
        count = getattr(settings.memory, f"checkpoint_{kind}_blocks")
        if count is not None and count > most:
            yield f"memory.checkpoint_{kind}_blocks={count} must be at most the model's: use 0 to {most}"
    yield from _sample_problems(settings)


def _sample_problems(settings: TrainSettings) -> Iterator[str]:
    samples, grid = settings.samples, settings.vae.grid
    frames, height, width = samples.num_frames, samples.height, samples.width
    if samples.every is None:
        return
    if frames is None or height is None or width is None:
        yield f"samples.every={samples.every} needs a size: give samples.num_frames, samples.height and samples.width"
        return
    if (below := grid.longest_clip(frames)) != frames:
        yield f"samples.num_frames={frames} does not suit vae.kind: use {below}"
    multiple = grid.spatial_compression_ratio * settings.model.patch_size
    for name, side in (("height", height), ("width", width)):
        if over := side % multiple:
            yield f"samples.{name}={side} must be a multiple of {multiple}: use {side - over + multiple}"


class Target(NamedTuple):
    """Parts of an objective that need no torch."""

    trains_transformer: bool
    weights_file: str
    """Name of the exported weights, and of the demo's weights of the same part."""
    rules: Callable[[TrainSettings], Iterator[str]]
    """Function that yields one line for each broken rule of the objective."""
    weighs_tokens: bool = False
    """Whether a program can give the loss a weight for each token."""
    has_teacher: bool = False
    """Whether the model without an adapter teaches the adapter."""
    has_critic: bool = False
    """Whether a second adapter is trained beside the exported one."""


TARGETS = {
    "vae": Target(False, VAE_FILE, _autoencoder_problems),
    "mmdit": Target(True, TRANSFORMER_FILE, _transformer_problems, weighs_tokens=True),
    "distill": Target(True, TRANSFORMER_FILE, _transformer_problems, has_teacher=True),
    "dmd": Target(True, TRANSFORMER_FILE, _transformer_problems, has_teacher=True, has_critic=True),
}
"""Objectives by name. `engine/train/objectives` has a module of the same name for each."""
