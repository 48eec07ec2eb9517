"""Objective `mmdit`: flow matching of the transformer, or of an adapter for it, in all condition modes.

Flow matching is rectified flow (Liu et al. 2022) with logistic-normal time (Esser et al. 2024). x0 is data and x1
noise, as packed latents (B,N,D); time runs from 1 (noise) to 0 (data).
"""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Self, cast

import torch
from torch import Tensor, nn

from opensora_cli.checkpoint.writing import write_weights
from opensora_cli.core.conditions import ConditionMode
from opensora_cli.core.device import is_accelerator, is_gpu, queued_copy
from opensora_cli.core.exceptions import RequestError
from opensora_cli.core.progress import Reporter
from opensora_cli.data.batches import ClipBatch, SampleRng
from opensora_cli.engine.components.architectures import mmdit_config, scale_metadata
from opensora_cli.engine.components.attention import attention_stand_in
from opensora_cli.engine.encode.clip_cache import ClipCache
from opensora_cli.engine.encode.clips import (
    LATENTS,
    POOLED_PROMPT_EMBEDS,
    PROMPT_EMBEDS,
    EmptyPrompt,
    EncodedClip,
    Encoders,
    FreshClip,
    load_encoders,
    part_name,
)
from opensora_cli.engine.train.build import build_transformer, empty_transformer, with_adapter
from opensora_cli.engine.train.distribution import Distribution
from opensora_cli.engine.train.lora import save_lora
from opensora_cli.engine.train.memory import BatchShape
from opensora_cli.engine.train.objectives import Objective, TokenWeights
from opensora_cli.engine.train.stand_ins import random_frozen_parts, stand_in_encoders, zero_empty_prompt
from opensora_cli.engine.train.trainer import Role
from opensora_cli.models.mmdit.model import MMDiT
from opensora_cli.models.vae.autoencoder import Autoencoder
from opensora_cli.sampling.conditioning import condition_clip, fitting_modes, pick_mode
from opensora_cli.sampling.packing import pack_conditioning, pack_latents, position_ids
from opensora_cli.sampling.schedule import flow_shift_for, shifted_times
from opensora_cli.settings.train import LORA_FOLDER, TRANSFORMER_FILE, TrainSettings

