"""Settings of `osora train`: their loading, and the rules between them."""

import shlex
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path

from pydantic import Field

from opensora_cli.core.attention_kinds import attention_problems
from opensora_cli.core.conditions import CONDITION_MODES
from opensora_cli.core.exceptions import FileProblem, RequestError
from opensora_cli.core.formatting import shown_path
from opensora_cli.core.ranks import is_of_launcher
from opensora_cli.core.reading import read_json_object
from opensora_cli.settings.applies import TRAIN, refuse_without_effect
from opensora_cli.settings.base import FileName, Section
from opensora_cli.settings.components import ModelSettings, VAESettings
from opensora_cli.settings.data import DataSettings
from opensora_cli.settings.devices import Threads, device_problem, without_retired_keys
from opensora_cli.settings.enums import Compression, HostWeights, VAEKind
from opensora_cli.settings.files import list_presets
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.layers import Layer, read_environment, read_sections, validate
from opensora_cli.settings.lora import LoraSettings
from opensora_cli.settings.reference import ConfigFile, open_config, read_reference_training, read_settings
from opensora_cli.settings.strategy import INNER_DEGREES, Strategy, TrainParallelSettings
from opensora_cli.settings.train_loop import (
    CheckpointSettings,
    Compute,
    LoopSettings,
    OptimizerName,
    OptimizerSettings,
    PrecisionSettings,
    TrainMemorySettings,
    WeightOffload,
)
from opensora_cli.settings.train_objectives import MMDiTTrainSettings, TextTrainSettings, VAETrainSettings
from opensora_cli.settings.watching import SampleSettings, ValidationSettings, WatchingSettings


class TrainTarget(StrEnum):
    """Part of the video model that is trained."""

    VAE = "vae"
    TEXT = "text"
    MMDIT = "mmdit"


class TrainSettings(Section):
    """Settings of a training run."""

    applies = TRAIN

    target: TrainTarget = Field(description="Part of the video model that is trained.")
    output: FileName = Field(default="runs/train", description="Folder of checkpoints, logs and exported weights.")
    init: FileName | None = Field(
        default=None, description="File or folder of the first weights, or demo for osora's own. None: random weights."
    )
    weights: tuple[str, ...] = Field(
        default=(), description="Folders with the frozen parts, or demo. train_mmdit.files has the names in them."
    )
    device: str = Field(default="auto", description="auto, cpu, cuda or cuda:N. auto means cuda if there is a GPU.")
    threads: Threads | None = Field(default=None, description="CPU threads. None means by work, cores and load.")
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
    strategy: Strategy = Field(default=Strategy.DDP, description="Sharding of the model over devices.")
    parallel: TrainParallelSettings = TrainParallelSettings()
    compile: bool = Field(default=False, description="Compile the transformer's blocks with torch.compile.")

    @property
    def device_name(self) -> str:
        """Device of a process that trains alone, in the form of `device`."""
        devices = self.parallel.devices
        return f"cuda:{devices[0]}" if devices and self.device != "cpu" else self.device

    def rules(self) -> Iterator[str]:
        yield from _device_problems(self)
        yield from _strategy_problems(self)
        yield from _watching_problems(self)
        yield from _memory_problems(self)
        yield from _lora_problems(self)
        if self.target is TrainTarget.VAE:
            yield from _vae_problems(self)
        if self.target is TrainTarget.MMDIT:
            yield from _transformer_problems(self)
            yield from _sample_problems(self)


