"""What is trained, and its largest micro-batches, without any file: to find out what a step takes."""

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from opensora_cli.core.conditions import ReferencePart
from opensora_cli.core.progress import SilentReporter
from opensora_cli.engine.components.attention import attention_stand_in
from opensora_cli.engine.components.autoencoders import new_autoencoder, vae_tiling
from opensora_cli.engine.components.configs import mmdit_config
from opensora_cli.engine.encode.encoders import EmptyPrompt, Encoders, frozen_dtype
from opensora_cli.engine.encode.inputs import find_frozen_parts
from opensora_cli.engine.launch.rank import device_type
from opensora_cli.engine.train.activations import BatchShape, largest_batch_shape
from opensora_cli.engine.train.lora import add_lora
from opensora_cli.engine.train.objectives.mmdit import MMDiTTask
from opensora_cli.engine.train.objectives.task import SampledBatches, SampleRng, Task
from opensora_cli.engine.train.objectives.text import TextTask, sample_captions
from opensora_cli.engine.train.objectives.vae import build_vae_task
from opensora_cli.engine.train.transformer import weights_dtype
from opensora_cli.models.mmdit.model import MMDiT
from opensora_cli.models.text.clip import ClipTextModel
from opensora_cli.models.text.sizes import ClipSizes, T5Sizes
from opensora_cli.models.text.t5 import T5Model
from opensora_cli.models.vae.autoencoder import Autoencoder
from opensora_cli.settings.train import TrainSettings, TrainTarget


def fresh_task(settings: TrainSettings) -> tuple[Task[Any], list[nn.Module]]:
    """Return `bare_task` with random weights, which depend on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.loop.seed)
        return bare_task(settings)


def bare_task(settings: TrainSettings) -> tuple[Task[Any], list[nn.Module]]:
    """Return the task and its frozen parts, without the weights of any file."""
    match settings.target:
        case TrainTarget.VAE:
            without_files = settings.replace({"train_vae.perceptual_files": (), "train_vae.perceptual_weight": 0.0})
            return build_vae_task(without_files, device=torch.device("cpu"), reporter=SilentReporter()), []
        case TrainTarget.TEXT:
            return TextTask(settings.text), []
        case TrainTarget.MMDIT:
            return _mmdit_task(settings)


def _mmdit_task(settings: TrainSettings) -> tuple[MMDiTTask, list[nn.Module]]:
    frozen: list[nn.Module] = []
    transformer = MMDiT(mmdit_config(settings.model), attention=attention_stand_in(settings.train_mmdit.attention))
    if settings.lora.is_on:
        add_lora(transformer.to(weights_dtype(settings)), settings.lora, seed=settings.loop.seed)
    # With a cache of clips nothing is encoded while training.
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
    # The values of embeddings do not matter for memory, and computing them needs little beside a step.
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
    """What a cache has of a black clip."""

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
    """Return T5 and CLIP of the sizes in their folders.

    Without a folder they are those of `text`, if the transformer has its widths, else the released ones.
    """
    files, parts, text = settings.train_mmdit.files, find_frozen_parts(settings), settings.text
    small = TextTask(text).module
    t5, clip = parts[files.t5], parts[files.clip]
    has_small_t5 = t5 is None and text.t5_width == settings.model.context_in_dim
    has_small_clip = clip is None and text.clip_width == settings.model.vec_in_dim
    return (
        small.get_submodule("t5") if has_small_t5 else T5Model(T5Sizes.of(t5)),
        small.get_submodule("clip") if has_small_clip else ClipTextModel(ClipSizes.of(clip)),
    )


def largest_batches(settings: TrainSettings) -> SampledBatches[Any]:
    """Return the largest micro-batch, repeated; after two of single frames, if the run has such a phase."""
    pictures = 2 if settings.target is TrainTarget.VAE and settings.train_vae.picture_steps else 0

    def make(rng: SampleRng, number: int) -> Any:
        if settings.target is TrainTarget.TEXT:
            return sample_captions(rng, number, batch_size=settings.text.batch_size)
        shape = largest_batch_shape(settings)
        if number < pictures:
            shape = replace(shape, batch_size=settings.train_vae.picture_batch_size, num_frames=1)
        if settings.target is TrainTarget.MMDIT and settings.train_mmdit.cache is not None:
            clips = tuple(_CachedBlackClip(settings, shape) for _ in range(shape.batch_size))
            return replace(shape.zeros(), pixels_BTHWC=None, cached=clips)
        return shape.zeros()

    return SampledBatches(make, seed=0)
