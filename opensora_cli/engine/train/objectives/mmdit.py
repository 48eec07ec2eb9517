"""Objective `mmdit`: flow matching of the transformer, or of an adapter for it, in all condition modes."""

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from opensora_cli.checkpoint.writing import write_weights
from opensora_cli.core.conditions import ConditionMode
from opensora_cli.core.device import is_accelerator, is_gpu, queued_copy
from opensora_cli.core.exceptions import RequestError
from opensora_cli.core.latent_grid import LatentGrid
from opensora_cli.core.progress import Reporter
from opensora_cli.data.batches import ClipBatch, SampleRng
from opensora_cli.engine.components.attention import attention_stand_in
from opensora_cli.engine.components.autoencoders import scale_metadata
from opensora_cli.engine.components.configs import mmdit_config
from opensora_cli.engine.encode.clip_cache import ClipCache
from opensora_cli.engine.encode.clips import EncodedClip, FreshClip, condition_clip, sample_mode, training_caption
from opensora_cli.engine.encode.encoders import EmptyPrompt, Encoders, load_encoders
from opensora_cli.engine.train.activations import BatchShape
from opensora_cli.engine.train.distribution import Distribution
from opensora_cli.engine.train.lora import add_lora, save_lora
from opensora_cli.engine.train.objectives.base import Task, TokenWeights
from opensora_cli.engine.train.objectives.flow_matching import (
    flow_target,
    get_batch_loss,
    noisy_latents,
    shifted_time,
    weighted_loss,
)
from opensora_cli.engine.train.stand_ins import random_frozen_parts, stand_in_encoders, zero_empty_prompt
from opensora_cli.engine.train.transformer import build_transformer, empty_transformer, weights_dtype
from opensora_cli.models.mmdit.model import MMDiT
from opensora_cli.models.vae.autoencoder import Autoencoder
from opensora_cli.sampling.packing import pack_conditioning, pack_latents, position_ids
from opensora_cli.sampling.schedule import flow_shift_for
from opensora_cli.settings.components import VAESettings
from opensora_cli.settings.train import LORA_FOLDER, TRANSFORMER_FILE, TrainSettings
from opensora_cli.settings.train_objectives import MMDiTTrainSettings

_THREADS = 8
"""Number of threads that draw noise for a GPU."""

outline = empty_transformer

Export = Callable[[Mapping[str, Tensor], Path], None]
"""Function that writes weights, given by name, to a folder."""


def build(
    settings: TrainSettings,
    *,
    distribution: Distribution,
    clips: ClipCache | None,
    token_weights: TokenWeights | None,
    reporter: Reporter,
) -> "MMDiTTask":
    """Return the task with its first weights, or with a transformer on the meta device."""
    transformer = build_transformer(settings, distribution=distribution)
    return mmdit_task(settings, transformer, device=distribution.device, clips=clips, token_weights=token_weights)


def mmdit_task(
    settings: TrainSettings,
    module: MMDiT,
    *,
    device: torch.device,
    clips: ClipCache | None = None,
    token_weights: TokenWeights | None = None,
) -> "MMDiTTask":
    """Return the transformer's task with its frozen parts.

    With a cache of encoded clips, the frozen parts are loaded only for clips outside of it, as in validation.
    Raises CheckpointError if frozen parts are missing or broken, and RequestError if a text encoder has another width
    than the transformer reads.
    """
    encoders: Callable[[], Encoders] = cache(partial(load_encoders, settings, device=device))
    empty_prompt = encoders().empty_prompt if clips is None else clips.empty_prompt()
    for key, needed, given, name in (
        ("context_in_dim", settings.model.context_in_dim, empty_prompt.prompt_embeds_LC.shape[-1], "T5"),
        ("vec_in_dim", settings.model.vec_in_dim, empty_prompt.pooled_prompt_embeds_V.shape[-1], "CLIP"),
    ):
        if needed != given:
            raise RequestError(f"model.{key}={needed} must be the width of {name}: use {given}")
    tables = [table for table in (settings.data.table, settings.validation.table) if table is not None]
    return MMDiTTask(
        module,
        settings=settings.train_mmdit,
        grid=settings.vae.grid,
        empty_prompt=empty_prompt,
        encoders=encoders,
        device=device,
        export=_export_of_adapter(settings, module)
        if settings.lora.is_on
        else partial(export_transformer, vae=settings.vae),
        # Absolute because `read_table` makes the paths of clips absolute.
        folders=[Path(table).absolute().parent for table in tables],
        token_weights=token_weights,
    )


