"""Stand-ins for files and clips, to measure or estimate a training step: random frozen parts, and black clips."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from opensora_cli.data.batches import SampledBatches, SampleRng
from opensora_cli.engine.components.architectures import new_autoencoder, vae_tiling
from opensora_cli.engine.components.weights import packaged_demo
from opensora_cli.engine.encode.clips import LATENTS, POOLED_PROMPT_EMBEDS, PROMPT_EMBEDS, part_frames
from opensora_cli.engine.encode.encoders import EmptyPrompt, Encoders, frozen_dtype
from opensora_cli.engine.encode.inputs import find_frozen_parts
from opensora_cli.engine.launch.rank import device_type
from opensora_cli.engine.train.memory import BatchShape, largest_batch_shape
from opensora_cli.models.text.clip import ClipTextModel
from opensora_cli.models.text.sizes import ClipSizes, T5Sizes
from opensora_cli.models.text.t5 import T5Model
from opensora_cli.models.vae.autoencoder import Autoencoder
from opensora_cli.settings.train import TrainSettings


def random_frozen_parts(settings: TrainSettings) -> list[nn.Module]:
    """Return autoencoder, T5 and CLIP; empty with a cache of clips, with which training encodes nothing."""
    if settings.train_mmdit.cache is not None:
        return []
    frozen = [new_autoencoder(settings.vae), *random_text_encoders(settings)]
    for module in frozen:
        module.requires_grad_(False).eval().to(_frozen_dtype(settings))
    return frozen


def random_text_encoders(settings: TrainSettings) -> tuple[nn.Module, nn.Module]:
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


def zero_empty_prompt(settings: TrainSettings) -> EmptyPrompt:
    """Return zeros as the embeddings of the empty prompt."""
    embeds = torch.zeros(settings.text.t5_max_length, settings.model.context_in_dim)
    return EmptyPrompt(embeds, torch.zeros(settings.model.vec_in_dim))


def stand_in_encoders(settings: TrainSettings, vae: Autoencoder) -> Encoders:
    """Return encoders of clips by an autoencoder, and of captions as zeros.

    The values of embeddings do not affect memory, and computing them needs little compared with a step.
    """
    return Encoders(
        vae,
        t5=lambda captions: torch.stack([zero_empty_prompt(settings).prompt_embeds_LC] * len(captions)),
        clip=lambda captions: torch.stack([zero_empty_prompt(settings).pooled_prompt_embeds_V] * len(captions)),
        dtype=_frozen_dtype(settings),
        tiling=vae_tiling(settings.vae),
    )


def largest_batches(settings: TrainSettings) -> SampledBatches:
    """Return the largest micro-batch, repeated."""

    def make(rng: SampleRng, number: int) -> Any:
        shape = largest_batch_shape(settings)
        if settings.clip_cache is not None:
            clips = tuple(_CachedBlackClip(settings, shape) for _ in range(shape.batch_size))
            return replace(shape.zeros(), pixels_BTHWC=None, cached=clips)
        return shape.zeros()

    return SampledBatches(make, seed=0)


@dataclass(frozen=True, slots=True)
class _CachedBlackClip:
    """Cached tensors of a black clip."""

    settings: TrainSettings
    shape: BatchShape

    def __getitem__(self, name: str) -> Tensor:
        if name in (PROMPT_EMBEDS, POOLED_PROMPT_EMBEDS):
            empty = zero_empty_prompt(self.settings)
            return empty.prompt_embeds_LC if name == PROMPT_EMBEDS else empty.pooled_prompt_embeds_V
        grid, dtype = self.settings.vae.grid, _frozen_dtype(self.settings)
        size = grid.latent_size(self.shape.height, self.shape.width)
        num_frames = self.shape.num_frames if name == LATENTS else part_frames(name)
        return torch.zeros(grid.latent_channels, grid.latent_frames(num_frames), *size, dtype=dtype)


def _frozen_dtype(settings: TrainSettings) -> torch.dtype:
    return frozen_dtype(settings.train_mmdit, torch.device(device_type(settings.device_name)))
