"""Tasks of training: with the weights of files for a run, or random to measure or estimate a step."""

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from opensora_cli.core.conditions import ReferencePart
from opensora_cli.core.device_names import type_of_ranks
from opensora_cli.core.progress import Reporter
from opensora_cli.data.batches import SampledBatches, SampleRng
from opensora_cli.data.source import ClipSource
from opensora_cli.engine.components.attention import attention_stand_in
from opensora_cli.engine.components.autoencoders import new_autoencoder, vae_tiling
from opensora_cli.engine.components.configs import mmdit_config
from opensora_cli.engine.components.weights import packaged_demo
from opensora_cli.engine.encode.clip_cache import ClipCache
from opensora_cli.engine.encode.datasets import open_table
from opensora_cli.engine.encode.encoders import EmptyPrompt, Encoders, frozen_dtype
from opensora_cli.engine.encode.fill_cache import prepare_cache, require_same_settings
from opensora_cli.engine.encode.inputs import find_frozen_parts
from opensora_cli.engine.launch.rank import device_type
from opensora_cli.engine.train.activations import BatchShape, largest_batch_shape, plan_activations
from opensora_cli.engine.train.distribution import Distribution
from opensora_cli.engine.train.lora import add_lora
from opensora_cli.engine.train.objectives.base import find_objective
from opensora_cli.engine.train.objectives.flow_matching import MMDiTTask, TokenWeights
from opensora_cli.engine.train.trainer import Task
from opensora_cli.engine.train.transformer import fill_parts, weights_dtype
from opensora_cli.models.mmdit.model import MMDiT
from opensora_cli.models.text.clip import ClipTextModel
from opensora_cli.models.text.sizes import ClipSizes, T5Sizes
from opensora_cli.models.text.t5 import T5Model
from opensora_cli.models.vae.autoencoder import Autoencoder
from opensora_cli.settings.train import TrainSettings


def build_task(
    settings: TrainSettings,
    *,
    distribution: Distribution,
    clips: ClipCache | None = None,
    token_weights: TokenWeights | None = None,
    reporter: Reporter,
) -> Task:
    """Return the task of the objective, ready for training: this rank's part, on its device.

    Weights without a file are random from `loop.seed`, the same on all ranks. `token_weights` is for the transformer.

    Raises:
        RequestError: Sizes contradict each other.
        CheckpointError: Frozen parts (all are named) or the first weights are missing or broken.
        HardwareError: The device has no kernels for the task, or kernels of the chosen attention do not work there.
    """
    # Layers take their first weights from torch's global generator, whose state is the caller's.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.loop.seed)
        task = find_objective(settings).build(
            settings, distribution=distribution, clips=clips, token_weights=token_weights, reporter=reporter
        )
    task.forward = distribution.shard(
        task.module, activations=plan_activations(settings), compiles=settings.compile, warn=reporter.warn
    )
    if distribution.divides:
        fill_parts(task.module, settings, distribution=distribution)
    if task.adversary is not None:
        task.adversary.forward = distribution.shard(task.adversary.module)
    return task


def open_clips_cache(
    settings: TrainSettings, *, distribution: Distribution, reporter: Reporter, source: ClipSource | None = None
) -> ClipCache | None:
    """Return the complete cache of encoded clips for a run, or None. Raises the errors of `prepare_cache`."""
    return prepare_cache(
        settings,
        device=distribution.device,
        rank=distribution.rank,
        ranks=distribution.ranks,
        barrier=distribution.barrier,
        reporter=reporter,
        source=source,
    )


def refuse_before_ranks(settings: TrainSettings) -> None:
    """Raise errors before the ranks start for unreadable tables and for a cache of another run.

    The ranks themselves find differences that only the hashes of the frozen parts show. Raises the errors of
    `open_table` and `require_same_settings`.
    """
    for each in [settings, *([settings.held_out] if settings.validation.every is not None else [])]:
        open_table(each, fixed_starts=False)
    if settings.clip_cache is not None:
        require_same_settings(settings, device=torch.device(type_of_ranks(settings.device)))


def count_parameters(settings: TrainSettings) -> int:
    """Return the number of trained parameters, without allocating them.
    Raises RequestError if sizes contradict each other, and HardwareError if an adapter needs a missing library.
    """
    outline = find_objective(settings).outline(settings)
    return sum(weight.numel() for weight in outline.parameters() if weight.requires_grad)