def _export_of_adapter(settings: TrainSettings, module: MMDiT) -> Export:
    def export(weights: Mapping[str, Tensor], folder: Path) -> None:
        save_lora(folder / LORA_FOLDER, weights, config=module.config, settings=settings.lora, base=settings.init)

    return export


def export_transformer(weights: Mapping[str, Tensor], folder: Path, *, vae: VAESettings | None = None) -> None:
    """Write `transformer.safetensors` in half precision. With `vae`, its metadata contain the scale of the latents.

    Raises CheckpointError if a weight is too large for half precision, and OutputError if the file cannot be written.
    """
    metadata = None if vae is None else scale_metadata(vae)
    write_weights(folder / TRANSFORMER_FILE, weights, dtype=torch.float16, metadata=metadata)


def stand_in(settings: TrainSettings) -> "tuple[MMDiTTask, list[nn.Module]]":
    """Return the task and its frozen parts, without the weights of any file."""
    transformer = MMDiT(mmdit_config(settings.model), attention=attention_stand_in(settings.train_mmdit.attention))
    if settings.lora.is_on:
        add_lora(
            transformer.to(weights_dtype(settings)),
            settings.lora,
            seed=settings.loop.seed,
            has_critic=settings.objective.has_critic,
        )
    frozen = random_frozen_parts(settings)
    task = MMDiTTask(
        transformer,
        settings=settings.train_mmdit,
        grid=settings.vae.grid,
        empty_prompt=zero_empty_prompt(settings),
        encoders=lambda: stand_in_encoders(settings, cast(Autoencoder, frozen[0])),
    )
    return task, frozen


def layer_values(settings: TrainSettings, shape: BatchShape) -> int:
    """Return the number of values of a micro-batch's tokens, including captions."""
    frames, rows, columns = shape.token_grid(settings)
    tokens = frames * rows * columns + settings.text.t5_max_length
    return shape.batch_size * tokens * settings.model.hidden_size


def evaluations(settings: TrainSettings) -> float:
    """Return 0: a step has its own forward pass alone."""
    return 0.0