_THREADS = 8
"""Number of threads that draw noise for a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedClips:
    """Micro-batch on the device: clips of one size, as packed latents."""

    data_BND: Tensor
    noise_BND: Tensor
    normal_B: Tensor
    """Normal samples for the times."""
    modes: Sequence[ConditionMode]
    mask_B1THW: Tensor | None
    """1 where latents are given. None means that the model takes no condition."""
    inputs: Mapping[str, Tensor | None]
    """Arguments of the transformer beside latents and times."""
    grid: tuple[int, int, int]
    """Frames, rows and columns of tokens."""


class MMDiTTask(Objective):
    """Training task with the mean squared error of the velocity; each clip has its own condition mode.

    Samples of a clip (mode, dropped captions, timestep, noise) depend on the micro-batch's random state and on the
    clip's path relative to its table. They do not depend on its position in the batch, the other clips, or the
    device. `encoders` loads the encoders, for the first clip that comes as pixels.
    """

    module: MMDiT

    def __init__(
        self,
        module: MMDiT,
        run: TrainSettings,
        *,
        empty_prompt: EmptyPrompt,
        encoders: Callable[[], Encoders],
        device: torch.device | str = "cpu",
        token_weights: TokenWeights | None = None,
    ) -> None:
        super().__init__(module, roles=self.roles_of(module, run))
        self._config, self._run, self._settings, self._grid = module.config, run, run.train_mmdit, run.vae.grid
        self._empty_prompt, self._encoders, self._token_weights = empty_prompt, encoders, token_weights
        self._device = torch.device(device)
        self._drawing = ThreadPoolExecutor(_THREADS, "noise") if is_accelerator(self._device) else None
        self._lengths = self._settings.lengths
        weights, causal = self._settings.mode_weights.by_mode(), self._grid.is_causal
        self._fitting_modes = cache(partial(fitting_modes, weights, causal=causal, lengths=self._lengths))
        tables = [table for table in (run.data.table, run.validation.table) if table is not None]
        # Absolute because `read_table` makes the paths of clips absolute.
        self._folders = [os.path.join(Path(table).absolute().parent, "") for table in tables]

    @classmethod
    def build(
        cls,
        settings: TrainSettings,
        *,
        distribution: Distribution,
        clips: ClipCache | None,
        token_weights: TokenWeights | None,
        reporter: Reporter,
    ) -> Self:
        # With a cache of clips, the frozen parts are loaded only for clips outside of it, as in validation.
        encoders: Callable[[], Encoders] = cache(partial(load_encoders, settings, device=distribution.device))
        empty_prompt = encoders().empty_prompt if clips is None else clips.empty_prompt()
        for key, needed, given, name in (
            ("context_in_dim", settings.model.context_in_dim, empty_prompt.prompt_embeds_LC.shape[-1], "T5"),
            ("vec_in_dim", settings.model.vec_in_dim, empty_prompt.pooled_prompt_embeds_V.shape[-1], "CLIP"),
        ):
            if needed != given:
                raise RequestError(f"model.{key}={needed} must be the width of {name}: use {given}")
        return cls(
            build_transformer(settings, distribution=distribution),
            settings,
            empty_prompt=empty_prompt,
            encoders=encoders,
            device=distribution.device,
            token_weights=token_weights,
        )

    @classmethod
    def stand_in(cls, settings: TrainSettings) -> tuple[Self, list[nn.Module]]:
        transformer = MMDiT(mmdit_config(settings.model), attention=attention_stand_in(settings.train_mmdit.attention))
        frozen = random_frozen_parts(settings)
        task = cls(
            with_adapter(transformer, settings),
            settings,
            empty_prompt=zero_empty_prompt(settings),
            encoders=lambda: stand_in_encoders(settings, cast(Autoencoder, frozen[0])),
        )
        return task, frozen

    @classmethod
    def outline(cls, settings: TrainSettings) -> MMDiT:
        return empty_transformer(settings)

    @classmethod
    def layer_values(cls, settings: TrainSettings, shape: BatchShape) -> int:
        frames, rows, columns = shape.token_grid(settings)
        tokens = frames * rows * columns + settings.text.t5_max_length
        return shape.batch_size * tokens * settings.model.hidden_size

    @classmethod
    def roles_of(cls, module: MMDiT, run: TrainSettings) -> dict[str, Role]:
        return {}

    def loss(self, batch: ClipBatch, rng: SampleRng) -> tuple[Tensor, dict[str, Tensor]]:
        clips, sigma_min = self.prepare(batch, rng), self._settings.sigma_min
        frames, rows, columns = clips.grid
        # The released model's shift counts patches of 2x2, whatever the patch size is.
        tokens_per_frame = rows * columns * self._config.patch_size**2 // 4
        shift = flow_shift_for(tokens_per_frame=tokens_per_frame, num_latent_frames=frames)
        t_B = shifted_times(torch.sigmoid(clips.normal_B), shift)
        noisy_BND = noisy_latents(clips.data_BND, clips.noise_BND, t_B, sigma_min=sigma_min)
        velocity_BND: Tensor = self.forward(noisy_BND, timesteps_B=t_B, **clips.inputs)
        target_BND = flow_target(clips.data_BND, clips.noise_BND, sigma_min=sigma_min)
        if self._token_weights is not None:
            error_BN = (velocity_BND.float() - target_BND.float()).square().mean(dim=2)
            weights_BN = queued_copy(self._token_weights(batch, clips.grid), self._device).to(error_BN)
            return (error_BN * weights_BN).sum() / weights_BN.sum(), {}
        mask_B1THW = clips.mask_B1THW if self._settings.masked_loss else None
        return get_batch_loss(velocity_BND, target_BND, None if mask_B1THW is None else mask_B1THW[:, 0]), {}

    @torch.no_grad()
    def prepare(self, batch: ClipBatch, rng: SampleRng) -> PreparedClips:
        """Return a micro-batch on the device, with a condition mode, a caption, noise and a time for each clip."""
        states = rng.of_each([self._name(path) for path in batch.paths])
        patch = self._config.patch_size
        clips = self._encoded(batch)
        # Stack before copying because many small copies to a GPU take longer than one.
        latents_BCTHW = self._placed(torch.stack([clip[LATENTS] for clip in clips]))
        noise_BCTHW = self._noise(latents_BCTHW.shape, states)
        count, _, frames, height, width = latents_BCTHW.shape
        modes = [pick_mode(self._fitting_modes(num_latent_frames=frames), rng.numpy) for rng in states]
        mask_B1THW = conditioning_BNK = guidance_B = None
        if self._config.cond_embed:
            # Tensors of single clips have no names, so that their memory is freed.
            conditions = zip(*map(self._condition, clips, latents_BCTHW, modes), strict=True)
            mask_B1THW, reference_BCTHW = map(torch.stack, conditions)
            conditioning_BNK = pack_conditioning(mask_B1THW, reference_BCTHW, patch)
        if self._config.guidance_embed:
            guidance_B = torch.full((count,), self._settings.embedded_guidance, device=self._device)
        prompt_embeds_BLC, pooled_prompt_embeds_BV = map(
            torch.stack, zip(*map(self._embeds, clips, states), strict=True)
        )
        grid = frames, height // patch, width // patch
        return PreparedClips(
            data_BND=pack_latents(latents_BCTHW, patch),
            noise_BND=pack_latents(noise_BCTHW, patch),
            normal_B=self._placed(torch.stack([torch.randn((), generator=rng.torch) for rng in states])),
            modes=modes,
            mask_B1THW=mask_B1THW,
            inputs={
                "position_ids_BN3": position_ids(count, *grid, device=self._device),
                "prompt_embeds_BLC": prompt_embeds_BLC,
                "pooled_prompt_embeds_BV": pooled_prompt_embeds_BV,
                "conditioning_BNK": conditioning_BNK,
                "embedded_guidance_B": guidance_B,
            },
            grid=grid,
        )

    def tokens(self, batch: ClipBatch) -> int:
        one, patch = batch.requests[0], self._config.patch_size
        height, width = self._grid.latent_size(one.height, one.width)
        return len(batch.requests) * self._grid.latent_frames(one.num_frames) * height * width // patch**2

    def export(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        """Write the adapter, or the transformer in half precision with the scale of its latents in the metadata.

        Raises CheckpointError if a weight is too large for half precision.
        """
        run = self._run
        if run.lora.is_on:
            lora, metadata = folder / LORA_FOLDER, self.adapter_metadata()
            save_lora(lora, weights, config=self._config, settings=run.lora, base=run.init, metadata=metadata)
        else:
            metadata = scale_metadata(run.vae)
            write_weights(folder / TRANSFORMER_FILE, weights, dtype=torch.float16, metadata=metadata)

    def adapter_metadata(self) -> dict[str, str]:
        return {}

    def _name(self, path: str) -> str:
        """Return the path relative to the table of clips, so that moved data trains the same model."""
        return next((path.removeprefix(folder) for folder in self._folders if path.startswith(folder)), path)

    def _encoded(self, batch: ClipBatch) -> Sequence[EncodedClip]:
        if batch.pixels_BTHWC is None:
            return batch.cached or ()
        return [
            FreshClip(self._encoders(), pixels_THWC, request, self._settings)
            for pixels_THWC, request in zip(batch.pixels_BTHWC, batch.requests, strict=True)
        ]

    def _noise(self, shape: Sequence[int], states: Sequence[SampleRng]) -> Tensor:
        """Draw the noise of each clip on the host, so that it is the same for every device."""
        noise_BCTHW = torch.empty(shape, pin_memory=is_gpu(self._device))
        # A small model on a GPU would wait longer for noise than it computes. With a model on the CPU, no core is free.
        each = self._drawing.map if self._drawing else map
        list(each(lambda noise_CTHW, rng: noise_CTHW.normal_(generator=rng.torch), noise_BCTHW, states))
        return noise_BCTHW.to(self._device, non_blocking=True)

    def _condition(self, clip: EncodedClip, latents_CTHW: Tensor, mode: ConditionMode) -> tuple[Tensor, Tensor]:
        return condition_clip(
            latents_CTHW,
            mode,
            lambda part: self._placed(clip[part_name(part)]),
            causal=self._grid.is_causal,
            temporal_compression=self._grid.time_compression_ratio,
            lengths=self._lengths,
        )

    def _embeds(self, clip: EncodedClip, rng: SampleRng) -> tuple[Tensor, Tensor]:
        drop_t5 = rng.numpy.random() < self._settings.t5_dropout
        drop_clip = rng.numpy.random() < self._settings.clip_dropout
        empty = self._empty_prompt
        return (
            self._placed(empty.prompt_embeds_LC if drop_t5 else clip[PROMPT_EMBEDS]),
            self._placed(empty.pooled_prompt_embeds_V if drop_clip else clip[POOLED_PROMPT_EMBEDS]),
        )

    def _placed(self, tensor: Tensor) -> Tensor:
        # Copy before the cast, which doubles the bytes.
        return queued_copy(tensor, self._device).float()


OBJECTIVE = MMDiTTask


def noisy_latents(data_BND: Tensor, noise_BND: Tensor, t_B: Tensor, *, sigma_min: float = 1e-5) -> Tensor:
    """Return x_t = (1-t)·x0 + (1-(1-s)(1-t))·x1 with s = `sigma_min`, the remaining noise at t = 0."""
    t_B11 = t_B.view(-1, *[1] * (data_BND.ndim - 1))
    return (1.0 - t_B11) * data_BND + (1.0 - (1.0 - sigma_min) * (1.0 - t_B11)) * noise_BND


def flow_target(data_BND: Tensor, noise_BND: Tensor, *, sigma_min: float = 1e-5) -> Tensor:
    """Return the target velocity, the derivative of x_t by t: (1-s)·x1 - x0."""
    return (1.0 - sigma_min) * noise_BND - data_BND


def get_batch_loss(velocity_BND: Tensor, target_BND: Tensor, masks_BTHW: Tensor | None = None) -> Tensor:
    """Return the mean squared error over samples, tokens and channels of packed latents, in fp32.

    `masks_BTHW` is 1 where latents are given. A given first or last frame does not count, unless frames between them
    are also given. Every sample has the same weight for any number of remaining frames. A sample without remaining
    frames counts as zero.
    Raises ValueError for other shapes. Use `masks[:, 0]` of `prepare_inference_condition`.
    """
    if masks_BTHW is None:
        return nn.functional.mse_loss(velocity_BND.float(), target_BND.float())
    if masks_BTHW.ndim != 4:
        raise ValueError(f"masks of shape {tuple(masks_BTHW.shape)} are not (batch, frames, height, width)")
    batch, frames = masks_BTHW.shape[:2]
    if velocity_BND.shape[0] != batch or velocity_BND.shape[1] % frames:
        raise ValueError(f"{tuple(velocity_BND.shape)} tokens are not {batch} samples of {frames} frames")
    squares_BND = (velocity_BND.float() - target_BND.float()).square()
    error_BT = squares_BND.reshape(batch, frames, -1).mean(dim=2)
    kept_BT = _learned_frames(masks_BTHW).to(error_BT)
    return ((error_BT * kept_BT).sum(dim=1) / kept_BT.sum(dim=1).clamp(min=1.0)).mean()


def _learned_frames(masks_BTHW: Tensor) -> Tensor:
    """Return (B,T), False for given first and last frames of samples without given frames between them."""
    given_BT = masks_BTHW.flatten(2).amax(dim=2) > 0
    only_ends_B1 = ~given_BT[:, 1:-1].any(dim=1, keepdim=True)
    learned_BT = torch.ones_like(given_BT)
    learned_BT[:, :1] = ~(given_BT[:, :1] & only_ends_B1)
    learned_BT[:, -1:] &= ~(given_BT[:, -1:] & only_ends_B1)
    return learned_BT