def load_train_settings(
    *,
    config: Path | ConfigFile | None,
    overrides: Layer,
    environment: Mapping[str, str],
    saved: Path | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> TrainSettings:
    """Return the settings of a run: `overrides` over the environment over a file over the defaults.

    `config` is a YAML file, a `.py` file of the reference implementation, or the name of a packaged recipe. `saved` is
    the `settings.json` of an earlier run. It is complete and so precedes the environment. One of them is needed.
    `report` gets one line for each setting of a `.py` file that osora does not have. Variables of `osora generate` and
    `OSORA_WEIGHTS`, the folder of the released model, are ignored. A run writes only into the folder of `saved`, or
    where `overrides` say.

    Raises:
        RequestError: Not exactly one file is given, a key is unknown, a value breaks a rule, an override has no effect,
            or `saved` names another folder to write to.
        FileProblem: The file is missing or broken.
    """
    if config is not None and saved is not None:
        raise RequestError(
            f"--config {config} cannot go with --from {saved}, whose settings are complete",
            hint="change single settings with --set",
        )
    ours = {name: value for name, value in environment.items() if name != "OSORA_WEIGHTS"}
    variables = read_environment(TrainSettings, ours, others=(GenerateSettings,))
    if config is not None:
        file = open_config(config, "train")
        path, sections = file.path, read_settings(file, read_reference_training, report)
        given = {**read_sections(TrainSettings, sections, source=str(path)), **variables}
        if path.suffix == ".py" and "data.table" not in {*given, *overrides}:
            raise RequestError(f"{path} names no table of clips", hint="give one: --set data.table=clips.csv")
    elif saved is not None:
        given = {**variables, **_read_saved(saved)}
    else:
        recipes = " or ".join(f"--config {name}" for name in list_presets("train"))
        raise RequestError("--config is missing: it names what to train", hint=f"use {recipes}, or your own file")
    settings = validate(TrainSettings, {**given, **overrides})
    refuse_without_effect(settings, overrides)
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
    """Refuse to write to a folder that only a file names, which somebody else may have made."""
    run = saved.resolve().parent
    cache = settings.train_mmdit.cache if settings.target is TrainTarget.MMDIT else None
    for key, folder in (("output", settings.output), ("train_mmdit.cache", cache)):
        if folder is not None and key not in overrides and not Path(folder).resolve().is_relative_to(run):
            raise RequestError(
                f"{key}={shown_path(folder)} (from {saved}) is outside the folder of that file, and no file decides "
                "that a run writes there",
                hint=f"to write there, or into another folder: --set {shlex.quote(f'{key}={shown_path(folder)}')}",
            )


def _device_problems(settings: TrainSettings) -> Iterator[str]:
    parallel, device = settings.parallel, settings.device
    if problem := device_problem("device", device):
        yield problem
    if device == "cpu" and parallel.devices is not None:
        yield "parallel.devices picks GPUs, and the device is cpu: drop one of them"
    if parallel.world_size > 1 and device.startswith("cuda:"):
        yield f"device={device} is one GPU, and there are {parallel.world_size} ranks: use cuda, or parallel.devices"


def _strategy_problems(settings: TrainSettings) -> Iterator[str]:
    strategy, parallel, compiles = settings.strategy, settings.parallel, settings.compile
    before = [*_degree_problems(settings), *_exchange_problems(settings)]
    yield from before
    if settings.target is not TrainTarget.MMDIT and strategy.shards:
        yield f"strategy={strategy} divides the blocks of the transformer: with other targets use ddp"
    if settings.target is not TrainTarget.MMDIT and compiles:
        yield "compile=true is for the blocks of the transformer: with other targets use false"
    if strategy.shards and settings.optimizer.name is OptimizerName.MUON:
        yield f"optimizer.name=muon needs whole matrices, not those of strategy={strategy}: use adamw, or ddp"
    if strategy is Strategy.HYBRID and compiles:
        yield "compile=true does not go with strategy=hybrid, whose blocks talk to others: use zero3, or false"
    if parallel.tensor_parallel_degree not in (None, 1):
        named = f"parallel.tensor_parallel_degree={parallel.tensor_parallel_degree}"
        if settings.lora.is_on:
            yield f"lora does not go with {named}: use parallel.ulysses_degree or ring_degree instead"
        if settings.precision.fp8_linears:
            yield f"precision.fp8_linears=true does not go with {named}: use one of them"
    count, ranks = settings.loop.micro_batches, parallel.data_ranks(strategy)
    if not before and count is not None and count % ranks:
        yield (
            f"loop.micro_batches={count} must be a multiple of the {ranks} data-parallel ranks: "
            f"use {-(-count // ranks) * ranks}"
        )


def _degree_problems(settings: TrainSettings) -> Iterator[str]:
    strategy, parallel, heads = settings.strategy, settings.parallel, settings.model.num_heads
    inner = {name: degree for name, degree in parallel.degrees.items() if degree > 1 and name in INNER_DEGREES}
    if strategy is not Strategy.HYBRID and inner:
        named = " x ".join(f"parallel.{name}={degree}" for name, degree in inner.items())
        yield f"{named} has no effect with strategy={strategy}: use hybrid"
    if strategy is Strategy.HYBRID and not inner:
        yield (
            "strategy=hybrid needs parallel.tensor_parallel_degree, ulysses_degree or ring_degree over 1: "
            "set one, or use zero3"
        )
    if strategy is Strategy.DDP and (parallel.dp_shard_degree or 1) > 1:
        yield f"parallel.dp_shard_degree={parallel.dp_shard_degree} has no effect with strategy=ddp: use zero1 to zero3"
    if strategy is Strategy.DDP and parallel.dp_replicate_degree not in (None, parallel.world_size):
        yield (
            f"parallel.dp_replicate_degree={parallel.dp_replicate_degree} must be the number of devices with "
            f"strategy=ddp: drop it, or use {parallel.world_size}"
        )
    tensor = parallel.tensor_parallel_degree or 1
    if tensor > heads:
        yield f"parallel.tensor_parallel_degree={tensor} must be at most model.num_heads={heads}"
    elif (parallel.ulysses_degree or 1) > heads // tensor:
        yield (
            f"parallel.ulysses_degree={parallel.ulysses_degree} must be at most the heads of a rank: "
            f"use {heads // tensor}, or parallel.ring_degree"
        )


def _exchange_problems(settings: TrainSettings) -> Iterator[str]:
    parallel = settings.parallel
    # With one device, torchrun may have started others. The plan of a run checks them.
    if parallel.world_size > 1:
        yield from parallel.exchange_problems(
            ulysses=parallel.ulysses_degree or 1, tensor=parallel.tensor_parallel_degree or 1
        )
    if parallel.compression is Compression.FP8:
        yield "parallel.compression=fp8 would round gradients by up to 1/16, which is for generation: use bf16 or none"
    if parallel.compression is Compression.BF16 and settings.precision.compute is not Compute.FP32:
        yield ("parallel.compression=bf16 has no effect on 16-bit computation: use none, or precision.compute=fp32")
    if parallel.watch and settings.compile:
        yield "parallel.watch=true does not go with compile=true, which would compile nothing: use one"


def _watching_problems(settings: TrainSettings) -> Iterator[str]:
    watching, validation, data = settings.watching, settings.validation, settings.data
    if watching.nvtx and settings.device == "cpu":
        yield "watching.nvtx=true marks the work of a GPU, and device=cpu: drop it"
    if watching.exact_timers and settings.device == "cpu":
        yield "watching.exact_timers=true synchronizes with a GPU, and device=cpu: drop it, a CPU's timers are exact"
    if watching.profile_steps is not None:
        (first, last), steps = watching.profile_steps, settings.loop.steps
        if not first <= last <= steps:
            yield (
                f"watching.profile_steps={first},{last} must be two steps of the run, the earlier one first: "
                f"use 1,1 to {steps},{steps}"
            )
    if validation.every is None:
        return
    if data.table is not None and validation.table is None:
        yield f"validation.every={validation.every} needs clips that are not trained on: name validation.table"
    if validation.table is not None and data.table is None:
        yield (
            f"validation.table={validation.table} goes with data.table: drop it, "
            "procedural scenes are validated on scenes of their own"
        )
    if validation.table is not None and validation.table == data.table:
        yield f"validation.table={validation.table} must be another table than data.table"


def _memory_problems(settings: TrainSettings) -> Iterator[str]:
    memory, blocks = settings.memory, settings.memory.offload is WeightOffload.BLOCKS
    for named, is_on in (("memory.offload=blocks", blocks), ("memory.fp8_storage=true", memory.fp8_storage)):
        if is_on and not settings.lora.is_on:
            yield (
                f"{named} is for the frozen weights beside an adapter, and without lora.rank all weights are "
                "trained: set it, as in lora.rank=16, or use strategy=zero3 and optimizer.offload_states=true"
            )
        elif is_on and settings.strategy.shards:
            yield f"{named} needs whole blocks, and strategy={settings.strategy} shards them: use ddp"
    if blocks and settings.compile:
        yield "memory.offload=blocks does not go with compile=true: use one of them"
    if memory.host_weights is HostWeights.PINNED and settings.device == "cpu":
        yield "memory.host_weights=pinned has no effect with device=cpu, which reads weights in place: drop it"


def _lora_problems(settings: TrainSettings) -> Iterator[str]:
    lora, trains_transformer = settings.lora, settings.target is TrainTarget.MMDIT
    setting = f"lora.rank={lora.rank}"
    if settings.precision.fp8_linears and not trains_transformer:
        yield "precision.fp8_linears=true is for target=mmdit alone: use false"
    if lora.rank is None:
        return
    if not trains_transformer:
        yield f"{setting} is for target=mmdit alone: use none"
    if settings.init is None:
        yield f"{setting} needs the weights that it is trained beside: --set init=FILE"
    if trains_transformer and lora.rank > settings.model.hidden_size:
        yield f"{setting} must be at most model.hidden_size={settings.model.hidden_size}: a higher rank adds nothing"
    if settings.precision.fp8_linears:
        yield f"{setting} does not go with precision.fp8_linears=true: use false"
    if lora.dropout and settings.strategy is Strategy.HYBRID:
        yield (
            f"lora.dropout={lora.dropout} does not go with strategy=hybrid, whose ranks would drop the same places of "
            "different tokens: use 0"
        )


def _vae_problems(settings: TrainSettings) -> Iterator[str]:
    data, vae, train = settings.data, settings.vae, settings.train_vae
    procedural, side = data.table is None, vae.grid.spatial_compression_ratio
    yield from data.length_problems(vae.grid)
    yield from data.size_problems(side)
    decoder_only = "train_vae.decoder_only=true"
    if train.decoder_only and settings.init is None:
        yield f"{decoder_only} keeps the encoder, which is random: name trained weights, as in init=demo"
    if train.picture_steps:
        steps = f"train_vae.picture_steps={train.picture_steps}"
        if train.decoder_only:
            yield f"{steps} changes the encoder, which {decoder_only} keeps: use 0, and train_vae.single_frame_share"
        if vae.kind is not VAEKind.HUNYUAN:
            yield (
                f"{steps} is for causal autoencoders, and vae.kind={vae.kind} is not causal: use 0, and "
                "train_vae.single_frame_share"
            )
        if not procedural:
            yield f"{steps} is for procedural scenes: with data.table use 0, and buckets of 1 frame instead"
    if train.whitening_clips:
        clips = f"train_vae.whitening_clips={train.whitening_clips}"
        if train.decoder_only:
            yield f"{clips} would change the latents, which {decoder_only} keeps: use 0"
        if not procedural or vae.kind is not VAEKind.HUNYUAN:
            yield f"{clips} is for vae.kind=hunyuan on procedural scenes: use 0"
    if train.crop_size % side:
        yield f"train_vae.crop_size={train.crop_size} must be a multiple of {side}, the side of a latent"


def _transformer_problems(settings: TrainSettings) -> Iterator[str]:
    data, model, grid, train = settings.data, settings.model, settings.vae.grid, settings.train_mmdit
    yield from data.length_problems(grid)
    yield from data.size_problems(grid.spatial_compression_ratio * model.patch_size)
    if train.thing_weight != 1:
        name = f"train_mmdit.thing_weight={train.thing_weight:g}"
        if data.table is not None or not grid.is_causal:
            yield f"{name} is for procedural scenes and a causal autoencoder: use 1"
        if train.masked_loss:
            yield f"{name} does not go with train_mmdit.masked_loss=true: use one of them"
    channels = grid.latent_channels * model.patch_size**2
    if model.in_channels != channels:
        yield (
            f"model.in_channels={model.in_channels} must be the autoencoder's latent channels "
            f"({grid.latent_channels}) x model.patch_size={model.patch_size} squared: use {channels}"
        )
    modes = [CONDITION_MODES[name] for name in train.mode_weights.by_mode()]
    if not model.cond_embed and any(mode.needs_reference for mode in modes):
        yield "train_mmdit.mode_weights must be 0 except for t2v with model.cond_embed=false"
    longest = max(data.lengths())
    most = max(train.lengths.given_latent_frames(mode, causal=grid.is_causal) for mode in modes)
    if most >= grid.latent_frames(grid.longest_clip(longest)):
        yield (
            f"the longest clip has {longest} frame{'' if longest == 1 else 's'}, which leaves nothing to learn in "
            f"a condition mode that gives {most} latent frames: use clips of at least {grid.num_frames(most + 1)}, or "
            "0 for such a mode in train_mmdit.mode_weights"
        )
    yield from attention_problems(
        train.attention,
        setting="train_mmdit.attention",
        ring_degree=settings.parallel.ring_degree,
        is_fp32=settings.precision.compute is Compute.FP32,
    )
    for kind, most in (("double", model.depth), ("single", model.depth_single_blocks)):
        count = getattr(settings.memory, f"checkpoint_{kind}_blocks")
        if count is not None and count > most:
            yield f"memory.checkpoint_{kind}_blocks={count} must be at most the model's: use 0 to {most}"


def _sample_problems(settings: TrainSettings) -> Iterator[str]:
    samples, data, grid = settings.samples, settings.data, settings.vae.grid
    if samples.every is None:
        return
    if not samples.prompts:
        yield f"samples.every={samples.every} needs prompts: give samples.prompts"
    shape = samples.shape(data)
    if shape is None:
        yield (
            f"samples.every={samples.every} needs a size with data.table={data.table}: "
            "give samples.num_frames, samples.height and samples.width"
        )
        return
    frames, *sides = shape
    if (below := grid.longest_clip(frames)) != frames:
        yield f"samples.num_frames={frames} does not suit vae.kind: use {below}"
    multiple = grid.spatial_compression_ratio * settings.model.patch_size
    for name, side in zip(("height", "width"), sides, strict=True):
        if side % multiple:
            above = (side // multiple + 1) * multiple
            yield f"samples.{name}={side} must be a multiple of {multiple}, the side of a token: use {above}"