def measured_steps(settings: TrainSettings) -> tuple[int, ...]:
    """Return the first two steps, which have the memory of all others."""
    return (0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedClips:
    """Micro-batch on the device: clips of one size, as packed latents."""

    data_BND: Tensor
    noise_BND: Tensor
    normal_B: Tensor
    """Normal samples for the times."""
    modes: Sequence[ConditionMode]
    mask_B1THW: Tensor
    """1 where latents are given."""
    conditioning_BNK: Tensor | None
    prompt_embeds_BLC: Tensor
    pooled_prompt_embeds_BV: Tensor
    guidance_B: Tensor | None
    """Guidance input of a distilled model."""
    grid: tuple[int, int, int]
    """Frames, rows and columns of tokens."""

    def inputs(self) -> dict[str, Tensor | None]:
        """Return the arguments of the transformer beside latents and times."""
        return {
            "position_ids_BN3": position_ids(len(self.data_BND), *self.grid, device=self.data_BND.device),
            "prompt_embeds_BLC": self.prompt_embeds_BLC,
            "pooled_prompt_embeds_BV": self.pooled_prompt_embeds_BV,
            "conditioning_BNK": self.conditioning_BNK,
            "embedded_guidance_B": self.guidance_B,
        }


class MMDiTTask(Task):
    """Training task with the mean squared error of the velocity (rectified flow); each clip has its own condition mode.

    Samples of a clip (mode, dropped captions, timestep, noise) depend on the micro-batch's random state and on the
    clip's path relative to its table. They do not depend on its position in the batch, the other clips, or the
    device.

    Args:
        empty_prompt: replacement for dropped captions.
        encoders: function that loads the encoders; called for the first clip that comes as pixels.
        folders: folders of the tables of clips.
        token_weights: function for the weights of tokens in the loss. None means equal weights.
    """

    module: MMDiT

    def __init__(
        self,
        module: MMDiT,
        *,
        settings: MMDiTTrainSettings,
        grid: LatentGrid,
        empty_prompt: EmptyPrompt,
        encoders: Callable[[], Encoders],
        device: torch.device | str = "cpu",
        export: Export | None = None,
        folders: Sequence[Path] = (),
        token_weights: TokenWeights | None = None,
    ) -> None:
        super().__init__(module)
        self._config = module.config
        self._settings = settings
        self._grid = grid
        self._empty_prompt = empty_prompt
        self._encoders = encoders
        self._device = torch.device(device)
        self._drawing = ThreadPoolExecutor(_THREADS, "noise") if is_accelerator(self._device) else None
        self._export = export or export_transformer
        self._weights = settings.mode_weights.by_mode()
        self._lengths = settings.lengths
        self._token_weights = token_weights
        self._folders = [os.path.join(folder, "") for folder in folders]

    def loss(self, batch: ClipBatch, rng: SampleRng) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the mean loss over the clips of a micro-batch, which have the same size, and no figures."""
        clips, sigma_min = self.prepare(batch, rng), self._settings.sigma_min
        frames, rows, columns = clips.grid
        # The released model's shift counts patches of 2x2, whatever the patch size is.
        tokens_per_frame = rows * columns * self._config.patch_size**2 // 4
        t_B = shifted_time(
            clips.normal_B, shift=flow_shift_for(tokens_per_frame=tokens_per_frame, num_latent_frames=frames)
        )
        noisy_BND = noisy_latents(clips.data_BND, clips.noise_BND, t_B, sigma_min=sigma_min)
        velocity_BND: Tensor = self.forward(noisy_BND, timesteps_B=t_B, **clips.inputs())
        target_BND = flow_target(clips.data_BND, clips.noise_BND, sigma_min=sigma_min)
        if self._token_weights is not None:
            weights_BN = self._token_weights(batch, clips.grid)
            return weighted_loss(velocity_BND, target_BND, queued_copy(weights_BN, self._device)), {}
        masks_BTHW = clips.mask_B1THW[:, 0] if self._settings.masked_loss else None
        return get_batch_loss(velocity_BND, target_BND, masks_BTHW), {}

    @torch.no_grad()
    def prepare(self, batch: ClipBatch, rng: SampleRng) -> PreparedClips:
        """Return a micro-batch on the device, with a condition mode, a caption, noise and a time for each clip."""
        states = _random_states([_inside(path, self._folders) for path in batch.paths], rng)
        patch = self._config.patch_size
        clips = self._encoded(batch)
        # Stack before copying because many small copies to a GPU take longer than one.
        latents_BCTHW = self._placed(torch.stack([clip.latents() for clip in clips]))
        noise_BCTHW = self._noise(latents_BCTHW.shape, states)
        modes = [self._mode(latents_BCTHW.shape[2], rng) for rng in states]
        # Tensors of single clips have no names, so that their memory is freed.
        conditions = zip(*map(self._condition, clips, latents_BCTHW, modes), strict=True)
        mask_B1THW, reference_BCTHW = map(torch.stack, conditions)
        embeds = zip(*map(self._embeds, clips, states), strict=True)
        prompt_embeds_BLC, pooled_prompt_embeds_BV = map(torch.stack, embeds)
        count, _, frames, height, width = latents_BCTHW.shape
        grid = frames, height // patch, width // patch
        conditioning_BNK = guidance_B = None
        if self._config.cond_embed:
            conditioning_BNK = pack_conditioning(mask_B1THW, reference_BCTHW, patch)
        if self._config.guidance_embed:
            guidance_B = torch.full((count,), self._settings.embedded_guidance, device=self._device)
        return PreparedClips(
            data_BND=pack_latents(latents_BCTHW, patch),
            noise_BND=pack_latents(noise_BCTHW, patch),
            normal_B=self._placed(torch.stack([torch.randn((), generator=rng.torch) for rng in states])),
            modes=modes,
            mask_B1THW=mask_B1THW,
            conditioning_BNK=conditioning_BNK,
            prompt_embeds_BLC=prompt_embeds_BLC,
            pooled_prompt_embeds_BV=pooled_prompt_embeds_BV,
            guidance_B=guidance_B,
            grid=grid,
        )

    def empty_prompts(self, count: int) -> tuple[Tensor, Tensor]:
        """Return the embeddings of `count` empty prompts, (B,L,C) and (B,V)."""
        empty = self._empty_prompt
        return (
            self._placed(empty.prompt_embeds_LC).expand(count, -1, -1),
            self._placed(empty.pooled_prompt_embeds_V).expand(count, -1),
        )

    def tokens(self, batch: ClipBatch) -> int:
        if batch.pixels_BTHWC is not None:
            count, num_frames, *size = batch.pixels_BTHWC.shape[:4]
            frames, (height, width) = self._grid.latent_frames(num_frames), self._grid.latent_size(*size)
        else:
            clips = self._encoded(batch)
            count, (frames, height, width) = len(clips), clips[0].latents().shape[1:]
        return int(count * frames * height * width // self._config.patch_size**2)

    def export(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        """Write the transformer, or the adapter if only an adapter is trained."""
        self._export(weights, folder)

    def _encoded(self, batch: ClipBatch) -> Sequence[EncodedClip]:
        if batch.pixels_BTHWC is None:
            return batch.cached or ()
        described = zip(batch.pixels_BTHWC, batch.captions, batch.fps, batch.motion_scores, strict=True)
        return [
            FreshClip(
                self._encoders(),
                pixels_THWC,
                training_caption(caption, fps=fps, motion_score=score, settings=self._settings),
            )
            for pixels_THWC, caption, fps, score in described
        ]

    def _noise(self, shape: Sequence[int], states: Sequence[SampleRng]) -> Tensor:
        """Draw the noise of each clip on the host, so that it is the same for every device."""
        noise_BCTHW = torch.empty(shape, pin_memory=is_gpu(self._device))
        # A small model on a GPU would wait longer for noise than it computes. With a model on the CPU, no core is free.
        each = self._drawing.map if self._drawing else map
        list(each(lambda noise_CTHW, rng: noise_CTHW.normal_(generator=rng.torch), noise_BCTHW, states))
        return noise_BCTHW.to(self._device, non_blocking=True)

    def _mode(self, num_latent_frames: int, rng: SampleRng) -> ConditionMode:
        return sample_mode(
            self._weights,
            num_latent_frames=num_latent_frames,
            causal=self._grid.is_causal,
            rng=rng.numpy,
            lengths=self._lengths,
        )

    def _condition(self, clip: EncodedClip, latents_CTHW: Tensor, mode: ConditionMode) -> tuple[Tensor, Tensor]:
        return condition_clip(
            latents_CTHW,
            mode,
            lambda part: self._placed(clip.part(part)),
            causal=self._grid.is_causal,
            temporal_compression=self._grid.time_compression_ratio,
            lengths=self._lengths,
        )

    def _embeds(self, clip: EncodedClip, rng: SampleRng) -> tuple[Tensor, Tensor]:
        drop_t5 = rng.numpy.random() < self._settings.t5_dropout
        drop_clip = rng.numpy.random() < self._settings.clip_dropout
        empty = self._empty_prompt
        return (
            self._placed(empty.prompt_embeds_LC if drop_t5 else clip.prompt_embeds()),
            self._placed(empty.pooled_prompt_embeds_V if drop_clip else clip.pooled_prompt_embeds()),
        )

    def _placed(self, tensor: Tensor) -> Tensor:
        # Copy before the cast, which doubles the bytes.
        return queued_copy(tensor, self._device).float()


def _inside(path: str, folders: Iterable[str]) -> str:
    """Return the path relative to the first folder that contains it, so that moved data trains the same model."""
    return next((path.removeprefix(folder) for folder in folders if path.startswith(folder)), path)


def _random_states(paths: Sequence[str], rng: SampleRng) -> list[SampleRng]:
    """Return a random state for each sample, from its path and its number of earlier occurrences in the micro-batch."""
    seed = int(rng.numpy.integers(2**63))
    seen: Counter[str] = Counter()
    states = []
    for path in paths:
        digest = hashlib.sha256(path.encode("utf-8", "surrogatepass")).digest()
        own = np.random.default_rng((seed, int.from_bytes(digest[:8]), seen[path]))
        states.append(SampleRng(own, torch.Generator().manual_seed(int(own.integers(2**63)))))
        seen[path] += 1
    return states
