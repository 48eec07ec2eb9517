"""Training the video transformer on encoded clips of the procedural world, in all condition modes."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from opensora_cli.core.progress import Reporter
from opensora_cli.data.scenes import caption_scene, render_scene, sample_scene
from opensora_cli.engine.sampling.conditioning import (
    ConditionMode,
    ReferenceLengths,
    condition_mode,
    prepare_inference_condition,
    reference_parts,
)
from opensora_cli.engine.sampling.packing import pack_conditioning, pack_latents, position_ids
from opensora_cli.engine.sampling.schedule import flow_shift_for
from opensora_cli.engine.train.files import TRANSFORMER_FILE, write_weights
from opensora_cli.engine.train.flow import flow_target, get_batch_loss, noisy_latents, shifted_time
from opensora_cli.engine.train.loop import Chance
from opensora_cli.engine.train.vae import to_pixels
from opensora_cli.models.mmdit import MMDiT, MMDiTConfig
from opensora_cli.models.vae.hunyuan import HunyuanVAE
from opensora_cli.settings.train import MMDiTTrainSettings, SceneSettings

TextEncoder = Callable[[list[str]], tuple[Tensor, Tensor]]
"""Captions to (prompt embeddings (B,L,C), pooled prompt embeddings (B,V))."""


@dataclass(frozen=True, slots=True)
class EncodedClip:
    """What the transformer learns from one clip: latents, and the references of one condition mode."""

    latents_CTHW: Tensor
    mask_1THW: Tensor
    reference_CTHW: Tensor
    caption: str


class ClipSource:
    """Renders, describes and encodes fresh clips.

    References are encoded on their own, as they are when generating: the autoencoder's group norm spans the clip, so
    they differ from the same frames of the clip's latents.

    Args:
        vae: the frozen autoencoder.
        data: the clips.
        settings: how often each condition mode comes, and how much it gives.
    """

    def __init__(self, vae: HunyuanVAE, *, data: SceneSettings, settings: MMDiTTrainSettings) -> None:
        self._vae = vae
        self._data = data
        self._lengths = ReferenceLengths(video=settings.video_latent_frames, easy=settings.easy_latent_frames)
        by_mode = settings.mode_weights.by_mode()
        self._modes = [condition_mode(name) for name in by_mode]
        weights = np.array(list(by_mode.values()))
        self._shares = weights / weights.sum()

    @torch.no_grad()
    def fresh(self, rng: np.random.Generator) -> EncodedClip:
        """Return one new clip in a condition mode drawn by weight."""
        scene = sample_scene(rng)
        frames = render_scene(scene, size=self._data.size, num_frames=self._data.num_frames, fps=self._data.fps)
        pixels = to_pixels(frames[None])
        latents = self._vae.encode(pixels).float()
        mode = self._modes[int(rng.choice(len(self._modes), p=self._shares))]
        references = self._references(pixels, mode)
        mask, reference = prepare_inference_condition(latents, mode, [references], lengths=self._lengths)
        # Thousands are kept: in half precision.
        return EncodedClip(latents[0].half(), mask[0].half(), reference[0].half(), caption_scene(scene, rng))

    def _references(self, pixels_BCTHW: Tensor, mode: ConditionMode) -> list[Tensor]:
        ratio = self._vae.config.time_compression_ratio
        parts = reference_parts(mode, lengths=self._lengths, temporal_compression=ratio)
        cuts = [
            pixels_BCTHW[:, :, -part.num_frames :] if part.from_end else pixels_BCTHW[:, :, : part.num_frames]
            for part in parts
        ]
        return [self._vae.encode(cut)[0].float() for cut in cuts]


class MMDiTTask:
    """Mean squared error of the velocity, on a ring of encoded clips into which every step puts a few new ones.

    The ring is not in the checkpoint. A resumed run fills it with other clips than those that an uninterrupted one
    would hold at that step, and so does not repeat it bit for bit, as the other targets do.

    Args:
        config: sizes of the transformer.
        clips: where encoded clips come from.
        text: the frozen text encoders.
        settings: the objective.
        batch_size: clips of a step.
        reporter: hears of the filling of the ring.
    """

    def __init__(
        self,
        config: MMDiTConfig,
        *,
        clips: ClipSource,
        text: TextEncoder,
        settings: MMDiTTrainSettings,
        batch_size: int,
        reporter: Reporter,
    ) -> None:
        self.module = MMDiT(config, attention=_attention)
        self._config = config
        self._clips = clips
        self._text = text
        self._settings = settings
        self._batch_size = batch_size
        self._reporter = reporter
        self._ring: list[EncodedClip] = []
        self._oldest = 0

    def begin_step(self, step: int, ema: MMDiT) -> None:
        """Do nothing: there is one phase."""

    def loss(self, step: int, chance: Chance) -> tuple[Tensor, dict[str, float]]:
        """Return the loss of a batch out of the ring, and how many clips the ring holds."""
        self._refill(chance.rng)
        batch = [self._ring[i] for i in chance.rng.integers(len(self._ring), size=self._batch_size)]
        latents = _stacked([clip.latents_CTHW for clip in batch])
        dropout = self._settings.text_dropout
        prompt_embeds, pooled = self._text(["" if chance.rng.random() < dropout else clip.caption for clip in batch])

        patch = self._config.patch_size
        frames, height, width = latents.shape[2:]
        data = pack_latents(latents, patch)
        noise = torch.randn(data.shape, generator=chance.generator)
        # The released model's shift counts patches of 2x2, whatever the patch size is.
        shift = flow_shift_for(tokens_per_frame=height * width // 4, num_latent_frames=frames)
        t = shifted_time(torch.randn(len(batch), generator=chance.generator), shift=shift)
        velocity = self.module(
            noisy_latents(data, noise, t, sigma_min=self._settings.sigma_min),
            position_ids_BN3=position_ids(len(batch), frames, height // patch, width // patch),
            timesteps_B=t,
            prompt_embeds_BLC=prompt_embeds,
            pooled_prompt_embeds_BV=pooled,
            conditioning_BNK=self._conditioning(batch),
        )
        target = flow_target(data, noise, sigma_min=self._settings.sigma_min)
        return get_batch_loss(velocity, target), {"clips": float(len(self._ring))}

    def export(self, ema: MMDiT, folder: Path) -> None:
        """Write `transformer.safetensors` in half precision, which halves the file and changes no picture."""
        write_weights(folder / TRANSFORMER_FILE, {name: value.half() for name, value in ema.state_dict().items()})

    def _conditioning(self, batch: list[EncodedClip]) -> Tensor | None:
        if not self._config.cond_embed:
            return None
        mask = _stacked([clip.mask_1THW for clip in batch])
        reference = _stacked([clip.reference_CTHW for clip in batch])
        return pack_conditioning(mask, reference, self._config.patch_size)

    def _refill(self, rng: np.random.Generator) -> None:
        first = self._settings.first_clips
        if len(self._ring) < first:
            with self._reporter.stage("encode", total=first, unit="clips") as progress:
                while len(self._ring) < first:
                    self._ring.append(self._clips.fresh(rng))
                    progress.advance()
        for _ in range(self._settings.fresh_clips_per_step):
            clip = self._clips.fresh(rng)
            if len(self._ring) < self._settings.cached_clips:
                self._ring.append(clip)
            else:
                self._ring[self._oldest] = clip
                self._oldest = (self._oldest + 1) % len(self._ring)


def _stacked(tensors: list[Tensor]) -> Tensor:
    # One by one: autocast on a CPU refuses to stack what is in float16.
    return torch.stack([tensor.float() for tensor in tensors])


def _attention(q_BHND: Tensor, k_BHMD: Tensor, v_BHMD: Tensor, /) -> Tensor:
    """Attention as two matrix products in bfloat16.

    For the demo's hundred tokens it took a CPU a quarter of the fused kernel's time in bfloat16, and under half of its
    time in float32, forward and backward. The fused kernel pays off for long sequences.
    """
    q, k, v = (tensor.to(torch.bfloat16) for tensor in (q_BHND, k_BHMD, v_BHMD))
    scores_BHNM = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    out_BHND: Tensor = scores_BHNM.softmax(dim=-1).to(v.dtype) @ v
    return out_BHND.to(v_BHMD.dtype)