def fresh_task(settings: TrainSettings) -> tuple[Task, list[nn.Module]]:
    """Return the stand-in of a run's task, whose random weights depend only on the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.loop.seed)
        return find_objective(settings).stand_in(settings)


def transformer_task(settings: TrainSettings) -> tuple[MMDiTTask, list[nn.Module]]:
    """Return the transformer's task and its frozen parts, without the weights of any file."""
    frozen: list[nn.Module] = []
    transformer = MMDiT(mmdit_config(settings.model), attention=attention_stand_in(settings.train_mmdit.attention))
    if settings.lora.is_on:
        add_lora(transformer.to(weights_dtype(settings)), settings.lora, seed=settings.loop.seed)
    # With a cache of clips, training encodes nothing.
    if settings.train_mmdit.cache is None:
        frozen = [new_autoencoder(settings.vae), *_text_encoders(settings)]
    for module in frozen:
        module.requires_grad_(False).eval().to(_frozen_dtype(settings))
    task = MMDiTTask(
        transformer,
        settings=settings.train_mmdit,
        grid=settings.vae.grid,
        empty_prompt=EmptyPrompt(_prompt_embeds(settings), _pooled_prompt_embeds(settings)),
        encoders=lambda: _encoders(settings, cast(Autoencoder, frozen[0])),
    )
    return task, frozen


def _encoders(settings: TrainSettings, vae: Autoencoder) -> Encoders:
    # The values of embeddings do not affect memory, and computing them needs little compared with a step.
    def t5(captions: list[str]) -> Tensor:
        return torch.stack([_prompt_embeds(settings)] * len(captions))

    def clip(captions: list[str]) -> Tensor:
        return torch.stack([_pooled_prompt_embeds(settings)] * len(captions))

    return Encoders(vae, t5=t5, clip=clip, dtype=_frozen_dtype(settings), tiling=vae_tiling(settings.vae))


def _frozen_dtype(settings: TrainSettings) -> torch.dtype:
    return frozen_dtype(settings.train_mmdit, torch.device(device_type(settings.device_name)))


def _prompt_embeds(settings: TrainSettings) -> Tensor:
    return torch.zeros(settings.text.t5_max_length, settings.model.context_in_dim)


def _pooled_prompt_embeds(settings: TrainSettings) -> Tensor:
    return torch.zeros(settings.model.vec_in_dim)


@dataclass(frozen=True, slots=True)
class _CachedBlackClip:
    """Cached tensors of a black clip."""

    settings: TrainSettings
    shape: BatchShape

    def latents(self) -> Tensor:
        return self._latents(self.shape.num_frames)

    def part(self, part: ReferencePart) -> Tensor:
        return self._latents(part.num_frames)

    def prompt_embeds(self) -> Tensor:
        return _prompt_embeds(self.settings)

    def pooled_prompt_embeds(self) -> Tensor:
        return _pooled_prompt_embeds(self.settings)

    def _latents(self, num_frames: int) -> Tensor:
        grid, dtype = self.settings.vae.grid, _frozen_dtype(self.settings)
        size = grid.latent_size(self.shape.height, self.shape.width)
        return torch.zeros(grid.latent_channels, grid.latent_frames(num_frames), *size, dtype=dtype)


def _text_encoders(settings: TrainSettings) -> tuple[nn.Module, nn.Module]:
    """Return T5 and CLIP with the sizes in their folders.

    Without a folder, they have the released sizes if the transformer matches their widths. Otherwise they have the
    sizes of the demo with the transformer's widths.
    """
    files, parts, model = settings.train_mmdit.files, find_frozen_parts(settings), settings.model
    t5, clip = T5Sizes.of(parts[files.t5]), ClipSizes.of(parts[files.clip])
    if parts[files.t5] is None and t5.d_model != model.context_in_dim:
        t5 = replace(T5Sizes.of(packaged_demo() / "t5"), d_model=model.context_in_dim)
    if parts[files.clip] is None and clip.hidden_size != model.vec_in_dim:
        clip = replace(ClipSizes.of(packaged_demo() / "clip"), hidden_size=model.vec_in_dim)
    return T5Model(t5), ClipTextModel(clip)


def largest_batches(settings: TrainSettings) -> SampledBatches:
    """Return the largest micro-batch, repeated."""

    def make(rng: SampleRng, number: int) -> Any:
        shape = largest_batch_shape(settings)
        if settings.clip_cache is not None:
            clips = tuple(_CachedBlackClip(settings, shape) for _ in range(shape.batch_size))
            return replace(shape.zeros(), pixels_BTHWC=None, cached=clips)
        return shape.zeros()

    return SampledBatches(make, seed=0)
