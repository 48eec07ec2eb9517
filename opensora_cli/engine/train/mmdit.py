"""Training the video transformer on encoded clips of the procedural world, in all condition modes."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from opensora_cli.core.files import atomic_path
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
from opensora_cli.engine.train.flow import flow_target, get_batch_loss, noisy_latents, shifted_time
from opensora_cli.engine.train.vae import to_pixels
from opensora_cli.models.mmdit import MMDiT, MMDiTConfig
from opensora_cli.models.vae.hunyuan import HunyuanVAE
from opensora_cli.settings.train import MMDiTTrainSettings, SceneSettings

TextEncoder = Callable[[list[str]], tuple[Tensor, Tensor]]
"""Captions to (prompt embeddings (B,L,C), pooled prompt embeddings (B,V))."""


@dataclass(frozen=True)
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
    """

    def __init__(self, vae: HunyuanVAE, *, data: SceneSettings, settings: MMDiTTrainSettings) -> None:
        self._vae = vae
        self._data = data
        self._lengths = ReferenceLengths(video=settings.video_latent_frames, easy=settings.easy_latent_frames)
        self._modes = [condition_mode(name) for name in settings.mode_weights]
        weights = np.array(list(settings.mode_weights.values()))
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
        return EncodedClip(latents[0].half(), mask[0].half(), reference[0].half(), caption_scene(scene, rng))

    def _references(self, pixels_BCTHW: Tensor, mode: ConditionMode) -> list[Tensor]:
        parts = reference_parts(mode, lengths=self._lengths)
        cuts = [
            pixels_BCTHW[:, :, -part.num_frames :] if part.from_end else pixels_BCTHW[:, :, : part.num_frames]
            for part in parts
        ]
        return [self._vae.encode(cut)[0].float() for cut in cuts]


def _attention(q_BHND: Tensor, k_BHMD: Tensor, v_BHMD: Tensor, /) -> Tensor:
    """Attention as two matrix products in bfloat16.

    For the demo's hundred tokens this is four times as fast on a CPU, forward and backward, as the fused kernel, which
    pays off for long sequences.
    """
    q, k, v = (tensor.to(torch.bfloat16) for tensor in (q_BHND, k_BHMD, v_BHMD))
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    return (scores.softmax(dim=-1).to(v.dtype) @ v).to(v_BHMD.dtype)


class MMDiTTask:
    """Mean squared error of the velocity, on a ring of encoded clips into which every step puts a few new ones."""

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
        self.mmdit = MMDiT(config, attention=_attention)
        self.module: nn.Module = self.mmdit
        self._config = config
        self._clips = clips
        self._text = text
        self._settings = settings
        self._batch_size = batch_size
        self._reporter = reporter
        self._ring: list[EncodedClip] = []
        self._next = 0

    def loss(self, step: int, rng: np.random.Generator) -> tuple[Tensor, dict[str, float]]:
        """Return the loss of a batch out of the ring, and how many clips the ring holds."""
        self._refill(rng)
        batch = [self._ring[i] for i in rng.integers(len(self._ring), size=self._batch_size)]
        latents = torch.stack([clip.latents_CTHW for clip in batch]).float()
        mask = torch.stack([clip.mask_1THW for clip in batch]).float()
        reference = torch.stack([clip.reference_CTHW for clip in batch]).float()
        captions = ["" if rng.random() < self._settings.text_dropout else clip.caption for clip in batch]
        prompt_embeds, pooled = self._text(captions)

        patch = self._config.patch_size
        data = pack_latents(latents, patch)
        noise = torch.randn_like(data)
        frames, height, width = latents.shape[2:]
        shift = flow_shift_for(tokens_per_frame=height * width // 4, num_latent_frames=frames)
        t = shifted_time(torch.randn(len(batch)), shift=shift)
        velocity = self.mmdit(
            noisy_latents(data, noise, t, sigma_min=self._settings.sigma_min),
            position_ids_BN3=position_ids(len(batch), frames, height // patch, width // patch),
            timesteps_B=t,
            prompt_embeds_BLC=prompt_embeds,
            pooled_prompt_embeds_BV=pooled,
            conditioning_BNK=pack_conditioning(mask, reference, patch),
        )
        target = flow_target(data, noise, sigma_min=self._settings.sigma_min)
        return get_batch_loss(velocity, target), {"clips": float(len(self._ring))}

    def _refill(self, rng: np.random.Generator) -> None:
        if not self._ring:
            with self._reporter.stage("encode clips", total=self._settings.first_clips, unit="clip") as progress:
                for _ in range(self._settings.first_clips):
                    self._ring.append(self._clips.fresh(rng))
                    progress.advance()
        for _ in range(self._settings.fresh_clips_per_step):
            clip = self._clips.fresh(rng)
            if len(self._ring) < self._settings.cached_clips:
                self._ring.append(clip)
            else:
                self._ring[self._next] = clip
                self._next = (self._next + 1) % len(self._ring)

    def export(self, ema: nn.Module, folder: Path) -> None:
        """Write `transformer.safetensors` in half precision, which halves the file and changes no picture."""
        tensors = {name: value.half().contiguous() for name, value in ema.state_dict().items()}
        with atomic_path(folder / "transformer.safetensors") as temporary:
            save_file(tensors, temporary, metadata={"format": "pt"})
